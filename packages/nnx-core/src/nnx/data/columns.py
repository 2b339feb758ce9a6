"""Columns of a table as plain numeric arrays. pandas is met only through its objects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

ColumnLabel: TypeAlias = str | int
Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


def is_frame(source: Any) -> bool:
    """Whether ``source`` is a pandas DataFrame."""
    return hasattr(source, "iloc") and hasattr(source, "columns")


def is_series(source: Any) -> bool:
    """Whether ``source`` is a pandas Series."""
    return hasattr(source, "iloc") and hasattr(source, "index") and not is_frame(source)


def numeric_array(values: Any, where: str, error: type[ValueError]) -> Array:
    """``values`` as booleans, integers or floats, missing ones as NaN; else ``error``."""
    dtype: Any = getattr(values, "dtype", None)
    if hasattr(dtype, "na_value") and hasattr(values, "to_numpy"):  # a nullable pandas column
        if getattr(dtype, "kind", "O") in "biuf":
            missing = bool(values.isna().any())
            values = (
                values.to_numpy("float64", na_value=np.nan)
                if missing
                else values.to_numpy(dtype.numpy_dtype)
            )
        else:
            values = np.asarray(values, dtype=object)
    if isinstance(values, np.ma.MaskedArray):
        values = np.ma.filled(values.astype(np.float64), np.nan)
    array = np.asarray(values)
    if array.dtype.kind == "O":
        array = _from_objects(array, where, error)
    if array.dtype.kind not in "biuf":
        raise error(
            f"{where} is not numeric ({getattr(dtype, 'name', array.dtype)}); encode it as numbers first"
        )
    return array


def _from_objects(array: Array, where: str, error: type[ValueError]) -> Array:
    """Numbers kept as Python objects; anything else is named."""
    for position, value in enumerate(array.flat):
        number = isinstance(value, (bool, int, float, np.number, np.bool_)) or value is None
        if not number and type(value).__name__ != "NAType":
            raise error(f"{where} is not numeric: {value!r} in row {position}")
    missing = np.vectorize(lambda v: v is None or type(v).__name__ == "NAType", otypes=[bool])
    plain = array.copy()
    if plain.size:
        plain[missing(array)] = np.nan
    try:
        numbers = np.array(plain.tolist())  # integers stay integers
        return numbers if numbers.dtype.kind in "biuf" else plain.astype(np.float64)
    except OverflowError:
        raise error(f"{where} holds an integer that no number type can hold") from None


def column_labels(columns: Iterable[Any], error: type[ValueError]) -> tuple[ColumnLabel, ...]:
    """Column labels as plain strings or integers, none twice."""
    if isinstance(columns, (str, bytes)):
        raise error(f"columns must be a list of labels, not the string {columns!r}")
    labels: list[ColumnLabel] = []
    for label in columns:
        if isinstance(label, str):
            labels.append(str(label))
        elif isinstance(label, (int, np.integer)) and not isinstance(label, (bool, np.bool_)):
            labels.append(int(label))
        else:
            raise error(f"a column label must be a string or an integer, not {label!r}")
    twice = sorted({label for label in labels if labels.count(label) > 1}, key=str)
    if twice:
        raise error(f"columns are named twice: {twice}")
    return tuple(labels)


def locate_columns(frame: Any, columns: Sequence[Any], error: type[ValueError]) -> list[int]:
    """Where ``columns`` are in ``frame``; a missing or doubled one is refused."""
    return locate_labels(list(frame.columns), columns, error)


def locate_labels(present: list[Any], columns: Sequence[Any], error: type[ValueError]) -> list[int]:
    wanted = set(columns)
    places: dict[Any, list[int]] = {}
    for place, label in enumerate(present):
        if label in wanted:
            places.setdefault(label, []).append(place)
    missing = [label for label in columns if label not in places]
    if missing:
        raise error(f"missing columns {missing}; there are {present[:20]}")
    doubled = [label for label in columns if len(places[label]) > 1]
    if doubled:
        raise error(f"the table has more than one column named {doubled}")
    return [places[label][0] for label in columns]
