"""Vector, matrix and isotonic calibrators against scikit-learn, and the choice among them."""

from __future__ import annotations

import numpy as np
import pytest
from made_logits import BOUND, LABELS, SPLITS, overconfident
from nnx.calibration import (
    CalibrationError,
    CalibrationMismatchError,
    FittedCalibrator,
    TemperatureCalibrator,
    calibrator_from_state,
    choose_calibrator,
    fit_calibrator,
)
from scipy.optimize import minimize
from scipy.special import log_softmax, softmax
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression


def fitted(method: str, **changes):
    logits, targets = overconfident()
    return fit_calibrator(logits, targets, method=method, **{**BOUND, **SPLITS, **changes})


def test_vector_scaling_is_the_optimum_that_scipy_finds() -> None:
    logits, targets = overconfident()
    rows = np.arange(len(targets))

    def loss(v):
        return (
            -log_softmax(logits * v[:3] + v[3:], axis=1)[rows, targets].mean()
            + 1e-3 * (v[3:] ** 2).sum()
        )

    wanted = minimize(loss, np.r_[np.ones(3), np.zeros(3)], tol=1e-12)
    found = fitted("vector")
    np.testing.assert_allclose(found.parameters["scale"], wanted.x[:3], atol=1e-4)
    np.testing.assert_allclose(found.parameters["bias"], wanted.x[3:], atol=1e-4)


def test_matrix_scaling_without_a_penalty_is_multinomial_regression() -> None:
    logits, targets = overconfident()
    theirs = LogisticRegression(C=np.inf, tol=1e-10, max_iter=2000).fit(logits, targets)
    ours = fitted("matrix", penalty=0)
    np.testing.assert_allclose(
        ours.transform(logits, **BOUND).calibrated_probabilities, theirs.predict_proba(logits),
        atol=1e-4,
    )  # fmt: skip


def test_isotonic_is_scikit_learns_one_class_against_the_rest() -> None:
    logits, targets = overconfident()
    logits = np.round(logits, 1)  # ties
    raw, held = softmax(logits, axis=1), overconfident(200, seed=4)[0]
    wanted = np.stack([
        IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip")
        .fit(raw[:, c], targets == c).predict(softmax(held, axis=1)[:, c])
        for c in range(3)
    ], axis=1)  # fmt: skip
    wanted /= wanted.sum(1, keepdims=True)
    ours = fit_calibrator(logits, targets, method="isotonic", **BOUND, **SPLITS)
    out = ours.transform(held, **BOUND)
    np.testing.assert_allclose(out.calibrated_probabilities, wanted, atol=1e-9)
    np.testing.assert_array_equal(out.decoded, held.argmax(1))
    changed = np.take_along_axis(wanted, held.argmax(1)[:, None], 1)[:, 0] < wanted.max(1) - 1e-12
    np.testing.assert_array_equal(out.argmax_changed, changed)


@pytest.mark.parametrize("method", ["vector", "matrix", "isotonic"])
def test_each_improves_held_out_rows_is_bound_and_reloads_exactly(method) -> None:
    calibrator, (logits, targets) = fitted(method), overconfident(500, seed=3)
    report = calibrator.report(logits, targets, split_id="test", **BOUND)
    assert report.after.ece < report.before.ece
    assert report.temperature is None
    assert type(report).from_json(report.to_json()) == report
    again = FittedCalibrator.from_json(calibrator.to_json())
    assert (again, again.id) == (calibrator, calibrator.id)
    np.testing.assert_array_equal(again.calibrate(logits), calibrator.calibrate(logits))
    assert calibrator_from_state(again.state()) == calibrator
    with pytest.raises(CalibrationMismatchError):
        calibrator.transform(logits, model_id="m:1", labels=LABELS[::-1])


@pytest.mark.parametrize("method", ["vector", "matrix", "isotonic"])
def test_extremes_stay_probabilities(method) -> None:
    big = np.array([[1e4, -1e4, 0], [0, 0, 0], [-1e4, 1e4, 1e4]], dtype=np.float32)
    out = fitted(method).transform(big, **BOUND).calibrated_probabilities
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out.sum(1), 1)


def test_a_class_absent_from_the_rows_has_no_chance_and_is_no_error() -> None:
    logits, targets = overconfident()
    seen = targets != 2
    out = fit_calibrator(logits[seen], targets[seen], method="isotonic", **BOUND, **SPLITS)
    assert (out.calibrate(logits)[:, 2] == 0).mean() > 0.9


def test_the_choice_is_by_rows_left_out_and_keeps_the_numbers() -> None:
    logits, targets = overconfident(900)
    choice = choose_calibrator(logits, targets, **BOUND, **SPLITS)
    assert set(choice.scores) == {"none", "temperature", "vector", "matrix", "isotonic"}
    assert choice.method == min(choice.scores, key=choice.scores.get) == "temperature"
    assert isinstance(choice.calibrator, TemperatureCalibrator)
    assert choice.scores["isotonic"] > choice.scores["temperature"]
    honest, truth = overconfident(300, factor=1.0, seed=2)
    again = choose_calibrator(honest, truth, methods=["isotonic"], **BOUND, **SPLITS)
    assert (again.method, again.calibrator) == ("none", None)
    separable = choose_calibrator(np.eye(3)[[0, 1, 2] * 9], [0, 1, 2] * 9, methods=["temperature"],
                                  **BOUND, **SPLITS)  # fmt: skip
    assert "separable" in separable.failed["temperature"]
    with pytest.raises(CalibrationError, match="too few"):
        choose_calibrator(honest[:4], truth[:4], **BOUND, **SPLITS)


@pytest.mark.parametrize(
    "parameters",
    [{}, {"scale": [1, 2], "bias": [0, 0, 0]}, {"scale": [1, 2, "x"], "bias": [0, 0, 0]}],
)
def test_parameters_that_do_not_fit_are_refused(parameters) -> None:
    with pytest.raises(CalibrationError):
        FittedCalibrator.from_state({**fitted("vector").state(), "parameters": parameters})
