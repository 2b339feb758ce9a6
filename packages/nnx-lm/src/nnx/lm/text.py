"""Text from tokens while they come: whole characters, and where to stop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_UNFINISHED = "\ufffd"  # what a decoder shows for bytes that are no character (yet)
_LONGEST = 3  # at most so many of a character's bytes wait for the last one
_CONTEXT = 8  # tokens before new ones: a decoder may join a token to the one before it


class TextStream:
    """The text of a growing sequence of tokens, piece by piece.

    The pieces joined are the text after ``context``. A piece never ends inside a
    character: bytes wait for those that complete it. Only the last few tokens
    are decoded again, whatever the length.
    """

    def __init__(self, tokenizer: Any, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(context[-_CONTEXT:])
        self._given = len(self._decode())  # characters of the last tokens' text

    def push(self, token: int) -> str:
        """The text that ``token`` completes; empty while a character is unfinished."""
        self._ids.append(token)
        text = self._decode()
        waiting = min(len(text) - len(text.rstrip(_UNFINISHED)), _LONGEST)
        piece = text[self._given : len(text) - waiting]
        self._given += len(piece)
        if len(self._ids) > 4 * _CONTEXT:
            self._ids = self._ids[-_CONTEXT:]
            self._given = len(self._decode()) - (len(text) - self._given)
        return piece

    def finish(self) -> str:
        """What is left, an unfinished character included."""
        text = self._decode()
        piece, self._given = text[self._given :], len(text)
        return piece

    def _decode(self) -> str:
        return str(self._tokenizer.decode(self._ids))


class StopMatcher:
    """Whether one of some strings has appeared in a growing text."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._keep = max(map(len, self._stop), default=1) - 1
        self._tail = ""

    def found(self, piece: str) -> bool:
        """Whether a string is complete with ``piece``."""
        window = self._tail + piece
        self._tail = window[-self._keep :] if self._keep else ""
        return any(text in window for text in self._stop)
