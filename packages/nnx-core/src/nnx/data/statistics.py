"""Population statistics of chosen rows, in float64, and the arrays they come from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from nnx.data.columns import Array, is_series, numeric_array


class PreprocessingError(ValueError):
    """Data that do not fit the fitted schema, or a schema that makes no sense."""


def row_positions(rows: Iterable[Any], source: Any) -> Array:
    """Distinct positions within ``source``, as given."""
    values = np.asarray(rows if hasattr(rows, "__array__") else list(rows))
    if values.dtype.kind not in "iu" or values.ndim != 1:
        if not values.size:
            raise PreprocessingError("there are no training rows to fit on")
        hint = "; a mask becomes positions with numpy.flatnonzero(mask)" * (
            values.dtype.kind == "b"
        )
        raise PreprocessingError(f"rows must be integer positions, not {values.dtype}{hint}")
    if not len(values):
        raise PreprocessingError("there are no training rows to fit on")
    positions = values.astype(np.int64)
    size = len(source)
    if positions.min() < 0 or positions.max() >= size:
        wrong = positions.min() if positions.min() < 0 else positions.max()
        raise PreprocessingError(f"row {wrong} is not a position in the {size} rows of the source")
    if len(np.unique(positions)) != len(positions):
        raise PreprocessingError("rows names a position twice")
    return positions


def frame_column(frame: Any, rows: Array | None, place: int, label: Any) -> Array:
    column = frame.iloc[:, place] if rows is None else frame.iloc[rows, place]
    return numeric_array(column, f"column {label!r}", PreprocessingError)


def rows_of(source: Any, positions: Array) -> Array:
    """The rows at ``positions`` as a 2-D array of numbers."""
    if isinstance(source, torch.Tensor):
        index = torch.from_numpy(positions).to(source.device)
        table = to_numpy(source.detach().index_select(0, index))
    elif isinstance(source, np.ndarray):
        table = source[positions]
    else:
        table = np.stack([_first_row(source[i]) for i in positions.tolist()])
    if table.ndim != 2:
        raise PreprocessingError(f"rows must have one dimension of values, got {table.ndim - 1}")
    return numeric_array(table, "the source", PreprocessingError)


def _first_row(item: Any) -> Array:
    if isinstance(item, (tuple, list)) and item and np.ndim(item[0]) == 1:
        item = item[0]  # a sample: (input, target, ...)
    return np.asarray(to_numpy(item))


def to_numpy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return (value.float() if value.dtype is torch.bfloat16 else value).numpy()
    return value if isinstance(value, np.ndarray) or is_series(value) else np.asarray(value)


def moments(column: Array, label: Any) -> tuple[float, float]:
    """Population mean and deviation of one column, in float64."""
    values = column.astype(np.float64)
    finite = np.isfinite(values)
    if not finite.all():
        place = int(np.argmin(finite))
        raise PreprocessingError(
            f"column {label!r} is not finite in training row {place} (of those given): "
            f"{values[place]}; drop or impute it first"
        )
    low, high = float(values.min()), float(values.max())
    if low == high:
        return low, 1.0
    # Scaled by a power of two, so that no sum or square overflows or vanishes.
    _, exponent = np.frexp(max(abs(low), abs(high)))
    mean = float(np.ldexp(np.ldexp(values, -exponent).mean(), exponent))
    deviation = values - mean if np.isfinite(high - low) else np.ldexp(values, -1) - mean / 2
    halved = 0 if np.isfinite(high - low) else 1
    _, exponent = np.frexp(np.abs(deviation).max())
    scaled = np.ldexp(deviation, -exponent)
    scale = float(np.ldexp(np.sqrt(np.mean(scaled * scaled)), exponent + halved))
    return mean, scale if 0 < scale < np.inf else 1.0
