"""Warnings that point at the line of the caller's that caused them."""

from __future__ import annotations

import sys
import warnings


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the first frame that is outside the namespace ``nnx`` and its ``with`` blocks."""
    level = 2
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
        level += 1
    warnings.warn(message, category, stacklevel=level)


def _is_ours(module: str) -> bool:
    return module == "nnx" or module.startswith(("nnx.", "contextlib"))
