"""Holding a Ctrl-C over a few operations that belong together."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def hold_interrupts() -> Iterator[None]:
    """Deliver a first Ctrl-C only after the block; a second one stops at once.

    Outside the main thread, where Python delivers no signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous: Any = signal.getsignal(signal.SIGINT)
    if not callable(previous):  # ignored, or handled outside Python
        yield
        return
    held: list[Any] = []

    def hold(signum: int, frame: Any) -> None:
        held.append(frame)
        if len(held) > 1:
            signal.signal(signal.SIGINT, previous)
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is hold:
            signal.signal(signal.SIGINT, previous)
            if held:
                previous(signal.SIGINT, held[0])
