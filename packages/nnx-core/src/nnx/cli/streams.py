"""The standard streams of a command, in the states in which a shell hands them over."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any

OUTPUT = "the standard output"


class _Output(io.TextIOWrapper):
    """The standard output, which names itself in its errors and escapes what it cannot encode."""

    def write(self, text: str) -> int:
        with _named():
            return super().write(text)

    def flush(self) -> None:
        with _named():
            super().flush()


@contextlib.contextmanager
def _named() -> Any:
    try:
        yield
    except OSError as error:
        error.filename = OUTPUT
        raise


def prepare() -> None:
    """Let every text be printed: letters that a terminal lacks become escapes.

    A closed stream (``>&-``) is one that nobody reads.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper):
        how: dict[str, Any] = {"encoding": out.encoding, "line_buffering": out.line_buffering}
        how["write_through"] = out.write_through
        sys.stdout = _Output(out.detach(), errors="backslashreplace", **how)


def finish() -> None:
    """At the end of the process: what cannot be written is not tried again."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
