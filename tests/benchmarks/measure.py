"""What a benchmark returns, and how two things are timed beside each other."""

from __future__ import annotations

import gc
import resource
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


def children_seconds() -> float:
    """A clock: the processor time of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def interleaved(
    ours: Callable[[], object],
    other: Callable[[], object],
    *,
    repeats: int = 7,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float]:
    """Median seconds of each, called in turn so that both see the same machine.

    ``clock=time.thread_time`` counts this thread's own work, which a busy
    machine hardly disturbs.
    """
    for _ in range(warmup):
        ours()
        other()
    times: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats):
        order = (0, 1) if repeat % 2 == 0 else (1, 0)
        for which in order:
            gc.collect()
            start = clock()
            (ours, other)[which]()
            times[which].append(clock() - start)
    return statistics.median(times[0]), statistics.median(times[1])


def seconds(call: Callable[[], object], *, repeats: int = 7, warmup: int = 1) -> float:
    """Median seconds of one call."""
    return interleaved(call, lambda: None, repeats=repeats, warmup=warmup)[0]
