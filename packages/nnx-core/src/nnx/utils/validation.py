"""The few checks that every configuration shares.

Each check returns the value to store and raises a ``ValueError`` that names the
owner (a class or function), the field, the value and the accepted domain; of a
value of the wrong type it is a ``TypeError`` too (:class:`WrongTypeError`). A
number may be any ``numbers.Real`` / ``numbers.Integral``, NumPy's included, and
is stored as a plain ``int`` or ``float``; booleans, numeric strings, NaN and
infinities are never numbers here.
"""

from __future__ import annotations

import difflib
import math
import numbers
import re
import reprlib
from collections.abc import Iterable
from enum import Enum
from typing import Any, NoReturn, TypeVar

from nnx.errors import NNxError

_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")
_Member = TypeVar("_Member", bound=Enum)
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


def show(value: Any) -> str:
    """A ``repr`` short enough for an error message."""
    try:
        return _SHORT.repr(value)
    except Exception:  # a broken __repr__ must not hide the refusal itself
        return f"<{type(value).__name__}>"


class WrongTypeError(TypeError, ValueError, NNxError):
    """A configuration of the wrong type: a ``TypeError``, and a refusal like every other."""


def refuse(
    owner: str, field: str, value: Any, domain: str, error: type[ValueError] = ValueError
) -> NoReturn:
    raise error(f"{owner}.{field} must be {domain}, not {show(value)}")


def refuse_type(owner: str, field: str, value: Any, domain: str) -> NoReturn:
    refuse(owner, field, value, domain, WrongTypeError)


def real(
    owner: str,
    field: str,
    value: Any,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> int | float:
    """A finite real number in the given interval.

    ``int`` and ``float`` are kept as they are, since the two spell different
    run ids; any other real becomes a plain number.
    """
    number = _plain_real(value)
    if (
        number is None
        or (at_least is not None and number < at_least)
        or (above is not None and number <= above)
        or (at_most is not None and number > at_most)
        or (below is not None and number >= below)
    ):
        domain = f"a finite real number{_interval(at_least, above, at_most, below)}"
        numeric = is_number(value) and not isinstance(value, bool)
        refuse(owner, field, value, domain, ValueError if numeric else WrongTypeError)
    return number


def count(
    owner: str, field: str, value: Any, *, at_least: int = 1, at_most: int | None = None
) -> int:
    """An integer (never a boolean, never a float) in the given interval."""
    number = _plain_integer(value)
    domain = f"an integer{_interval(at_least, None, at_most, None)}"
    if number is None:
        refuse_type(owner, field, value, domain)
    if number < at_least or (at_most is not None and number > at_most):
        refuse(owner, field, value, domain)
    return number


def integer(owner: str, field: str, value: Any) -> int:
    """Any integer that is not a boolean."""
    number = _plain_integer(value)
    if number is None:
        refuse_type(owner, field, value, "an integer")
    return number


def flag(owner: str, field: str, value: Any) -> bool:
    """``True`` or ``False``, nothing that merely behaves like one."""
    if type(value) is bool:
        return value
    if type(value).__module__ == "numpy" and type(value).__name__ in {"bool", "bool_"}:
        return bool(value)
    refuse_type(owner, field, value, "True or False")


def text(owner: str, field: str, value: Any) -> str:
    """A non-empty string."""
    if not isinstance(value, str):
        refuse_type(owner, field, value, "a non-empty string")
    if not value:
        refuse(owner, field, value, "a non-empty string")
    return value if type(value) is str else str.__str__(value)


def name(owner: str, field: str, value: Any) -> str:
    """A string for one cell of a table: not blank, no line break, no space at its ends."""
    found = text(owner, field, value)
    if not found.strip():
        refuse(owner, field, value, "a non-empty string")
    if found != found.strip() or _CONTROL.search(found):
        refuse(owner, field, value, "a name without line breaks or spaces at its ends")
    return found


def salt(owner: str, field: str, value: Any) -> str:
    """What tells equal configurations apart: any string but a blank one."""
    found = text(owner, field, value)
    if not found.strip():
        refuse(owner, field, value, "a string that is not blank")
    return found


def identifier(owner: str, field: str, value: Any) -> str:
    """What something is registered under, typed and read by people: no space, no line break."""
    found = text(owner, field, value)
    if not is_word(found):
        refuse(owner, field, value, 'an id without spaces, such as "acme.kappa"')
    return found


def is_word(text: str) -> bool:
    """Whether there is something, and in it no space, line break or control character."""
    return text.split() == [text] and not _CONTROL.search(text)


def tags(owner: str, field: str, value: Any) -> tuple[str, ...]:
    """Words to find something by, each once, in the order they were given."""
    unordered = (str, bytes, set, frozenset, dict)
    if isinstance(value, unordered) or not isinstance(value, Iterable):
        refuse_type(owner, field, value, "a sequence of words")
    found = [text(owner, f"{field}[{i}]", tag) for i, tag in enumerate(value)]
    for i, tag in enumerate(found):
        if not is_word(tag):
            refuse(owner, f"{field}[{i}]", tag, "a word without spaces")
    return tuple(dict.fromkeys(found))


def choice(owner: str, field: str, value: Any, options: Iterable[str]) -> str:
    """One of a few words."""
    options = tuple(options)
    if not isinstance(value, str) or value not in options:
        domain = f"one of {', '.join(options)}"
        error = ValueError if isinstance(value, str) else WrongTypeError
        raise error(f"{owner}.{field} must be {domain}, not {show(value)}{close(value, options)}")
    return value if type(value) is str else str.__str__(value)


def member(owner: str, field: str, value: Any, choices: type[_Member]) -> _Member:
    """A member of an enum, itself or by its value or name in any case."""
    if isinstance(value, choices):
        return value
    if not isinstance(value, str):
        refuse_type(owner, field, value, f"one of {choices.__name__}, or its name")
    words = member_words(choices)
    found = words.get(value.lower())
    if found is None:
        known = ", ".join(str(one.value) for one in choices)
        near = close(value.lower(), words)
        raise ValueError(f"{owner}.{field} must be one of {known}, not {show(value)}{near}")
    return found


def member_words(choices: type[_Member]) -> dict[str, _Member]:
    """Every word for a member of an enum, in lower case: names, aliases and values."""
    names = {name.lower(): one for name, one in choices.__members__.items()}
    return {**names, **{str(one.value).lower(): one for one in choices}}


def instance(owner: str, field: str, value: Any, types: type | tuple[type, ...]) -> Any:
    """An instance of one of ``types``."""
    if not isinstance(value, types):
        kinds = types if isinstance(types, tuple) else (types,)
        names = " or ".join(kind.__name__ for kind in kinds)
        refuse_type(owner, field, value, f"{'an' if names.startswith(_AN) else 'a'} {names}")
    return value


_AN = (*"AEIOU", "NN")  # class names that are spoken with a vowel first


def close(word: Any, options: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` or nothing."""
    if not isinstance(word, str):
        return ""
    found = difflib.get_close_matches(word, list(options), n=2)
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else ""


def _plain_integer(value: Any) -> int | None:
    if type(value) is int:
        return value
    if type(value) is bool or not is_number(value, numbers.Integral):
        return None
    return int(value)


def is_number(value: Any, kind: type = numbers.Real) -> bool:
    """Whether ``value`` is a number of ``kind``. NumPy registers time spans as integers too."""
    return isinstance(value, kind) and type(value).__name__ != "timedelta64"


def _plain_real(value: Any) -> int | float | None:
    kind = type(value)
    if kind is not float and kind is not int:
        if isinstance(value, bool) or not is_number(value):
            return None
        try:
            value = int(value) if isinstance(value, numbers.Integral) else float(value)
        except (OverflowError, ValueError):
            return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an int beyond the floats
        return None


def _interval(
    at_least: float | None, above: float | None, at_most: float | None, below: float | None
) -> str:
    bounds = [(">=", at_least), (">", above), ("<=", at_most), ("<", below)]
    parts = [f"{sign} {bound:g}" for sign, bound in bounds if bound is not None]
    return f" {' and '.join(parts)}" if parts else ""
