"""Prediction intervals of a regression: absolute, normalised and quantile scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from nnx.calibration.arrays import as_numpy, identity
from nnx.calibration.binding import check_splits
from nnx.calibration.rows import RowSet
from nnx.utils import validation as check

from .errors import ConformalError, ConformalMismatchError
from .quantiles import (
    Cell,
    ConformalArtifact,
    cells_of,
    check_alpha,
    group_keys,
    guarantee,
    limits_of,
)

METHODS = ("absolute", "normalised", "quantile")
_KEYS = (
    "method", "alpha", "model_id", "split_id", "grouped", "train_split_id", "test_split_id",
    "cells", "rows",
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class IntervalPrediction:
    """(N,) bounds, closed; infinite where too few rows promise nothing smaller."""

    lower: np.ndarray
    upper: np.ndarray
    alpha: float
    conformal_id: str

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.lower)

    @property
    def widths(self) -> np.ndarray:
        """(N,) widths; an empty interval has 0."""
        return np.maximum(0.0, self.upper - self.lower)

    def coverage(self, targets: Any) -> float:
        """The share of rows whose true value is inside."""
        values = _values("targets", targets, len(self))
        return float(((values >= self.lower) & (values <= self.upper)).mean())


@dataclass(frozen=True, slots=True)
class ConformalIntervals(ConformalArtifact):
    """Calibrated half-widths, bound to a model.

    "absolute" adds one width to every prediction (Lei et al., 2018),
    "normalised" scales it by an estimated ``scale`` of each row, "quantile" moves
    two predicted quantiles (Romano, Patterson & Candès, 2019). With groups the
    promise holds in each of them (Mondrian).
    """

    method: str
    alpha: float
    model_id: str
    split_id: str
    cells: Mapping[str, Cell]
    grouped: bool = False
    train_split_id: str | None = None
    test_split_id: str | None = None
    rows: RowSet | None = None

    KIND: ClassVar[str] = "intervals"
    KEYS: ClassVar[tuple[str, ...]] = _KEYS

    def __post_init__(self) -> None:
        _method(self.method)
        object.__setattr__(self, "alpha", check_alpha(self.alpha))
        identity("model_id", self.model_id, ConformalError)
        check_splits(self.split_id, self.train_split_id, self.test_split_id, ConformalError)
        object.__setattr__(self, "cells", dict(self.cells))

    def guarantee(self) -> str:
        """What is promised: the level, and of each group n, the rank used and what it attains."""
        where = " in each group" if self.grouped else ""
        return guarantee(self.cells, self.alpha, "the intervals", where)

    def predict(
        self,
        predictions: Any,
        *,
        model_id: str,
        scale: Any = None,
        upper: Any = None,
        groups: Any = None,
    ) -> IntervalPrediction:
        """Intervals around (N,) ``predictions``.

        ``scale`` is (N,) of a normalised method; of a quantile method
        ``predictions`` are the lower quantiles and ``upper`` the upper ones.
        """
        if model_id != self.model_id:
            raise ConformalMismatchError(
                f"the intervals were calibrated for model_id {self.model_id!r}, not {model_id!r}"
            )
        low, high, widths = _parts(self.method, predictions, scale, upper)
        if (groups is not None) != self.grouped:
            raise ConformalError("groups= is given for intervals that were calibrated by group")
        keys = None if groups is None else group_keys(groups, len(low))
        margin = limits_of(self.cells, keys, len(low)) * widths
        return IntervalPrediction(low - margin, high + margin, self.alpha, self.id)


def fit_intervals(
    predictions: Any,
    targets: Any,
    *,
    alpha: float,
    model_id: str,
    split_id: str,
    method: str = "absolute",
    scale: Any = None,
    upper: Any = None,
    groups: Any = None,
    train_split_id: str | None = None,
    test_split_id: str | None = None,
    rows: RowSet | None = None,
) -> ConformalIntervals:
    """Calibrate intervals on (N,) predictions and targets of rows held out from training.

    ``scale`` and ``upper`` are as in :meth:`ConformalIntervals.predict`. Too few
    rows for ``alpha`` give infinite intervals, never finite ones.
    """
    alpha = check_alpha(alpha)
    low, high, widths = _parts(_method(method), predictions, scale, upper)
    truth = _values("targets", targets, len(low))
    scores = np.maximum(low - truth, truth - high) / widths
    keys = None if groups is None else group_keys(groups, len(low))
    return ConformalIntervals(
        method=method, alpha=alpha, model_id=model_id, split_id=split_id,
        cells=cells_of(scores, keys, alpha), grouped=keys is not None,
        train_split_id=train_split_id, test_split_id=test_split_id, rows=rows,
    )  # fmt: skip


def _method(method: Any) -> str:
    try:
        return check.choice("conformal", "method", method, METHODS)
    except ValueError as error:
        raise ConformalError(str(error)) from None


def _parts(
    method: str, predictions: Any, scale: Any, upper: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lower and upper predictions, and the unit of each row's margin."""
    if (scale is not None) != (method == "normalised"):
        raise ConformalError('scale= belongs to method="normalised", and is needed for it')
    if (upper is not None) != (method == "quantile"):
        raise ConformalError('upper= belongs to method="quantile", and is needed for it')
    low = _values("predictions", predictions, None)
    high = low if upper is None else _values("upper", upper, len(low))
    if scale is None:
        return low, high, np.ones(len(low))
    widths = _values("scale", scale, len(low))
    if not (widths > 0).all():
        raise ConformalError("scale must be positive in every row")
    return low, high, widths


def _values(name: str, values: Any, rows: int | None) -> np.ndarray:
    found = as_numpy(values, name, ConformalError)
    if found.ndim == 2 and found.shape[1] == 1:
        found = found[:, 0]
    if found.dtype.kind not in "fiu" or found.ndim != 1 or rows not in (None, len(found)):
        wanted = "N" if rows is None else rows
        raise ConformalError(f"{name} must be ({wanted},) real numbers, not {found.shape}")
    if not np.isfinite(found).all():
        raise ConformalError(
            f"{name} must be finite; row {int(np.argmin(np.isfinite(found)))} is not"
        )
    return found.astype(np.float64)
