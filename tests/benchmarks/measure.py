"""What a benchmark returns, and how two things are timed beside each other."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One line of the table.

    ``ours`` and ``other`` are in ``unit``; ``against`` says what the other is;
    ``target`` is the figure that the project promises, in words ("<= 1.05x",
    "<= 0.6 s"), and ``met`` whether this measurement keeps it (``None``: no promise).
    """

    name: str
    ours: float
    other: float | None = None
    unit: str = "ms"
    against: str = ""
    target: str = ""
    met: bool | None = None

    @property
    def ratio(self) -> float | None:
        return None if not self.other else self.ours / self.other


def interleaved(
    ours: Callable[[], object], other: Callable[[], object], *, repeats: int = 7, warmup: int = 1
) -> tuple[float, float]:
    """Median seconds of each, called in turn so that both see the same machine."""
    for _ in range(warmup):
        ours()
        other()
    times: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats):
        order = (0, 1) if repeat % 2 == 0 else (1, 0)
        for which in order:
            gc.collect()
            start = time.perf_counter()
            (ours, other)[which]()
            times[which].append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])


def seconds(call: Callable[[], object], *, repeats: int = 7, warmup: int = 1) -> float:
    """Median seconds of one call."""
    return interleaved(call, lambda: None, repeats=repeats, warmup=warmup)[0]
