"""Yes/no outputs and finer estimates, against scikit-learn and hand arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from made_logits import SPLITS, overconfident
from nnx.calibration import (
    BinaryCalibrator,
    CalibrationError,
    CalibrationFitError,
    CalibrationMismatchError,
    adaptive_bins,
    bootstrap_interval,
    brier_score,
    classwise_ece,
    debiased_calibration_error,
    expected_calibration_error,
    fit_binary,
)
from scipy.special import expit, log_expit, softmax
from sklearn.calibration import _sigmoid_calibration, calibration_curve
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

WHERE = {"model_id": "m:1", **SPLITS}


def made(rows: int = 500, seed: int = 0):
    rng = np.random.default_rng(seed)
    honest = rng.normal(size=rows) * 1.5
    return honest * 3 + 0.5, (rng.random(rows) < expit(honest)).astype(int)


def test_platt_is_scikit_learns_sigmoid() -> None:
    logits, on = made()
    a, b = _sigmoid_calibration(logits, on)  # of the form 1 / (1 + exp(a f + b))
    ours = fit_binary(logits, on, labels=["rain"], **WHERE).parameters["rain"]
    assert ours["a"] == pytest.approx(-a, rel=1e-3)
    assert ours["b"] == pytest.approx(-b, abs=1e-3)


def test_beta_is_logistic_regression_on_the_two_logarithms() -> None:
    logits, on = made()
    columns = np.stack([log_expit(logits), -log_expit(-logits)], axis=1)
    theirs = LogisticRegression(C=np.inf, tol=1e-10, max_iter=5000).fit(columns, on)
    ours = fit_binary(logits, on, labels=["rain"], method="beta", **WHERE)
    assert (theirs.coef_ >= 0).all()
    np.testing.assert_allclose(
        ours.transform(logits, model_id="m:1")[:, 0], theirs.predict_proba(columns)[:, 1], atol=1e-4
    )


def test_isotonic_is_scikit_learns() -> None:
    logits, on = made()
    theirs = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(expit(logits), on)
    ours = fit_binary(logits, on, labels=["rain"], method="isotonic", **WHERE)
    grid = np.linspace(-9, 9, 301)
    np.testing.assert_allclose(
        ours.transform(grid, model_id="m:1")[:, 0], theirs.predict(expit(grid)), atol=1e-9
    )


@pytest.mark.parametrize("method", ["platt", "beta", "isotonic"])
def test_each_label_has_its_own_curve_and_the_document_is_exact(method) -> None:
    (a, ya), (b, yb) = made(seed=1), made(seed=2)
    logits, on = np.stack([a, -b], axis=1), np.stack([ya, 1 - yb], axis=1)
    both = fit_binary(logits, on, labels=["a", "b"], method=method, **WHERE)
    alone = fit_binary(a, ya, labels=["a"], method=method, **WHERE)
    assert both.parameters["a"] == alone.parameters["a"]
    again = BinaryCalibrator.from_json(both.to_json())
    assert (again, again.id) == (both, both.id)
    with pytest.raises(CalibrationMismatchError):
        both.transform(logits, model_id="m:1", labels=["b", "a"])
    extreme = both.transform([[1e4, -1e4], [0, 0]], model_id="m:1", labels=["a", "b"])
    assert ((extreme >= 0) & (extreme <= 1)).all()


def test_an_output_without_both_answers_has_nothing_to_fit() -> None:
    with pytest.raises(CalibrationFitError, match="'rain' is always off"):
        fit_binary([1.0, 2.0], [0, 0], labels=["rain"], **WHERE)
    assert fit_binary([-1.0, 1.0], [0, 1], labels=["rain"], **WHERE).parameters["rain"]["a"] > 0
    with pytest.raises(CalibrationError, match="0 or 1"):
        fit_binary([1.0, 2.0], [0, 2], labels=["rain"], **WHERE)


# -- finer estimates --------------------------------------------------------------------------------


def test_adaptive_bins_are_a_quantile_curve_and_never_part_ties() -> None:
    logits, targets = overconfident(400)
    p = softmax(logits, axis=1)
    bins = adaptive_bins(p, targets, n_bins=8)
    assert [b.count for b in bins] == [50] * 8
    accuracy, _ = calibration_curve(p.argmax(1) == targets, p.max(1), n_bins=8, strategy="quantile")
    np.testing.assert_allclose([b.accuracy for b in bins], accuracy, atol=0.03)
    tied = adaptive_bins(np.full((9, 2), 0.5), [0] * 9, n_bins=4)
    assert sum(b.count for b in tied) == 9
    assert len([b for b in tied if b.count]) == 1
    assert adaptive_bins([[1.0, 0.0], [1.0, 0.0]], [0, 1])[-1].accuracy == 0.5


def test_each_class_has_its_own_error() -> None:
    p = np.array([[0.8, 0.2], [0.8, 0.2], [0.8, 0.2], [0.8, 0.2], [0.8, 0.2]])
    assert classwise_ece(p, [0, 0, 0, 0, 1]) == pytest.approx((0.0, 0.0))
    assert classwise_ece(p, [1, 1, 1, 1, 1]) == pytest.approx((0.8, 0.8))


def test_the_debiased_error_of_a_calibrated_model_is_near_zero() -> None:
    plain, debiased = [], []
    for seed in range(40):
        logits, targets = overconfident(300, factor=1.0, seed=seed)
        p = softmax(logits, axis=1)
        bins = adaptive_bins(p, targets, n_bins=15)
        plain.append(sum(b.count * (b.accuracy - b.confidence) ** 2 for b in bins) / 300)
        debiased.append(debiased_calibration_error(p, targets) ** 2)
    assert np.mean(debiased) < np.mean(plain) / 2
    over = softmax(overconfident(3000)[0], axis=1)
    truth = overconfident(3000)[1]
    ece = expected_calibration_error(adaptive_bins(over, truth, n_bins=15))
    assert debiased_calibration_error(over, truth) == pytest.approx(ece, abs=0.05)


def test_a_bootstrap_interval_is_about_two_standard_errors_and_repeats_itself() -> None:
    logits, targets = overconfident(400)
    p = softmax(logits, axis=1)
    state = np.random.get_state()[1].copy()
    found = bootstrap_interval(brier_score, p, targets, draws=300, seed=3)
    assert found == bootstrap_interval(brier_score, p, targets, draws=300, seed=3)
    np.testing.assert_array_equal(np.random.get_state()[1], state)
    rows = ((p - np.eye(3)[targets]) ** 2).sum(1)
    assert found.estimate == pytest.approx(rows.mean())
    assert found.upper - found.lower == pytest.approx(2 * 1.96 * rows.std() / 20, rel=0.2)
