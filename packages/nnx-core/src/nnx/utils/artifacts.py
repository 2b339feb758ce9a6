"""Fitted things as data: one way to spell, digest, save and load them.

An artifact is a frozen dataclass with ``state()`` and ``from_state()``. What it
inherits here never runs code from a file and leaves the old file or the new one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from nnx.utils.files import atomic_write
from nnx.utils.identity import hash_bytes
from nnx.utils.jsonlike import canonical, freeze
from nnx.utils.validation import show

if TYPE_CHECKING:
    from typing_extensions import Self


class JsonArtifact:
    """Base of what is fitted, bound to its origin and stored as JSON.

    A subclass states its ``FORMAT`` (stored under ``"format"``) and the error
    class that its refusals use, ``_error``.
    """

    __slots__ = ()
    FORMAT: ClassVar[str] = ""
    _error: ClassVar[type[ValueError]] = ValueError

    def state(self) -> dict[str, Any]:
        """The whole artifact as JSON-like data."""
        raise NotImplementedError

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Rebuild from :meth:`state`."""
        raise NotImplementedError

    def canonical_bytes(self) -> bytes:
        """The one spelling: UTF-8 JSON, sorted keys, no spaces."""
        return canonical(freeze(self.state()))

    def digest(self) -> str:
        """``"sha256:<hex>"`` of :meth:`canonical_bytes`."""
        return str(hash_bytes(self.canonical_bytes()).value)

    def to_json(self) -> str:
        """Readable JSON of :meth:`state`; floats are exact."""
        return json.dumps(
            self.state(), indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what :meth:`to_json` wrote."""
        try:
            state = json.loads(text, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise cls._error(f"a {cls.__name__} must be JSON: {error}") from None
        return cls.from_state(state)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the artifact as JSON; the old or the new file survives."""
        text = self.to_json() + "\n"
        with atomic_write(path) as stream:
            stream.write(text)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what :meth:`save` wrote; a refusal names the file."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except cls._error as error:
            raise type(error)(f"{os.fspath(path)}: {error}") from None
        except UnicodeDecodeError:
            raise cls._error(f"{os.fspath(path)}: a {cls.__name__} is JSON text") from None

    @classmethod
    def _open(
        cls, state: Any, keys: Mapping[str, bool], *, kind: str | None = None
    ) -> dict[str, Any]:
        """The fields of a document of this format; ``keys`` says which are required."""
        what = f"a {cls.FORMAT} document" + (f" of kind {kind!r}" if kind else "")
        if not isinstance(state, Mapping) or state.get("format") != cls.FORMAT:
            found = state.get("format") if isinstance(state, Mapping) else show(state)
            raise cls._error(f"this is not {what} (format: {found!r})")
        if kind is not None and state.get("kind") != kind:
            raise cls._error(f"this is not {what}, but of kind {show(state.get('kind'))}")
        fixed = {"format"} if kind is None else {"format", "kind"}
        missing = [key for key, required in keys.items() if required and key not in state]
        unknown = [key for key in state if key not in keys and key not in fixed]
        if missing or unknown:
            problems = [f"lacks {show(key)}" for key in missing]
            problems += [f"has the unknown key {show(key)}" for key in unknown]
            raise cls._error(f"{what} {', '.join(problems)}")
        return {key: state[key] for key in keys if key in state}


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")
