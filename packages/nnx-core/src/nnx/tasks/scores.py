"""Classification scores from integer counts, in NumPy alone.

Every figure equals scikit-learn's with ``zero_division=0``: a class average
runs over the labels that occur in the targets or the predictions, an indicator
average over all of the labels. No table of classes by classes is ever made:
three counts per class (true positives, predicted, actual) are enough.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

AVERAGES = ("macro", "micro", "weighted", "binary")

Counts = NDArray[np.int64]


class Scores(NamedTuple):
    """The four classification figures; all ``None`` when nothing was scored."""

    accuracy: float | None
    f1: float | None
    recall: float | None
    precision: float | None


NOTHING = Scores(None, None, None, None)


def classification_scores(y_true: Any, y_pred: Any, average: str = "macro") -> Scores:
    """Scores of decoded predictions.

    ``y_true`` and ``y_pred`` are both ``(N,)`` (or ``(N, 1)``) class labels of
    any kind, or both ``(N, L)`` 0/1 indicators, whose accuracy is that of
    complete rows. ``average`` is ``"macro"``, ``"micro"``, ``"weighted"`` or
    ``"binary"`` (the class 1 of at most two labels; all indicators pooled).
    Raises ``ValueError`` on other shapes, differing lengths and continuous
    values.
    """
    check_average(average)
    true, predicted = _labels(y_true, "targets"), _labels(y_pred, "predictions")
    if true.shape != predicted.shape:
        raise ValueError(
            f"targets of shape {true.shape} cannot be scored against predictions of shape "
            f"{predicted.shape}: pass class labels for both or indicators for both"
        )
    if not len(true):
        return NOTHING
    if true.ndim == 2:
        hit = true & predicted
        counts = (hit.sum(0), predicted.sum(0), true.sum(0))
        pooled = "micro" if average == "binary" else average
        return Scores(float((true == predicted).all(1).mean()), *averaged(*counts, pooled))
    labels, codes = np.unique(np.concatenate([true, predicted]), return_inverse=True)
    true, predicted = codes[: len(true)], codes[len(true) :]
    hits = true == predicted
    size = len(labels)
    counts = (
        np.bincount(true[hits], minlength=size),
        np.bincount(predicted, minlength=size),
        np.bincount(true, minlength=size),
    )
    if average == "binary":
        check_binary(len(labels))
        counts = tuple(c[labels == 1] for c in counts)
        average = "micro"
    return Scores(float(hits.mean()), *averaged(*counts, average))


def check_average(average: str) -> None:
    """Refuse an average that is not one of :data:`AVERAGES`."""
    if average not in AVERAGES:
        raise ValueError(f"average must be one of {', '.join(AVERAGES)}, not {average!r}")


def check_binary(classes: int) -> None:
    """Refuse the score of class 1 where there is a class beside it and its opposite."""
    if classes > 2:
        raise ValueError(
            f"the average 'binary' scores class 1 against class 0, but there are {classes} "
            'classes; choose "macro", "micro" or "weighted"'
        )


def ratio(numerator: Any, denominator: Any) -> NDArray[np.float64]:
    """``numerator / denominator``, 0 where the denominator is 0."""
    numerator, denominator = np.asarray(numerator, dtype=np.float64), np.asarray(denominator)
    out = np.zeros(np.broadcast_shapes(numerator.shape, denominator.shape))
    return np.divide(numerator, denominator, out=out, where=denominator != 0)


def averaged(
    true_positive: Counts, predicted: Counts, actual: Counts, average: str = "macro"
) -> tuple[float, float, float]:
    """``(f1, recall, precision)`` over the last axis of per-class counts, each ``(C,)``.

    The caller drops classes that occur nowhere when they should not count.
    """
    if average == "micro":
        true_positive, predicted, actual = (
            np.asarray([c.sum()]) for c in (true_positive, predicted, actual)
        )
    figures = _figures(true_positive, predicted, actual)
    if average == "weighted":
        total = actual.sum()
        f1, recall, precision = (
            float(np.multiply(figure, actual).sum() / total) if total else 0.0 for figure in figures
        )
    else:
        f1, recall, precision = figures.mean(-1).tolist()
    return f1, recall, precision


def _figures(true_positive: Counts, predicted: Counts, actual: Counts) -> NDArray[np.float64]:
    """F1, recall and precision of counts of one shape, stacked in front."""
    return ratio(
        np.array((2 * true_positive, true_positive, true_positive)),
        np.array((predicted + actual, actual, predicted)),
    )


def class_scores(
    true_positive: Counts, predicted: Counts, actual: Counts, average: str = "macro"
) -> Scores:
    """Scores of single-label counts, each ``(C,)``; absent classes are left out."""
    present = (predicted + actual) > 0
    if not present.any():
        return NOTHING
    accuracy = float(true_positive.sum() / actual.sum())
    if average == "binary":
        check_binary(int(np.flatnonzero(present)[-1]) + 1)
        present, average = np.arange(len(present)) == 1, "micro"
    counts = (true_positive[present], predicted[present], actual[present])
    return Scores(accuracy, *averaged(*counts, average))


def grouped_class_scores(
    true: Counts, predicted: Counts, group: Counts, n_groups: int
) -> NDArray[np.float64]:
    """Macro scores of many groups of samples at once: ``(n_groups, 4)``.

    ``true``, ``predicted`` and ``group`` are ``(N,)``; ``group`` is sorted and
    in ``[0, n_groups)``. A row is (accuracy, f1, recall, precision), NaN for a
    group without samples.
    """
    out = np.full((n_groups, 4), np.nan)
    if not len(true):
        return out
    hits = true == predicted
    cells, true_positive, predicted_n, actual_n = _cells(true, predicted, group, hits, n_groups)
    samples = np.bincount(group, minlength=n_groups)
    scored = samples > 0
    correct = np.bincount(group[hits], minlength=n_groups)
    out[scored, 0] = correct[scored] / samples[scored]
    # `cells` is sorted by group, so a group's classes are one run of it.
    starts = np.searchsorted(cells, np.flatnonzero(scored))
    sizes = np.diff(np.append(starts, len(cells)))
    figures = _figures(true_positive, predicted_n, actual_n)
    out[scored, 1:] = (np.add.reduceat(figures, starts, axis=1) / sizes).T
    return out


def _cells(
    true: Counts, predicted: Counts, group: Counts, hits: NDArray[np.bool_], n_groups: int
) -> tuple[Counts, Counts, Counts, Counts]:
    """Counts of each (group, class) that occurs: its group, and its three counts."""
    low = min(true.min(), predicted.min())
    span = int(max(true.max(), predicted.max())) - int(low) + 1
    if span * n_groups > max(8 * len(true), 1 << 16):  # sparse: only the cells that occur
        labels, codes = np.unique(np.concatenate([true, predicted]), return_inverse=True)
        span, low = len(labels), 0
        true, predicted = codes[: len(true)], codes[len(true) :]
    true_key = group * span + (true - low)
    predicted_key = group * span + (predicted - low)
    if span * n_groups <= max(8 * len(true), 1 << 16):
        size = span * n_groups
        actual_n = np.bincount(true_key, minlength=size)
        predicted_n = np.bincount(predicted_key, minlength=size)
        keys = np.flatnonzero(actual_n + predicted_n)
        true_positive = np.bincount(true_key[hits], minlength=size)
        return keys // span, true_positive[keys], predicted_n[keys], actual_n[keys]
    keys, codes = np.unique(np.concatenate([true_key, predicted_key]), return_inverse=True)
    true_code, predicted_code = codes[: len(true)], codes[len(true) :]
    size = len(keys)
    return (
        keys // span,
        np.bincount(true_code[hits], minlength=size),
        np.bincount(predicted_code, minlength=size),
        np.bincount(true_code, minlength=size),
    )


def grouped_indicator_scores(
    true_positive: Counts, predicted: Counts, actual: Counts
) -> NDArray[np.float64]:
    """Macro (f1, recall, precision) of per-label counts ``(n_groups, L)``: ``(n_groups, 3)``."""
    return _figures(true_positive, predicted, actual).mean(2).T


def _labels(values: Any, what: str) -> NDArray[Any]:
    """``(N,)`` labels or ``(N, L)`` boolean indicators of an array-like."""
    array = np.asarray(values)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim not in (1, 2):
        raise ValueError(f"{what} must be (N,) labels or (N, L) indicators, not {array.shape}")
    if array.dtype.kind == "f" and not (np.isfinite(array) & (array == np.round(array))).all():
        raise ValueError(
            f"{what} hold continuous or missing values, which have no classification score. "
            "Declare the model's task, for example task=TaskSpec.regression()."
        )
    if array.ndim == 2:
        if not np.isin(array, (0, 1)).all():
            raise ValueError(f"(N, L) {what} must be 0/1 indicators")
        return array.astype(bool)
    return array
