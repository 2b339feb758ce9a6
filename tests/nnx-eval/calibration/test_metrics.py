"""Likelihood, Brier score and reliability, against independent formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from made_logits import overconfident
from nnx.calibration import (
    CalibrationError,
    CalibrationMetrics,
    ReliabilityBin,
    brier_score,
    expected_calibration_error,
    negative_log_likelihood,
    reliability_bins,
)
from nnx.monitors.builtin import Brier, NegativeLogLikelihood
from scipy.special import softmax
from sklearn.calibration import calibration_curve
from sklearn.metrics import log_loss
from torchmetrics.functional.classification import multiclass_calibration_error


def made(rows: int = 400):
    logits, targets = overconfident(rows)
    return softmax(logits, axis=1), targets


def test_they_are_the_named_metrics_and_scikit_learns() -> None:
    p, y = made()
    assert negative_log_likelihood(p, y) == pytest.approx(log_loss(y, p), abs=1e-12)
    for ours, theirs in ((negative_log_likelihood, NegativeLogLikelihood), (brier_score, Brier)):
        accumulator = theirs()
        accumulator.update(torch.from_numpy(y), torch.from_numpy(p))
        assert ours(p, y) == pytest.approx(accumulator.result(), abs=1e-12)
    assert brier_score(np.eye(2), [1, 0]) == 2.0
    assert brier_score(np.eye(2), [0, 1]) == 0.0


def test_a_true_class_of_probability_zero_is_floored_or_infinite() -> None:
    p, y = np.array([[1.0, 0.0]]), [1]
    assert negative_log_likelihood(p, y) == pytest.approx(-math.log(1e-12))
    assert negative_log_likelihood(p, y, epsilon=None) == math.inf
    assert negative_log_likelihood(p, [0]) == 0.0
    exact = CalibrationMetrics.of(p, y, epsilon=None)
    assert CalibrationMetrics.from_state(exact.state()) == exact


def test_ece_is_that_of_torchmetrics() -> None:
    p, y = made()
    for n_bins in (1, 5, 10, 15):
        wanted = multiclass_calibration_error(
            torch.from_numpy(p), torch.from_numpy(y), num_classes=3, n_bins=n_bins
        )
        found = expected_calibration_error(reliability_bins(p, y, n_bins=n_bins))
        assert found == pytest.approx(float(wanted), abs=1e-6)


def test_bins_are_those_of_a_reliability_curve() -> None:
    p, y = made()
    right, confidence = p.argmax(1) == y, p.max(1)
    accuracy, mean = calibration_curve(right, confidence, n_bins=10)
    bins = [b for b in reliability_bins(p, y) if b.count]
    np.testing.assert_allclose([b.accuracy for b in bins], accuracy)
    np.testing.assert_allclose([b.confidence for b in bins], mean)


def test_an_inner_edge_belongs_to_the_upper_bin_and_one_to_the_last() -> None:
    p = np.array([[0.5, 0.5], [0.75, 0.25], [1.0, 0.0], [0.0, 1.0]])
    bins = reliability_bins(p, [0, 0, 0, 0], n_bins=4)
    assert [b.count for b in bins] == [0, 0, 1, 3]
    assert bins[0] == ReliabilityBin(0.0, 0.25, 0, None, None)
    assert bins[3].confidence == pytest.approx(2.75 / 3)
    assert bins[3].accuracy == pytest.approx(2 / 3)
    assert (bins[3].lower, bins[3].upper) == (0.75, 1.0)


def test_no_rows_have_bins_but_no_error() -> None:
    bins = reliability_bins(np.zeros((0, 3)), np.zeros(0, dtype=int))
    assert [b.count for b in bins] == [0] * 10
    assert expected_calibration_error(bins) is None


@pytest.mark.parametrize(
    ("probabilities", "message"),
    [
        ([[0.5, 0.6]], "sums to 1.1"),
        ([[1.5, -0.5]], "no probability"),
        ([[np.nan, 1.0]], "no probability"),
        ([[1, 0]], "floats"),
        ([[1.0]], "C >= 2"),
        (np.zeros((0, 2)), "no rows"),
    ],
)
def test_what_is_no_distribution_is_refused(probabilities, message) -> None:
    with pytest.raises(CalibrationError, match=message):
        brier_score(probabilities, np.zeros(len(probabilities), dtype=int))


@pytest.mark.parametrize("epsilon", [0, 1, -1, math.nan, "x"])
def test_a_floor_is_a_probability(epsilon) -> None:
    with pytest.raises(CalibrationError, match="epsilon"):
        negative_log_likelihood([[0.5, 0.5]], [0], epsilon=epsilon)
