"""The progress bar of a fit."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

# A bar that is redrawn more often than the eye follows only costs time.
_REDRAW_SECONDS = 0.1


class Progress:
    """One tqdm bar over the batches of a fit; nothing at all when it is off.

    It is off when the standard error stream is no terminal, or when
    ``NNX_TQDM_DISABLE`` is set to 1.
    """

    def __init__(self, *, epochs: int, batches_per_epoch: int | None, done: int = 0) -> None:
        self.on = _wanted()
        self._bar: Any = None
        self._pending = 0
        self._next_draw = 0.0
        self._notes: dict[str, str] = {}
        self._epochs = epochs
        self._total = None if batches_per_epoch is None else batches_per_epoch * epochs
        self._done = done

    def start_epoch(self, position: int) -> None:
        """The ``position``-th epoch of this fit (from 1) begins."""
        if not self.on:
            return
        if self._bar is None:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=self._total, initial=self._done, unit="batch", leave=True)
        self._bar.set_description_str(f"epoch {position}/{self._epochs}", refresh=False)

    def batch(self, loss: float | None) -> None:
        """One more batch is done."""
        self._pending += 1
        now = time.monotonic()
        if now >= self._next_draw:
            self._next_draw = now + _REDRAW_SECONDS
            if loss is not None:
                self._notes["loss"] = f"{loss:.4g}"
            self._draw()

    def note(self, **values: float | None) -> None:
        """Show epoch-level values beside the loss; ``None`` removes one."""
        if not self.on:
            return
        for name, value in values.items():
            if value is None:
                self._notes.pop(name, None)
            else:
                self._notes[name] = f"{value:.4g}"
        self._draw()

    def _draw(self) -> None:
        if self._bar is None:
            return
        self._bar.set_postfix(self._notes, refresh=False)
        self._bar.update(self._pending)
        self._pending = 0

    def close(self) -> None:
        """Draw what is pending and leave the bar."""
        if self._bar is not None:
            self._draw()
            self._bar.close()
            self._bar = None


def _wanted() -> bool:
    if os.environ.get("NNX_TQDM_DISABLE", "").strip() == "1":
        return False
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:  # a closed stream
        return False
