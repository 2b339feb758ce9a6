"""Text from tokens while they come: whole characters, and where to stop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_UNFINISHED = "\ufffd"  # what a decoder shows for a part of a character


class TextStream:
    """The text of a growing sequence of tokens, piece by piece.

    The pieces joined are the text after ``context``. A piece never ends inside a
    character: bytes wait for those that complete it. Only the last few tokens
    are decoded again, whatever the length.
    """

    def __init__(self, tokenizer: Any, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        # A few tokens of context: a decoder may join a token to the one before it.
        self._ids = list(context[-8:])
        self._before = self._decode()

    def push(self, token: int) -> str:
        """The text that ``token`` completes; empty while a character is unfinished."""
        self._ids.append(token)
        text = self._decode()
        if text.endswith(_UNFINISHED):
            return ""
        return self._take(text)

    def finish(self) -> str:
        """What is left, an unfinished character included."""
        return self._take(self._decode())

    def _take(self, text: str) -> str:
        piece = text[len(self._before) :]
        if len(self._ids) > 16:
            self._ids = self._ids[-8:]
            text = self._decode()
        self._before = text
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
