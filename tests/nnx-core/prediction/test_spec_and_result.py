"""Declared probabilities of raw outputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from nnx import (
    PredictionResult,
    PredictionValidationError,
    ProbabilitySpec,
    TaskSpec,
    prediction_from_logits,
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("softmax",), "'categorical' or 'bernoulli', not 'softmax'"),
        (("categorical", 1.0), "must be an integer"),
        (("categorical", True), "must be an integer"),
        (("categorical", -1, "ab"), "sequence of non-empty names"),
        (("categorical", -1, ["a", "a"]), "must be distinct"),
        (("categorical", -1, []), "at least one"),
        (("categorical", -1, ["a", 1]), "sequence of non-empty names"),
        (("categorical", -1, {"a": 0, "b": 1}), "sequence of non-empty names"),
        (("categorical", -1, {"a", "b"}), "sequence of non-empty names"),
    ],
)
def test_a_wrong_declaration_is_refused(arguments, message):
    with pytest.raises(PredictionValidationError, match=message):
        ProbabilitySpec(*arguments)


def test_a_spec_round_trips_and_is_hashable():
    for spec in (ProbabilitySpec("bernoulli"), ProbabilitySpec("categorical", 1, ["x", "y"])):
        assert ProbabilitySpec.from_state(spec.state()) == spec
        assert hash(ProbabilitySpec.from_state(spec.state())) == hash(spec)
    assert ProbabilitySpec("bernoulli").state() == {"kind": "bernoulli", "class_axis": -1}
    with pytest.raises(PredictionValidationError, match="keys: kind, class_axis, labels"):
        ProbabilitySpec.from_state({"kind": "bernoulli", "axis": 1})


def test_the_class_axis_is_resolved_from_either_end():
    assert ProbabilitySpec("categorical").resolve_class_axis(3) == 2
    assert ProbabilitySpec("categorical", 1).resolve_class_axis(3) == 1
    for spec, ndim in (
        (ProbabilitySpec("categorical", 2), 2),
        (ProbabilitySpec("categorical"), 1),
        (ProbabilitySpec("categorical", 0), 2),  # can be built, and fits no output
    ):
        with pytest.raises(PredictionValidationError, match="not a class axis"):
            spec.resolve_class_axis(ndim)


def test_a_task_gives_its_own_spec():
    labels = ["a", "b"]
    assert TaskSpec.categorical(2, labels=labels).probability_spec() == ProbabilitySpec(
        "categorical", 1, labels
    )
    assert TaskSpec.multilabel(2).probability_spec() == ProbabilitySpec("bernoulli", 1)
    assert TaskSpec.regression(2).probability_spec() is None


def test_categorical_rows_sum_to_one_and_decode_by_argmax():
    logits = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32) * 30
    result = prediction_from_logits(logits, ProbabilitySpec("categorical", labels=list("abc")))
    expected = torch.as_tensor(logits).double().softmax(1).numpy()
    assert np.allclose(result.probabilities, expected, atol=1e-7)
    assert np.allclose(result.probabilities.sum(1), 1, atol=1e-6)
    assert np.array_equal(result.decoded, logits.argmax(1))
    assert result.class_indices is result.decoded
    assert np.array_equal(result.decoded_labels(), np.array(list("abc"))[logits.argmax(1)])
    assert (result.kind, result.class_axis, result.labels) == ("categorical", 1, ("a", "b", "c"))
    assert result.sample_ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert result.probabilities.dtype == np.float32


def test_a_rounding_tie_of_probabilities_does_not_change_a_decision():
    logits = np.array([[1000.0, 1000.0000001, 0.0]])
    result = prediction_from_logits(logits.astype(np.float64), ProbabilitySpec("categorical"))
    assert result.decoded.tolist() == [1]


def test_bernoulli_outputs_are_independent_and_have_no_class_indices():
    logits = torch.tensor([[0.0, -1.0, 800.0], [-800.0, 2.0, -0.0]])
    spec = ProbabilitySpec("bernoulli", labels=["a", "b", "c"])
    result = prediction_from_logits(logits, spec, sample_ids=[5, 9])
    assert np.allclose(result.probabilities, torch.sigmoid(logits).numpy())
    assert result.decoded.tolist() == [[1, 0, 1], [0, 1, 1]]
    assert result.decoded_labels().tolist() == [("a", "c"), ("b", "c")]
    assert result.sample_ids.tolist() == [5, 9]
    assert not hasattr(result, "class_indices")
    with pytest.raises(PredictionValidationError, match="no class indices"):
        result.class_indices  # noqa: B018


def test_another_class_axis_is_normalized():
    logits = np.random.default_rng(0).normal(size=(2, 3, 4))
    result = prediction_from_logits(logits, ProbabilitySpec("categorical", 1))
    assert np.allclose(result.probabilities.sum(1), 1)
    assert np.array_equal(result.decoded, logits.argmax(1))


@pytest.mark.parametrize(
    ("logits", "spec", "ids", "message"),
    [
        (np.zeros((2, 3)), ProbabilitySpec("categorical", labels=["a"]), None, "names 1 labels"),
        (np.zeros((2, 3)), ProbabilitySpec("categorical"), [1], "each of the 2 rows"),
        (np.zeros(3), ProbabilitySpec("categorical"), None, "not a class axis"),
        (np.zeros((2, 0)), ProbabilitySpec("categorical"), None, "class axis of the logits is empty"),
        (np.array([["a"]]), ProbabilitySpec("categorical"), None, "must be real numbers"),
        (np.zeros((2, 2), complex), ProbabilitySpec("categorical"), None, "must be real numbers"),
        (np.float64(1), ProbabilitySpec("bernoulli"), None, "must be real numbers"),
        (np.zeros((2, 2)), "categorical", None, "must be a ProbabilitySpec, not str"),
        (np.zeros((2, 2)), ProbabilitySpec("categorical", 0), None, "class_axis=0 is not a class axis"),
        (np.zeros((2, 1)), ProbabilitySpec("categorical"), None, "have one class on axis 1"),
        (np.zeros((2, 1)), ProbabilitySpec("categorical", labels=["a"]), None, "have one class"),
        (np.zeros((2, 2)), ProbabilitySpec("categorical"), [0.0, 1.0], "integers or text, not float64"),
        (np.zeros((2, 2)), ProbabilitySpec("categorical"), [True, False], "integers or text, not bool"),
        (np.array([[0.0, -np.inf]]), ProbabilitySpec("categorical"), None, r"logits\[0, 1\] is -inf"),
        (np.array([[0.0], [np.nan]]), ProbabilitySpec("bernoulli"), None, r"logits\[1, 0\] is nan"),
    ],
)  # fmt: skip
def test_logits_that_do_not_fit_are_refused(logits, spec, ids, message):
    with pytest.raises(PredictionValidationError, match=message):
        prediction_from_logits(logits, spec, sample_ids=ids)


def test_a_result_without_labels_says_so():
    result = prediction_from_logits(np.zeros((1, 2)), ProbabilitySpec("categorical"))
    assert isinstance(result, PredictionResult)
    with pytest.raises(PredictionValidationError, match="has no labels; declare them"):
        result.decoded_labels()


@pytest.mark.parametrize(
    ("logits", "dtype"),
    [
        (torch.zeros(2, 3, dtype=torch.bfloat16), np.float32),
        (np.zeros((2, 3), np.float16), np.float16),
        (np.zeros((2, 3), int), np.float64),
        (np.zeros((2, 3), ">f4"), ">f4"),
        (np.zeros((3, 2), np.float32).T[::-1], np.float32),
        (np.zeros((2, 3), np.longdouble), np.float64),
    ],
)
def test_any_real_array_has_probabilities(logits, dtype):
    if isinstance(logits, np.ndarray):
        logits.flags.writeable = False
    result = prediction_from_logits(logits, ProbabilitySpec("categorical"))
    assert result.probabilities.dtype == dtype
    assert np.allclose(result.probabilities, 1 / 3, atol=1e-3)


def test_one_yes_or_no_output_has_one_label():
    spec = ProbabilitySpec("bernoulli", labels=["spam"])
    result = prediction_from_logits(np.array([[2.0], [-2.0]]), spec, sample_ids=["m1", "m2"])
    assert result.decoded_labels().tolist() == [("spam",), ()]
    assert result.sample_ids.tolist() == ["m1", "m2"]
