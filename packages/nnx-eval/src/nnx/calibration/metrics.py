"""How good probabilities are: likelihood, Brier score, reliability."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from nnx.utils import validation as check

from .arrays import blocks, class_targets, probability_matrix
from .errors import CalibrationError

DEFAULT_EPSILON = 1e-12


def negative_log_likelihood(
    probabilities: Any, targets: Any, *, epsilon: float | None = DEFAULT_EPSILON
) -> float:
    """The mean of ``-log p[target]``, in nats.

    ``probabilities`` is (N, C), ``targets`` (N,) class indices. A probability
    below ``epsilon`` counts as ``epsilon``; ``None`` is exact, so that a true
    class of probability 0 gives ``inf``.
    """
    _, picked = _checked(probabilities, targets)
    epsilon = _epsilon(epsilon)
    if epsilon is not None:
        picked = np.maximum(picked, epsilon)
    with np.errstate(divide="ignore"):
        return float(-np.log(picked).mean()) + 0.0


def brier_score(probabilities: Any, targets: Any) -> float:
    """The mean over rows of the squared error summed over classes, in [0, 2] (Brier, 1950)."""
    table, picked = _checked(probabilities, targets)
    return float((squares(table) + 1 - 2 * picked).mean())


def squares(table: np.ndarray) -> np.ndarray:
    """The sum of squares of each row."""
    return np.einsum("nc,nc->n", table, table)


def _checked(probabilities: Any, targets: Any) -> tuple[np.ndarray, np.ndarray]:
    """The probabilities, and of each row that of its true class."""
    table = probability_matrix(probabilities, CalibrationError)
    classes = class_targets(targets, len(table), table.shape[1], CalibrationError)
    return table, table[np.arange(len(table)), classes]


def _epsilon(epsilon: Any) -> float | None:
    if epsilon is None:
        return None
    try:
        return float(check.real("calibration", "epsilon", epsilon, above=0, below=1))
    except ValueError as error:
        raise CalibrationError(str(error)) from None


@dataclass(frozen=True, slots=True)
class ReliabilityBin:
    """Rows whose top-1 confidence is in [``lower``, ``upper``), the last bin closed at 1.

    ``confidence`` is their mean confidence and ``accuracy`` the share of them
    that is right; both are ``None`` of an empty bin.
    """

    lower: float
    upper: float
    count: int
    confidence: float | None
    accuracy: float | None

    def __post_init__(self) -> None:
        def wrong(what: str) -> CalibrationError:
            return CalibrationError(f"a reliability bin {what}: {self!r}")

        numbers = (self.lower, self.upper, self.confidence, self.accuracy)
        if any(n is not None and not 0 <= n <= 1 for n in numbers) or self.lower > self.upper:
            raise wrong("has edges and means in [0, 1]")
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 0:
            raise wrong("counts rows")
        if (self.count == 0) != (self.confidence is None) or (self.count == 0) != (
            self.accuracy is None
        ):
            raise wrong("has means when it has rows, and only then")

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _BIN}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> ReliabilityBin:
        try:
            if set(state) != set(_BIN):
                raise CalibrationError(f"a reliability bin has the keys {', '.join(_BIN)}")
            return ReliabilityBin(**state)
        except TypeError as error:
            raise CalibrationError(f"this is no reliability bin: {error}") from None


_BIN = ("lower", "upper", "count", "confidence", "accuracy")


def reliability_bins(
    probabilities: Any, targets: Any, *, n_bins: int = 10
) -> tuple[ReliabilityBin, ...]:
    """``n_bins`` bins of equal width over the top-1 confidence; empty ones are kept.

    A confidence on an inner edge belongs to the upper bin.
    """
    table = probability_matrix(probabilities, CalibrationError, empty=True)
    classes = class_targets(targets, len(table), table.shape[1], CalibrationError)
    n_bins = _bins(n_bins)
    confidence, right = top_one(table, classes)
    edges = np.arange(n_bins + 1) / n_bins
    return bins_of(confidence, right, edges)


def top_one(table: np.ndarray, classes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each row its largest probability, and whether the first class that has it is right."""
    confidence, right = np.empty(len(table)), np.empty(len(table), dtype=bool)
    for start, stop in blocks(*table.shape):
        decided = table[start:stop].argmax(1)
        confidence[start:stop] = table[start:stop][np.arange(stop - start), decided]
        right[start:stop] = decided == classes[start:stop]
    return confidence, right


def bins_of(
    confidence: np.ndarray, right: np.ndarray, edges: np.ndarray
) -> tuple[ReliabilityBin, ...]:
    """Bins between ``edges``: [lower, upper), the last closed."""
    place = np.searchsorted(edges[1:-1], confidence, side="right")
    count = np.bincount(place, minlength=len(edges) - 1)
    total = np.bincount(place, weights=confidence, minlength=len(edges) - 1)
    hits = np.bincount(place, weights=right, minlength=len(edges) - 1)
    return tuple(
        ReliabilityBin(
            lower=float(edges[i]),
            upper=float(edges[i + 1]),
            count=int(n),
            confidence=min(1.0, float(total[i] / n)) if n else None,
            accuracy=float(hits[i] / n) if n else None,
        )
        for i, n in enumerate(count)
    )


def _bins(n_bins: Any) -> int:
    try:
        return check.count("calibration", "n_bins", n_bins)
    except ValueError as error:
        raise CalibrationError(str(error)) from None


def expected_calibration_error(bins: Iterable[ReliabilityBin]) -> float | None:
    """The mean over rows of |accuracy - confidence| of their bin; ``None`` without rows.

    Naeini, Cooper & Hauskrecht (2015), Guo et al. (2017).
    """
    filled = [b for b in bins if b.confidence is not None and b.accuracy is not None]
    total = sum(b.count for b in filled)
    if not total:
        return None
    gaps = (b.count * abs((b.accuracy or 0.0) - (b.confidence or 0.0)) for b in filled)
    return float(sum(gaps) / total)


@dataclass(frozen=True, slots=True)
class CalibrationMetrics:
    """The metrics of one set of probabilities."""

    nll: float
    brier: float
    ece: float | None
    bins: tuple[ReliabilityBin, ...]

    @staticmethod
    def of(
        probabilities: Any,
        targets: Any,
        *,
        n_bins: int = 10,
        epsilon: float | None = DEFAULT_EPSILON,
    ) -> CalibrationMetrics:
        """Measure (N, C) ``probabilities`` against (N,) class ``targets``."""
        bins = reliability_bins(probabilities, targets, n_bins=n_bins)
        return CalibrationMetrics(
            nll=negative_log_likelihood(probabilities, targets, epsilon=epsilon),
            brier=brier_score(probabilities, targets),
            ece=expected_calibration_error(bins),
            bins=bins,
        )

    def state(self) -> dict[str, Any]:
        """Plain data; an infinite likelihood is the text ``"inf"``, which JSON can hold."""
        nll: float | str = "inf" if self.nll == float("inf") else self.nll
        return {
            "nll": nll,
            "brier": self.brier,
            "ece": self.ece,
            "bins": [b.state() for b in self.bins],
        }

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> CalibrationMetrics:
        try:
            ece = state["ece"]
            return CalibrationMetrics(
                nll=float(state["nll"]),
                brier=float(state["brier"]),
                ece=None if ece is None else float(ece),
                bins=tuple(ReliabilityBin.from_state(b) for b in state["bins"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CalibrationError(f"these are no calibration metrics: {error!r}") from None
