"""Population statistics of chosen rows, in float64, and the arrays they come from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from nnx.data.columns import Array, is_series, numeric_array
from nnx.errors import NNxError

_CHUNK = 131_072  # values of a piece


class PreprocessingError(ValueError, NNxError):
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
    if not hasattr(source, "__len__"):
        raise PreprocessingError(
            f"a source must have a length and rows by position, unlike {type(source).__name__}"
        )
    size = len(source)
    if positions.min() < 0 or positions.max() >= size:
        wrong = positions.min() if positions.min() < 0 else positions.max()
        raise PreprocessingError(f"row {wrong} is not a position in the {size} rows of the source")
    ordered = positions if (np.diff(positions) > 0).all() else np.sort(positions)
    if (ordered[1:] == ordered[:-1]).any():
        raise PreprocessingError("rows names a position twice")
    return positions


def frame_column(frame: Any, rows: Array | None, place: int, label: Any) -> Array:
    """One column of a DataFrame as numbers; only ``rows`` are read."""
    column = frame.iloc[:, place] if rows is None else frame.iloc[rows, place]
    return numeric_array(column, f"column {label!r}", PreprocessingError)


def chunk_rows(width: int) -> int:
    """Rows of a piece that stays in the processor's cache as float64."""
    return max(1, _CHUNK // max(1, width))


def column_chunks(columns: Sequence[Array]) -> Iterator[Array]:
    """Rows of equally long columns, in pieces, as float64."""
    step = chunk_rows(len(columns))
    for start in range(0, len(columns[0]), step):
        yield np.stack([c[start : start + step].astype(np.float64) for c in columns], axis=1)


def row_chunks(table: Any, positions: Array) -> Iterator[Array]:
    """Rows of a 2-D tensor or array, in pieces; no other row is read."""
    ordered = len(positions) == len(table) and bool((np.diff(positions) == 1).all())
    step = chunk_rows(table.shape[1])
    for start in range(0, len(positions), step):
        part: Any = slice(start, start + step) if ordered else positions[start : start + step]
        if isinstance(table, torch.Tensor) and not ordered:
            part = torch.from_numpy(part).to(table.device)
        yield numeric_array(to_numpy(table[part]), "the data", PreprocessingError)


def as_table(source: Any, positions: Array) -> tuple[Any, Array]:
    """A 2-D tensor or array and where its wanted rows are.

    Any other source is read item by item, the wanted rows only.
    """
    if not isinstance(source, (torch.Tensor, np.ndarray)):
        source = np.stack([_first_row(source[i]) for i in positions.tolist()])
        positions = np.arange(len(positions))
    if source.ndim != 2:
        raise PreprocessingError(f"rows must have one dimension of values, got {source.ndim - 1}")
    return source, positions


def _first_row(item: Any) -> Array:
    if isinstance(item, (tuple, list)) and item and np.ndim(item[0]) == 1:
        item = item[0]  # a sample: (input, target, ...)
    return np.asarray(to_numpy(item))


def to_numpy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return (value.float() if value.dtype is torch.bfloat16 else value).numpy()
    if isinstance(value, np.ndarray) or is_series(value):
        return value
    try:
        return np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise PreprocessingError(f"not a row or table of numbers: {error}") from None


@np.errstate(over="ignore", invalid="ignore")
def moments(
    chunks: Callable[[], Iterator[Array]], labels: Sequence[Any]
) -> list[tuple[float, float]]:
    """Population mean and deviation of each column of a table that is read twice in pieces.

    ``chunks()`` yields 2-D pieces of its rows. Everything is float64.
    """
    low = np.full(len(labels), np.inf)
    high = np.full(len(labels), -np.inf)
    count, sums = 0, []
    for chunk in chunks():
        values = chunk.astype(np.float64, copy=False)
        _refuse_missing(values, labels, count)
        np.minimum(low, values.min(axis=0), out=low)
        np.maximum(high, values.max(axis=0), out=high)
        sums.append(values.sum(axis=0))
        count += len(values)
    size = np.maximum(np.abs(low), np.abs(high))
    usual = (size < 1e150) & ((high - low > 1e-150) | (high == low))
    mean = np.array([math.fsum(parts) for parts in zip(*sums)]) / count
    squares, rests = [], []
    for chunk in chunks():
        deviation = chunk.astype(np.float64) - mean
        rests.append(deviation.sum(axis=0))
        np.multiply(deviation, deviation, out=deviation)
        squares.append(deviation.sum(axis=0))
    rest = np.array([math.fsum(parts) for parts in zip(*rests)]) / count
    mean_square = np.array([math.fsum(parts) for parts in zip(*squares)]) / count
    scale = np.sqrt(np.maximum(mean_square - rest * rest, 0))
    return [
        (float(low[j]), 1.0)
        if low[j] == high[j]
        else (float(mean[j]), float(scale[j]))
        if usual[j]
        else _extreme_moments(np.concatenate([chunk[:, j] for chunk in chunks()]))
        for j in range(len(labels))
    ]


def _refuse_missing(values: Array, labels: Sequence[Any], start: int) -> None:
    finite = np.isfinite(values)
    if not finite.all():
        row, column = np.argwhere(~finite)[0]
        raise PreprocessingError(
            f"column {labels[column]!r} is not finite in training row {start + row} (of those "
            f"given): {values[row, column]}; drop or impute it first"
        )


def _extreme_moments(column: Array) -> tuple[float, float]:
    """The same where a sum or a square would overflow or vanish: scaled by powers of two."""
    values = column.astype(np.float64)
    _, exponent = np.frexp(np.abs(values).max())
    mean = float(np.ldexp(np.ldexp(values, -exponent).mean(), exponent))
    halved = int(not np.isfinite(values.max() - values.min()))
    deviation = np.ldexp(values, -halved) - np.ldexp(mean, -halved)
    _, exponent = np.frexp(np.abs(deviation).max())
    scaled = np.ldexp(deviation, -exponent)
    scale = float(np.ldexp(np.sqrt(np.mean(scaled * scaled)), exponent + halved))
    return mean, scale if 0 < scale < np.inf else 1.0
