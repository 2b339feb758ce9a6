"""What a benchmark returns, and how things are timed beside each other."""

from __future__ import annotations

import gc
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

quick = False  # two turns of everything: to see that it runs, not what it costs


@dataclass(frozen=True)
class Row:
    """One line of the table.

    ``ours`` and ``other`` are in ``unit``; ``against`` says what the other is;
    ``spread`` is that of :class:`Beside` (``None`` for what is counted, not timed);
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
    spread: float | None = None

    @property
    def ratio(self) -> float | None:
        return None if not self.other else self.ours / self.other


class Beside(NamedTuple):
    """Two things timed in turn: the median seconds of each, and how far the turns differ.

    ``spread`` is the interquartile range of the turns' ratios as a part of their
    median, so it stays true when either side is divided by a count.
    """

    ours: float
    other: float
    spread: float


def spread(values: Sequence[float]) -> float:
    """The interquartile range as a part of the median."""
    if len(values) < 2:
        return float("nan")
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle if middle else float("nan")


def peak_mebibytes() -> float:
    """The most memory that this process has held.

    ``ru_maxrss`` will not do where it can be helped: it starts at what the parent
    held when it started this process.
    """
    status = Path("/proc/self/status")
    if status.exists():
        lines = status.read_text(encoding="utf-8").splitlines()
        (held,) = (line for line in lines if line.startswith("VmHWM:"))
        return int(held.split()[1]) / 1024
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 2**20


def children_seconds() -> float:
    """A clock: the processor time of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def turns(
    calls: Sequence[Callable[[], object]],
    *,
    repeats: int = 7,
    warmup: int = 1,
    clock: Callable[[], float] | None = time.perf_counter,
) -> list[list[float]]:
    """The seconds of each call in every turn; the order goes to and fro.

    ``clock=time.thread_time`` counts this thread's own work, which a busy machine
    hardly disturbs; with ``clock=None`` the calls return the seconds themselves.
    """
    if quick:
        repeats, warmup = 2, 0
    for _ in range(warmup):
        for call in calls:
            call()
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # what is imported already is no part of a turn's garbage collections
    times: list[list[float]] = [[] for _ in calls]
    for repeat in range(repeats):
        order = list(zip(calls, times))
        for call, own in order if repeat % 2 == 0 else reversed(order):
            gc.collect()
            start = clock() if clock else 0.0
            result = call()
            own.append(clock() - start if clock else float(result))  # type: ignore[arg-type]
    return times


def beside(ours: Sequence[float], other: Sequence[float]) -> Beside:
    """Two lists of the same turns, summed up."""
    ratios = [a / b for a, b in zip(ours, other)]
    return Beside(statistics.median(ours), statistics.median(other), spread(ratios))


def interleaved(
    ours: Callable[[], object],
    other: Callable[[], object],
    *,
    repeats: int = 7,
    warmup: int = 1,
    clock: Callable[[], float] | None = time.perf_counter,
) -> Beside:
    """Two calls timed in turn, so that both see the same machine; see :func:`turns`."""
    return beside(*turns([ours, other], repeats=repeats, warmup=warmup, clock=clock))


def seconds(
    call: Callable[[], object],
    *,
    repeats: int = 7,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float]:
    """The median seconds of one call, and the spread of its turns."""
    (times,) = turns([call], repeats=repeats, warmup=warmup, clock=clock)
    return statistics.median(times), spread(times)
