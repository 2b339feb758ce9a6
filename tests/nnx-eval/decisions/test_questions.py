"""Questions, and the one validator of answers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nnx.decisions import (
    Boolean,
    BooleanResult,
    Capabilities,
    Choice,
    InvalidDecisionRequest,
    InvalidDecisionResponse,
    Option,
    Score,
    UnsupportedCapability,
    question_from_state,
    validate_response,
)

ANIMAL = Choice("Which animal?", (Option("cat", "A cat"), Option("dog", "A dog")))
QUALITY = Score("How good?", (Option("1", "bad"), Option("2", "fair"), Option("3", "good")))
RAIN = Boolean("Is it raining?")
GOLDEN = Path(__file__).parents[3] / ".." / "shared" / "vectors" / "behaviour.json"


def test_digests_states_and_views_are_those_of_the_original() -> None:
    if not GOLDEN.exists():
        pytest.skip("needs shared/vectors/behaviour.json")
    wanted = json.loads(GOLDEN.read_text())["eval_decisions"]
    questions = [ANIMAL, Choice(ANIMAL.prompt, ANIMAL.options[::-1]), RAIN, QUALITY]
    assert [q.digest() for q in questions] == wanted["digests"]
    assert [q.state() for q in questions] == wanted["states"]
    assert [q.model_view() for q in questions] == wanted["views"]


def test_order_and_wording_make_another_question_and_a_view_has_no_ids() -> None:
    reworded = Choice("Which animal?", (Option("cat", "A tom"), Option("dog", "A dog")))
    digests = {q.digest() for q in (ANIMAL, Choice(ANIMAL.prompt, ANIMAL.options[::-1]), reworded)}
    assert len(digests) == 3
    view = Choice("Which?", (Option("id-1", "A cat"), Option("id-2", "A dog"))).model_view()
    assert "id-" not in json.dumps(view)


@pytest.mark.parametrize("question", [ANIMAL, QUALITY, RAIN])
def test_a_question_is_its_state(question) -> None:
    assert question_from_state(json.loads(json.dumps(question.state()))) == question


@pytest.mark.parametrize(
    "make",
    [
        lambda: Choice("", ANIMAL.options),
        lambda: Choice("Which?", ANIMAL.options[:1]),
        lambda: Choice("Which?", (Option("a", "x"), Option("a", "y"))),
        lambda: Choice("Which?", "ab"),
        lambda: Score("How?", [("1", "bad"), ("2", "good")]),
        lambda: Option("", "x"),
        lambda: Option("a", " "),
        lambda: Boolean(None),
        lambda: question_from_state({"kind": "rank", "prompt": "x"}),
        lambda: question_from_state({"kind": "choice", "prompt": "x", "levels": []}),
        lambda: question_from_state({"kind": "boolean", "prompt": "x", "options": []}),
        lambda: question_from_state({"kind": "choice", "prompt": "x", "options": ["a", "b"]}),
        lambda: question_from_state([]),
    ],
)
def test_what_cannot_be_asked_is_refused(make) -> None:
    with pytest.raises(InvalidDecisionRequest):
        make()


def test_a_keyed_answer_is_put_in_the_questions_order() -> None:
    result = validate_response(ANIMAL, {"dog": 0.75, "cat": 0.25}, provider="p", raw={"x": 1})
    assert result.distribution == (("cat", 0.25), ("dog", 0.75))
    assert (result.top, result.provider, result.raw) == ("dog", "p", {"x": 1})
    assert result.question_digest == ANIMAL.digest()
    tied = validate_response(ANIMAL, [("dog", 0.5), ("cat", 0.5)])
    assert tied.top == "cat"


def test_a_score_is_a_place_on_the_scale_beside_the_vendors_own() -> None:
    result = validate_response(QUALITY, {"1": 0.2, "2": 0.3, "3": 0.5}, vendor_score=7.5)
    assert result.expected_index == pytest.approx(0.3 + 2 * 0.5)
    assert result.vendor_score == 7.5


def test_a_boolean_is_one_probability() -> None:
    for response in (0.25, {"p_true": 0.25}, {"true": 0.25, "false": 0.75}):
        result = validate_response(RAIN, response)
        assert isinstance(result, BooleanResult)
        assert (result.p_true, result.p_false) == (0.25, 0.75)


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ({"cat": 1.0}, "lacks 'dog'"),
        ([("cat", 0.5), ("cat", 0.5)], "answered twice"),
        ({"cat": 0.5, "cow": 0.5}, "no option"),
        ([0.5, 0.5], "unlabelled"),
        ({"cat": 0.5, "dog": 0.4}, "not renormalized"),
        ({"cat": 1.5, "dog": -0.5}, "outside"),
        ({"cat": math.nan, "dog": 0.5}, "finite"),
        ({"cat": True, "dog": 0.0}, "finite number"),
        ({"cat": "1", "dog": 0.0}, "finite number"),
        ("cat", "maps option ids"),
        (None, "maps option ids"),
    ],
)
def test_a_malformed_answer_is_refused_and_never_renormalized(response, message) -> None:
    with pytest.raises(InvalidDecisionResponse, match=message):
        validate_response(ANIMAL, response)


@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=6), st.randoms())
def test_any_order_of_an_answer_gives_the_same_result(weights, random) -> None:
    options = tuple(Option(f"o{i}", f"option {i}") for i in range(len(weights)))
    question = Choice("Which?", options)
    pairs = [(f"o{i}", w / sum(weights)) for i, w in enumerate(weights)]
    wanted = validate_response(question, pairs)
    random.shuffle(pairs)
    assert validate_response(question, pairs) == wanted == validate_response(question, dict(pairs))


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({"primitives": {"boolean"}}, {}, "no choice questions"),
        ({}, {"modality": "image"}, "reads text, not image"),
        ({"max_batch": 2}, {"batch_size": 3}, "2 rows at a time"),
        ({"labels": ("cat", "cow")}, {}, "exactly"),
        ({"labels": ("a", "b")}, {"label_ids": ["a", "a"]}, "exactly"),
        ({"inference": False}, {}, "does not answer"),
    ],
)
def test_a_capability_is_checked_before_a_call(changes, arguments, message) -> None:
    has = Capabilities(**{"primitives": {"choice"}, "modalities": {"text"}, **changes})
    with pytest.raises(UnsupportedCapability, match=message):
        has.check(ANIMAL, **{"modality": "text", "batch_size": 1, **arguments})
    Capabilities({"choice"}, {"text"}, labels=("dog", "cat")).check(
        ANIMAL, modality="text", batch_size=1
    )
    Capabilities({"choice"}, {"text"}, labels=("x", "y")).check(
        ANIMAL, modality="text", batch_size=1, label_ids=["y", "x"]
    )
