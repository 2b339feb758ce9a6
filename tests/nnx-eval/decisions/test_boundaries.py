"""Failures as values where decisions meet the rest of a program."""

from __future__ import annotations

import pytest
from nnx.abstention import AbstentionPolicy
from nnx.decisions import (
    Capabilities,
    Choice,
    InvalidDecisionRequest,
    InvalidDecisionResponse,
    JevMalformedResponse,
    ProviderFailure,
    UnsupportedCapability,
    validate_response,
)
from nnx.result import Err, Ok, UnwrapError, decide_result, validate_decision_request_result

OPTIONS = [["cat", "A cat"], ["dog", "A dog"]]
ANIMAL = validate_decision_request_result("choice", "Which?", OPTIONS).unwrap()


class Provider:
    name = "made"

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    def capabilities(self) -> Capabilities:
        return Capabilities({"choice"}, {"text"})

    def decide(self, question, inputs):
        if self.error is not None:
            raise self.error
        return [validate_response(question, {"cat": 0.75, "dog": 0.25})]


def test_plain_data_becomes_a_question_or_an_error_value() -> None:
    assert isinstance(ANIMAL, Choice)
    assert validate_decision_request_result("boolean", "Yes?").unwrap().prompt == "Yes?"
    assert validate_decision_request_result("score", "How?", OPTIONS).unwrap().option_ids == (
        "cat", "dog",
    )  # fmt: skip
    for arguments in [("choice", "", OPTIONS), ("choice", "x"), ("rank", "x"), ("choice", "x", [])]:
        result = validate_decision_request_result(*arguments)
        assert isinstance(result, Err)
        assert result.error.code == "invalid_decision_request"
        assert result.error.where == "validate_decision_request"
        assert isinstance(result.error.cause, InvalidDecisionRequest)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidDecisionResponse("x"), "invalid_decision_response"),
        (JevMalformedResponse("x"), "invalid_decision_response"),
        (ProviderFailure("x"), "provider_failure"),
        (UnsupportedCapability("x"), "unsupported_capability"),
    ],
)
def test_declared_failures_become_values(error, code) -> None:
    result = decide_result(Provider(error), ANIMAL, "x")
    assert isinstance(result, Err)
    assert (result.error.code, result.error.where) == (code, "decide")
    assert result.error.context["provider"] == "made"
    assert result.error.cause is error
    with pytest.raises(UnwrapError) as caught:
        result.unwrap()
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [RuntimeError("x"), KeyboardInterrupt(), ValueError("x")])
def test_everything_else_goes_through(error) -> None:
    with pytest.raises(type(error)):
        decide_result(Provider(error), ANIMAL, "x")


def test_an_abstention_is_a_success() -> None:
    policy = AbstentionPolicy("max_probability", 0.9, ("cat", "dog"), "m:1", "val")
    result = decide_result(Provider(), ANIMAL, "x", policy=policy, model_id="m:1")
    assert isinstance(result, Ok)
    assert result.value[0].abstained
    assert decide_result(Provider(), ANIMAL, "x").unwrap()[0].top == "cat"
    with pytest.raises(ValueError, match="together"):
        decide_result(Provider(), ANIMAL, "x", policy=policy)


def test_requests_and_decisions_bind() -> None:
    def asked(kind, prompt, options):
        return validate_decision_request_result(kind, prompt, options).bind(
            lambda question: decide_result(Provider(), question, "x")
        )

    assert asked("choice", "Which?", OPTIONS).unwrap()[0].top == "cat"
    assert asked("choice", "", OPTIONS).error.code == "invalid_decision_request"
