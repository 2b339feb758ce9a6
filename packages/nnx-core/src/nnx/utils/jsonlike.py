"""Values that JSON can hold, frozen.

A configuration that others wrote (the config of a registered factory, the
options of a transform) is copied into immutable containers when it arrives:
mappings become :class:`FrozenDict`, sequences become tuples, NumPy scalars
become plain numbers. Anything that could carry code or lose meaning on disk is
refused with the path to it.
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

from nnx.utils.validation import is_number, show

_DEEPEST = 100  # levels of a configuration; safely below Python's own limit

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")


class FrozenList(list[T]):
    """A list that cannot change: it equals, prints and indexes as a list, and hashes."""

    __slots__ = ()

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("this list belongs to a frozen configuration and cannot change; copy it")

    append = clear = extend = insert = pop = remove = reverse = sort = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self))

    def __copy__(self) -> FrozenList[T]:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (list(self),)


class FrozenDict(Mapping[K, V]):
    """A read-only mapping in insertion order; item assignment is a ``TypeError``."""

    __slots__ = ("_items",)
    _items: dict[K, V]

    def __init__(self, items: Mapping[K, V] | Iterable[tuple[K, V]] = ()) -> None:
        object.__setattr__(self, "_items", dict(items))

    def __getitem__(self, key: K) -> V:
        return self._items[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError("this mapping belongs to a frozen configuration and cannot change")

    __delattr__ = __setattr__  # type: ignore[assignment]

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)

    def __or__(self, other: Mapping[K, V]) -> dict[K, V]:
        return {**self, **other}

    def __ror__(self, other: Mapping[K, V]) -> dict[K, V]:
        return {**other, **self}

    def copy(self) -> dict[K, V]:
        """A plain dict that may change."""
        return dict(self._items)

    def __copy__(self) -> FrozenDict[K, V]:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self._items),)


def freeze(value: Any, where: str = "value") -> Any:
    """An immutable copy of a JSON-like ``value``; ``where`` starts the path in errors.

    Raises ``ValueError`` for a non-finite number, a key that is not a string, a
    container that holds itself, and any other kind of value (callables, sets,
    bytes, arrays, objects).
    """
    return _freeze(value, where, ())


def freeze_mapping(value: Any, where: str) -> FrozenDict[str, Any]:
    """:func:`freeze` for a value that must be a mapping; ``None`` is the empty one."""
    if value is None:
        return FrozenDict()
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be a mapping, not {show(value)}")
    return freeze(value, where)


def thaw(value: Any) -> Any:
    """Plain dicts (keys sorted) and lists of a frozen value: what goes to disk."""
    if isinstance(value, Mapping):
        return {key: thaw(value[key]) for key in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [thaw(item) for item in value]
    return value


def canonical(value: Any) -> bytes:
    """The one spelling of a frozen value: sorted keys, no spaces, UTF-8.

    ``1``, ``1.0`` and ``True`` are spelled differently, so equal bytes mean the
    same configuration.
    """
    return json.dumps(
        thaw(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode("utf-8", "surrogatepass")


def finite(value: Any) -> Any:
    """``value`` for strict JSON: a non-finite float becomes ``{"$float": "nan"}``."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return value


def restore(value: Any) -> Any:
    """The inverse of :func:`finite`."""
    if isinstance(value, dict):
        if value.keys() == {"$float"}:
            return float(value["$float"])
        return {k: restore(v) for k, v in value.items()}
    if isinstance(value, list):
        return [restore(v) for v in value]
    return value


def _freeze(value: Any, where: str, parents: tuple[int, ...]) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if _is_numpy_bool(value):
        return bool(value)
    if is_number(value, numbers.Integral):
        return int(value)
    if is_number(value):
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"{where} must be finite, not {show(value)}")
        return number
    if len(parents) > _DEEPEST:
        raise ValueError(f"{show(where)} is nested too deeply (more than {_DEEPEST} levels)")
    if id(value) in parents:
        raise ValueError(f"{where} holds itself; a configuration must be a finite tree")
    if isinstance(value, Mapping):
        return _freeze_mapping(value, where, (*parents, id(value)))
    if isinstance(value, (list, tuple)):
        inner = (*parents, id(value))
        return tuple(_freeze(item, f"{where}[{i}]", inner) for i, item in enumerate(value))
    what = "a callable" if callable(value) else f"a {type(value).__name__}"
    raise ValueError(
        f"{where} is {what} ({show(value)}); only JSON-like values (None, booleans, numbers, "
        "strings, lists and mappings of those) can be recorded. Register code under an id instead."
    )


def _freeze_mapping(
    value: Mapping[Any, Any], where: str, parents: tuple[int, ...]
) -> FrozenDict[str, Any]:
    frozen: dict[str, Any] = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise ValueError(f"{where} has the key {show(key)}; keys must be strings")
        frozen[str.__str__(key)] = _freeze(item, f"{where}.{key}", parents)
    return FrozenDict(frozen)


def _is_numpy_bool(value: Any) -> bool:
    kind = type(value)
    return kind.__module__ == "numpy" and kind.__name__ in {"bool", "bool_"}
