"""What every configuration class is made of.

A params class is a frozen, keyword-only, slotted dataclass whose ``_STATE``
table says how its fields go to disk: in which order, under which key, and
whether a field at its default is left out. ``state()`` and ``from_state()`` are
read off that table. The order and the spelling decide run ids and are a
contract: append to a table, never reorder it.
"""

from __future__ import annotations

import ast
import dataclasses
import os
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from nnx.utils.files import atomic_write
from nnx.utils.jsonlike import FrozenList
from nnx.utils.validation import close, member_words, show

Self = TypeVar("Self", bound="Params")
Y = TypeVar("Y", bound="YamlFile")
E = TypeVar("E", bound=Enum)


Read = TypeVar("Read")
Given = TypeVar("Given")


class Converted(Generic[Read, Given]):
    """The annotation of a field that is given in one of two ways and read in the first.

    ``device: Converted[Devices, str] = converted(Devices.CPU)`` takes a member or a word
    and holds the member. For type checkers alone: at run time the field is an ordinary one.
    """

    def __get__(self, instance: object | None, owner: type) -> Read:
        raise NotImplementedError

    def __set__(self, instance: object, value: Read | Given) -> None:
        raise NotImplementedError


def converted(default: Any) -> Any:
    """The default of a :class:`Converted` field, or its ``dataclasses.field()``."""
    return default


def _same(value: Any) -> Any:
    return value


@dataclasses.dataclass(frozen=True, slots=True)
class StateField:
    """How one field is stored.

    ``always`` fields are written at any value, the others only away from their
    default (``omit`` replaces that rule). ``encode`` and ``decode`` translate
    the value; ``read`` takes it from elsewhere than the attribute ``name``.
    """

    name: str
    always: bool = False
    key: str = ""
    encode: Callable[[Any], Any] = _same
    decode: Callable[[Any], Any] = _same
    omit: Callable[[Any], bool] | None = None
    read: Callable[[Any], Any] | None = None


def always(name: str, **how: Any) -> StateField:
    return StateField(name, always=True, **how)


def optional(name: str, **how: Any) -> StateField:
    return StateField(name, **how)


class YamlFile:
    """A configuration that can be written, and read, by hand."""

    __slots__ = ()
    # The part of a whole run's file that holds this class; "" when it is no part of one.
    _SECTION: ClassVar[str] = ""

    def state(self) -> dict[str, Any]:
        raise NotImplementedError

    @classmethod
    def from_state(cls: type[Y], state: Mapping[str, Any]) -> Y:
        raise NotImplementedError

    def to_yaml(self, path: str | os.PathLike[str] | None = None) -> str:
        """The state as YAML, also written to ``path`` when one is given."""
        from nnx.utils import yamlio

        text = yamlio.dump(self.state())
        if path is not None:
            with atomic_write(path) as stream:
                stream.write(text)
        return text

    @classmethod
    def from_yaml(cls: type[Y], source: str | os.PathLike[str]) -> Y:
        """Read a file, or YAML text (anything of several lines, or with a ``": "``).

        The file of a whole run is read for this class's part of it. An unknown
        key is a ``ValueError`` with close matches, and a value keeps the rules
        of the constructor: numbers are numbers, never strings.
        """
        from nnx.utils import yamlio

        if isinstance(source, str) and ("\n" in source or ": " in source):
            where, text = "YAML text", source
        else:
            where = os.fspath(source)
            try:
                text = Path(source).read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{where} is not UTF-8 text: {error}") from error
        state = yamlio.load(text, where)
        if cls._SECTION and isinstance(state, Mapping) and {"model", cls._SECTION} <= state.keys():
            where, state = f"{where}, section {cls._SECTION!r}", state[cls._SECTION]
        try:
            return cls._from_file(state)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error

    @classmethod
    def _from_file(cls: type[Y], state: Any) -> Y:
        return cls.from_state(state)


class Params(YamlFile):
    """Base of the configuration classes."""

    __slots__ = ()
    _STATE: ClassVar[tuple[StateField, ...]] = ()

    def state(self) -> dict[str, Any]:
        """This configuration as plain data; fields at their default are left out."""
        defaults = _defaults(type(self))
        state: dict[str, Any] = {}
        for field in self._STATE:
            if field.omit is not None and field.omit(self):
                continue
            value = getattr(self, field.name) if field.read is None else field.read(self)
            if not field.always and field.omit is None and value == defaults[field.name]:
                continue
            state[field.key or field.name] = field.encode(value)
        return state

    @classmethod
    def from_state(cls: type[Self], state: Mapping[str, Any]) -> Self:
        """Rebuild from :meth:`state`; an unknown or missing key is a ``ValueError``."""
        fields = {field.key or field.name: field for field in cls._STATE}
        check_keys(cls.__name__, state, fields)
        missing = [k for k, f in fields.items() if k not in state and f.name in _required(cls)]
        if missing:
            raise ValueError(f"{cls.__name__} lacks {', '.join(map(repr, missing))}")
        values = {}
        for key, value in state.items():
            field = fields[key]
            try:
                values[field.name] = field.decode(value)
            except (ValueError, TypeError, AttributeError) as error:
                raise ValueError(f"{cls.__name__} cannot read {key!r}: {error}") from error
        return cls(**values)


def check_keys(owner: str, state: Any, known: Any) -> None:
    """Refuse a state that is not a mapping of known keys, with close matches."""
    if not isinstance(state, Mapping):
        raise ValueError(f"{owner} must be a mapping, not {show(state)}")
    for key in state:
        if key not in known:
            raise ValueError(
                f"{owner} has no key {show(key)}{close(key, known)} "
                f"(keys: {', '.join(sorted(known))})"
            )


def put(params: Any, **values: Any) -> None:
    """Set fields of a frozen instance, from its ``__post_init__``."""
    for name, value in values.items():
        object.__setattr__(params, name, value)


def frozen_list(owner: str, field: str, value: Any, item: Callable[[str, Any], Any]) -> Any:
    """``None``, or an immutable copy with every entry passed through ``item(field, entry)``."""
    if value is None:
        return None
    unordered = (str, bytes, Mapping, set, frozenset)
    if isinstance(value, unordered) or not hasattr(value, "__iter__"):
        raise ValueError(f"{owner}.{field} must be a list or None, not {show(value)}")
    return FrozenList([item(f"{field}[{i}]", entry) for i, entry in enumerate(value)])


def member(enum: type[E]) -> Callable[[Any], E]:
    """A decoder of stored enum values, and of the words that people write for them."""
    words = member_words(enum)

    def decode(value: Any) -> E:
        if isinstance(value, enum):
            return value
        word = value.lower() if isinstance(value, str) else value
        if not isinstance(word, str) or word not in words:
            raise ValueError(
                f"no {enum.__name__} is called {show(value)}{close(word, words)} "
                f"(known: {', '.join(str(one.value) for one in enum)})"
            )
        return words[word]

    return decode


def encode_enum(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def read_literal(value: Any) -> Any:
    """A value that is stored as its ``str()`` ("[16]", "(0.9, 0.999)", "None"), or as itself."""
    if not isinstance(value, str):
        return value
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{show(value)} is not a number, a list or None") from None


def each_state(values: Any) -> list[Any]:
    return [value.state() for value in values]


def field_names(cls: type[Any]) -> tuple[str, ...]:
    """The names of a dataclass's fields."""
    return _facts(cls)[0]


def _defaults(cls: type[Any]) -> Mapping[str, Any]:
    """The default of every field that has one."""
    return _facts(cls)[1]


def _required(cls: type[Any]) -> set[str]:
    return set(field_names(cls)) - _defaults(cls).keys()


# Read off each class once: the names of its fields, and their defaults.
_FACTS: dict[type, tuple[tuple[str, ...], dict[str, Any]]] = {}


def _facts(cls: type[Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    found = _FACTS.get(cls)
    if found is None:
        fields = dataclasses.fields(cls)
        defaults = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
        for f in fields:
            if f.default_factory is not dataclasses.MISSING:
                defaults[f.name] = f.default_factory()
        found = _FACTS[cls] = (tuple(f.name for f in fields), defaults)
    return found
