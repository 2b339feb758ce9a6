"""``(id, version)`` to a thing, or to the name of a thing not imported yet."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from nnx.errors import NNxError
from nnx.plugins import siblings
from nnx.utils import validation as check

T = TypeVar("T")
Key = tuple[str, int]


class RegistryConflictError(ValueError, NNxError):
    """A second registration of a key that another owner holds."""


class UnknownIdError(LookupError, ValueError, NNxError):
    """Nothing is registered under the asked id and version: a refused configuration."""


@dataclass(frozen=True, slots=True)
class _Entry:
    value: Any
    owner: str


def load_reference(reference: str) -> Any:
    """Import ``"package.module:attribute"`` (dots in the attribute are followed)."""
    module_name, _, attribute = reference.partition(":")
    value = importlib.import_module(module_name)
    for part in attribute.split(".") if attribute else ():
        value = getattr(value, part)
    return value


class Registry(Generic[T]):
    """One table of contributions, shared by everything that can be registered.

    ``kind`` is what its errors call an entry ("model factory"); ``error`` is
    the exception class of an unknown id. A value that is a string is a lazy
    reference, imported at the first :meth:`resolve`; ``check``, when given, is
    called with the key and the imported value and raises on a wrong kind of
    value. ``hint`` says what could provide an unknown id.
    """

    def __init__(
        self,
        kind: str,
        *,
        error: type[Exception] = UnknownIdError,
        check: Callable[[Key, Any], None] | None = None,
        hint: Callable[[str], str | None] = siblings.hint_for_id,
    ) -> None:
        self.kind = kind
        self._error = error
        self._check = check
        self._hint = hint
        self._entries: dict[Key, _Entry] = {}
        self._lock = threading.RLock()

    def register(
        self, id: str, version: int, value: T | str, *, owner: str, replace: bool = False
    ) -> None:
        """Add ``value``; refuse a key that is taken unless ``replace`` is set."""
        key = self._key(id, version)
        with self._lock:
            held = self._entries.get(key)
            if held is not None and not replace:
                raise RegistryConflictError(
                    f"{self.kind} {_show(key)} is already registered by {held.owner}; "
                    f"{owner} cannot register it again. Choose another id or version."
                )
            self._entries[key] = _Entry(value, owner)

    def unregister(self, id: str, version: int) -> bool:
        """Remove a key; say whether it was there."""
        with self._lock:
            return self._entries.pop(self._key(id, version), None) is not None

    def unregister_owner(self, owner: str) -> None:
        """Remove all that ``owner`` registered."""
        with self._lock:
            self._entries = {k: e for k, e in self._entries.items() if e.owner != owner}

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Put the table back as it was after the block."""
        with self._lock:
            entries = dict(self._entries)
        try:
            yield
        finally:
            with self._lock:
                self._entries = entries

    def resolve(self, id: str, version: int = 1) -> T:
        """The registered value, imported if it was a reference.

        Raises the registry's error when the key is unknown, naming the
        registered versions, close matches and the distribution to install.
        """
        key = self._key(id, version)
        with self._lock:
            entry = self._entries.get(key)
        if entry is None:
            raise self._error(self._unknown(key))
        value = entry.value
        if isinstance(value, str):
            try:
                value = load_reference(value)
            except Exception as error:  # a module may fail in any way
                kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
                raise ImportError(
                    f"{self.kind} {_show(key)} of {entry.owner} cannot be imported "
                    f"from {entry.value!r}: {kind}{error}"
                ) from error
            if self._check is not None:
                self._check(key, value)
            with self._lock:
                if self._entries.get(key) is entry:
                    self._entries[key] = _Entry(value, entry.owner)
        return value

    def owner(self, id: str, version: int = 1) -> str:
        """Who registered a key; ``KeyError`` when nobody did."""
        return self._entries[self._key(id, version)].owner

    def keys(self) -> tuple[Key, ...]:
        """The registered keys, sorted."""
        return tuple(sorted(self._entries))

    def __iter__(self) -> Iterator[Key]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def _key(self, id: str, version: int) -> Key:
        if not isinstance(id, str) or not id:
            raise ValueError(f"a {self.kind} id must be a non-empty string, not {id!r}")
        if not check.is_word(id):
            raise ValueError(f"a {self.kind} id must be one word without spaces, not {id!r}")
        if isinstance(version, bool) or not isinstance(version, int) or version < 1:
            raise ValueError(f"a {self.kind} version must be an integer >= 1, not {version!r}")
        return id, version

    def _unknown(self, key: Key) -> str:
        id, _ = key
        message = f"no {self.kind} is registered as {_show(key)}"
        versions = sorted(v for i, v in self._entries if i == id)
        if versions:
            return f"{message}; registered versions of {id!r}: {', '.join(map(str, versions))}"
        names = sorted({i for i, _ in self._entries})
        close = difflib.get_close_matches(id, names, n=3)
        if close:
            message += f"; did you mean {' or '.join(map(repr, close))}?"
        hint = self._hint(id)
        return f"{message}. {hint}" if hint else message


def _show(key: Key) -> str:
    return f"{key[0]}@v{key[1]}"
