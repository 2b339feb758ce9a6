"""The columns that a split is planned from: ids, groups, labels and times, checked and plain."""

from __future__ import annotations

import datetime as dt
import math
import numbers
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from nnx.errors import NNxError
from nnx.utils.validation import is_number

SampleId: TypeAlias = str | int

_NS = {"D": 86_400 * 10**9, "h": 3_600 * 10**9, "m": 60 * 10**9, "s": 10**9}
_NS |= {"W": 7 * _NS["D"], "ms": 10**6, "us": 10**3, "ns": 1}
_EPOCH = dt.datetime(1970, 1, 1)


class SplitError(ValueError, NNxError):
    """A split cannot be planned or replayed as asked."""


# -- ids, groups and labels ----------------------------------------------------------


def sample_ids(values: Iterable[Any]) -> list[SampleId]:
    """Ids as plain strings or integers, one type, none twice."""
    ids = plain_values(values, "ids", (str, int))
    integers = as_integers(ids)
    if integers is not None:
        ordered = np.sort(integers)
        twice = bool((ordered[1:] == ordered[:-1]).any())
    else:
        twice = len(set(ids)) != len(ids)
    if twice:
        raise SplitError(f"ids must be unique; repeated: {some(repeated(ids))}")
    return ids


def plain_values(values: Iterable[Any], what: str, kinds: tuple[type, ...]) -> list[Any]:
    """A column as plain Python values of one of ``kinds``.

    Missing values, other kinds and mixtures (``1`` and ``"1"``, ``1`` and
    ``1.0``) are refused with the position.
    """
    column = as_list(values, what)
    found = set(map(type, column))
    if not (len(found) == 1 and found <= set(kinds) and found != {float}):
        column = [_plain(value, i, what, kinds) for i, value in enumerate(column)]
        found = set(map(type, column))
        if len(found) > 1:
            names = " and ".join(sorted(kind.__name__ for kind in found))
            raise SplitError(f"{what} must have one type, but these mix {names}")
    return column


def as_list(values: Any, what: str) -> list[Any]:
    """A column as a list. A string, a mapping, or more than one dimension is refused."""
    if isinstance(values, (str, bytes, dict)) or not hasattr(values, "__iter__"):
        raise SplitError(f"{what} must be a column of values, not {type(values).__name__}")
    if getattr(values, "ndim", 1) != 1:
        raise SplitError(f"{what} must have one dimension, not {values.ndim}")
    convert = getattr(values, "tolist", None)
    if not callable(convert) or getattr(getattr(values, "dtype", None), "kind", None) in ("m", "M"):
        return list(values)  # as integers, times would lose what they are
    return convert()


def as_integers(column: Sequence[Any]) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    """Plain integers as an array; ``None`` for other values, and for integers beyond 64 bits."""
    if not len(column) or type(column[0]) is not int:
        return None
    try:
        return np.array(column, dtype=np.int64)
    except OverflowError:
        return None


def repeated(values: Iterable[Any]) -> list[Any]:
    """What occurs more than once, in order of appearance."""
    return [value for value, count in Counter(values).items() if count > 1]


def some(values: Iterable[Any]) -> str:
    """The first few of ``values`` and how many there are."""
    listed = list(values)
    shown = ", ".join(map(repr, listed[:5]))
    return f"{shown} and {len(listed) - 5} more" if len(listed) > 5 else shown


def is_missing(value: Any) -> bool:
    """``None``, NaN, NaT or pandas' NA."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    if isinstance(value, (np.datetime64, np.timedelta64)):
        return bool(np.isnat(value))
    return isinstance(value, numbers.Real) and value != value


def _plain(value: Any, position: int, what: str, kinds: tuple[type, ...]) -> Any:
    if is_missing(value):
        raise SplitError(f"{what}[{position}] is missing ({value!r}); every row needs one")
    plain: Any = value
    if isinstance(value, (bool, np.bool_)):
        plain = bool(value)
    elif isinstance(value, str):
        plain = str(value)
    elif is_number(value, numbers.Integral):
        plain = int(value)
    elif is_number(value):
        plain = float(value)
    if type(plain) not in kinds or (type(plain) is float and not math.isfinite(plain)):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise SplitError(
            f"{what}[{position}] must be {names}, not {value!r} of type {type(value).__name__}; "
            f"convert the column first, for example with .astype(str)"
        )
    return plain


# -- times ---------------------------------------------------------------------------


class Times:
    """A column of times of one kind, compared exactly with a cutoff of that kind.

    Kinds: ``number``, ``date``, ``datetime`` (naive) and ``datetime_utc`` (tz-aware,
    compared as instants). Numbers are kept as they are, dates are days and
    datetimes are nanoseconds since 1970, both as integers.
    """

    def __init__(self, values: Any) -> None:
        self.kind, self._values, self._unit = _read_times(values)

    def __len__(self) -> int:
        return len(self._values)

    def sorted(self) -> list[int | float]:
        """All times in order, as :meth:`point` returns them."""
        if isinstance(self._values, list):
            return sorted(self._values)
        ticks = np.sort(self._values).tolist()
        return [tick * self._unit for tick in ticks] if self._unit != 1 else ticks

    def before(self, cutoff: int | float) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which rows come before ``cutoff`` (a value that :meth:`point` returned)."""
        values = self._values
        if isinstance(values, list):
            return np.fromiter((v < cutoff for v in values), dtype=bool, count=len(values))
        if values.dtype.kind == "f":
            return values < _float_at_least(cutoff)
        ticks = -((-cutoff) // self._unit) if isinstance(cutoff, int) else math.ceil(cutoff)
        limits = np.iinfo(values.dtype)
        if ticks > limits.max:
            return np.ones(len(values), dtype=bool)
        return values < max(ticks, limits.min)

    def point(self, value: Any, what: str) -> int | float:
        """A cutoff as a comparable number; another kind is refused."""
        kind, number = _read_time(value, what)
        if kind != self.kind:
            raise SplitError(
                f"{what} is a {_NAMES[kind]} but times are {_NAMES[self.kind]}s; "
                f"one kind is needed in a plan"
            )
        return number

    def span(self, gap: Any) -> int | float:
        """A gap in the units of :meth:`point`."""
        if self.kind == "number":
            if _is_number(gap) and gap >= 0:
                return _plain_number(gap)
            raise SplitError(f"gap must be a finite number >= 0 like times, not {gap!r}")
        nanoseconds = _timedelta_ns(gap)
        if nanoseconds is None or nanoseconds < 0:
            raise SplitError(f"gap must be a timedelta >= 0 for {self.kind} times, not {gap!r}")
        if self.kind == "date":
            days, rest = divmod(nanoseconds, _NS["D"])
            if rest:
                raise SplitError(f"gap must be whole days for dates, not {gap!r}")
            return days
        return nanoseconds

    def seconds(self, span: int | float) -> int | float:
        """A span as the manifest records it: numbers as they are, times in seconds."""
        if self.kind == "number":
            return span
        whole, rest = divmod(int(span) * (_NS["D"] if self.kind == "date" else 1), _NS["s"])
        return whole + rest / _NS["s"] if rest else whole

    def text(self, point: int | float) -> str | int | float:
        """A point as the manifest records it."""
        if self.kind == "number":
            return point
        if self.kind == "date":
            return (_EPOCH.date() + dt.timedelta(days=int(point))).isoformat()
        microseconds, nanoseconds = divmod(int(point), 1000)
        text = (_EPOCH + dt.timedelta(microseconds=microseconds)).isoformat(timespec="microseconds")
        zone = "+00:00" if self.kind == "datetime_utc" else ""
        return f"{text}{nanoseconds:03d}{zone}" if nanoseconds else text + zone


_NAMES = {
    "number": "number",
    "date": "date",
    "datetime": "naive datetime",
    "datetime_utc": "timezone-aware datetime",
}


def _read_times(values: Any) -> tuple[str, Any, int]:
    """``(kind, values, nanoseconds per unit)``."""
    kind, array = "datetime", values
    if getattr(getattr(values, "dtype", None), "tz", None) is not None:  # a pandas column
        kind, array = "datetime_utc", getattr(values, "dt", values).tz_convert(None)
    array = getattr(array, "to_numpy", lambda: array)()
    if isinstance(array, np.ndarray) and array.ndim == 1:
        if array.dtype.kind == "M":
            return (kind, *_ticks(array))
        if array.dtype.kind in "iu" or array.dtype in (np.float16, np.float32, np.float64):
            if array.dtype.kind == "f":
                array = array.astype(np.float64)
                _refuse_rows(~np.isfinite(array), "is not a finite number")
            return "number", array, 1
    column = as_list(values, "times")
    read = [_read_time(value, f"times[{i}]") for i, value in enumerate(column)]
    kinds = {kind for kind, _ in read}
    if len(kinds) > 1:
        names = " and ".join(sorted(_NAMES[k] + "s" for k in kinds))
        raise SplitError(f"times must be of one kind, but these mix {names}")
    return (kinds.pop() if kinds else "number"), [value for _, value in read], 1


def _ticks(array: Any) -> tuple[Any, int]:
    """datetime64 as integers, and the nanoseconds that one of them stands for."""
    _refuse_rows(np.isnat(array), "is missing (NaT)")
    unit, step = np.datetime_data(array.dtype)
    if unit in ("Y", "M"):
        array, unit, step = array.astype("datetime64[D]"), "D", 1
    if unit not in _NS:
        raise SplitError(f"times of unit {unit!r} are finer than a nanosecond; round them first")
    return array.astype(np.int64), _NS[unit] * step


def _refuse_rows(bad: Any, problem: str) -> None:
    if bad.any():
        raise SplitError(f"times[{int(np.argmax(bad))}] {problem}; every row needs a time")


def _read_time(value: Any, what: str) -> tuple[str, int | float]:
    if is_missing(value):
        raise SplitError(f"{what} is missing ({value!r})")
    if isinstance(value, np.datetime64):
        ticks, unit = _ticks(np.array([value]))
        return "datetime", int(ticks[0]) * unit
    if isinstance(value, dt.datetime):  # pandas.Timestamp too
        aware = value.utcoffset() is not None
        naive = value.astimezone(dt.timezone.utc).replace(tzinfo=None) if aware else value
        fine = int(getattr(value, "nanosecond", 0))
        plain = dt.datetime(
            naive.year, naive.month, naive.day, naive.hour, naive.minute, naive.second,
            naive.microsecond,
        )  # fmt: skip
        whole = (plain - _EPOCH) // dt.timedelta(microseconds=1) * 1000
        return ("datetime_utc" if aware else "datetime"), whole + fine
    if isinstance(value, dt.date):
        return "date", (value - _EPOCH.date()).days
    if _is_number(value):
        return "number", _plain_number(value)
    raise SplitError(
        f"{what} must be a finite number, a date or a datetime, not {value!r} "
        f"of type {type(value).__name__}"
    )


def _is_number(value: Any) -> bool:
    return not isinstance(value, (bool, np.bool_)) and is_number(value) and _is_finite(value)


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the floats is compared as it is
        return True


def _plain_number(value: Any) -> int | float:
    return operator.index(value) if isinstance(value, numbers.Integral) else float(value)


def _timedelta_ns(gap: Any) -> int | None:
    if isinstance(gap, np.timedelta64):
        unit, step = np.datetime_data(gap.dtype)
        known = unit in _NS and not np.isnat(gap)
        return int(gap.astype(np.int64)) * _NS[unit] * step if known else None
    if isinstance(gap, dt.timedelta) and not is_missing(gap):  # pandas.Timedelta too
        whole = (gap.days * 86_400 + gap.seconds) * 10**6 + gap.microseconds
        return whole * 1000 + int(getattr(gap, "nanoseconds", 0))
    return None


def _float_at_least(number: int | float) -> float:
    """The smallest float that is not below ``number``."""
    try:
        nearest = float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf
    return nearest if nearest >= number else math.nextafter(nearest, math.inf)
