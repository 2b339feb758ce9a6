"""The one root of the errors that NNx defines."""

from __future__ import annotations

from typing import Any


class NNxError(Exception):
    """What every error class of NNx derives from, in every distribution.

    Beside it each keeps its built-in bases: a refusal of a value is a ``ValueError``
    too. Built-in errors that NNx raises as they are (a ``FileNotFoundError`` of a path)
    are not among these, and warnings are warnings.

    Every one travels between processes and is copied with its message and attributes,
    whatever its constructor takes.
    """

    def __reduce__(self) -> Any:
        return _rebuilt, (type(self), self.args), self.__dict__ or None


def _rebuilt(kind: type[NNxError], arguments: tuple[Any, ...]) -> NNxError:
    """An error with the message it has, without going through its constructor again."""
    new: Any = OSError.__new__ if issubclass(kind, OSError) else kind.__new__
    error: NNxError = new(kind, *arguments)
    error.args = arguments
    return error
