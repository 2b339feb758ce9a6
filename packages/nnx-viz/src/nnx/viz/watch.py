"""Follow a run in the terminal, from its committed history alone.

Nothing of the run is written or locked, so the training process does not
notice.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nnx.store.paths import RunPaths
from nnx.store.pointer import locate_run
from nnx.store.run import NNRun
from nnx.utils.locks import is_held

if TYPE_CHECKING:
    from nnx.records import NNIterationDataPoint
    from rich.console import Console, RenderableType

_BARS = "▁▂▃▄▅▆▇█"
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is committed of a run at one moment."""

    run_id: str
    status: str  # "waiting" | "training" | "finished" | "stopped"
    epochs: tuple[NNIterationDataPoint, ...]  # the last record of each epoch
    improved: frozenset[int]
    done: int
    planned: int


def snapshot(run_id: str, root: str | None = None) -> Snapshot:
    """Read a run's committed history; ``FileNotFoundError`` for a run that is not there."""
    from nnx.viz.report.reading import view_of

    paths = locate_run(run_id, root)
    training = is_held(paths.lease)
    run = _load(paths, root, training)
    if run is None:
        return Snapshot(paths.id, "waiting", (), frozenset(), 0, 0)
    records = list(run.idps or [])
    view = view_of(run, records)
    planned = (run.trainer or run.train).n_epochs
    first = _first_epoch(run)
    done = view.epochs[-1].epoch_idx + 1 - first if view.epochs else 0
    if getattr(run.train, "resume_epochs", "additional") == "planned":
        done += first
    status = "training" if training else "finished" if done >= planned else "stopped"
    return Snapshot(paths.id, status, tuple(view.epochs), view.improved, done, planned)


def _load(paths: RunPaths, root: str | None, training: bool) -> NNRun | None:
    """The run, or ``None`` while a training process has reserved it and committed nothing."""
    try:
        return NNRun.load(paths.id, root=root)
    except FileNotFoundError:
        if training:
            return None
        raise


def _first_epoch(run: NNRun) -> int:
    status = run.resume_status
    if status is None or status.source_epoch is None:
        return 0
    return status.source_epoch + 1


def watch(
    run_id: str,
    *,
    root: str | None = None,
    interval: float = 1.0,
    once: bool = False,
    console: Console | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Snapshot:
    """Show a run until it ends (or Ctrl-C), and return the last snapshot.

    ``interval`` is the number of seconds between looks; the history is read
    only when it has changed. ``once`` prints one view and returns.
    """
    from rich.console import Console
    from rich.live import Live

    if not interval > 0:
        raise ValueError(f"interval must be a number of seconds > 0, not {interval!r}")
    console = console or Console()
    current, seen = snapshot(run_id, root), _stamp(run_id, root)
    if once or not console.is_terminal:
        console.print(render(current))
        return current
    pace = _Pace(current.done)
    with Live(render(current), console=console, auto_refresh=False, transient=False) as live:
        while current.status in ("training", "waiting"):
            try:
                sleep(interval)
            except KeyboardInterrupt:
                break
            stamp = _stamp(run_id, root)
            if stamp != seen:
                current, seen = snapshot(run_id, root), stamp
            live.update(render(current, pace.remaining(current)), refresh=True)
    return current


def _stamp(run_id: str, root: str | None) -> Any:
    """Changes whenever the run commits, starts or ends."""
    paths = locate_run(run_id, root)
    stats: list[tuple[int, int, int] | None] = []
    for path in (paths.checkpoint("last"), paths.metadata):
        try:
            found = os.stat(path)
            stats.append((found.st_mtime_ns, found.st_size, found.st_ino))
        except FileNotFoundError:
            stats.append(None)
    return (*stats, is_held(paths.lease))


class _Pace:
    """How long is left, from the epochs that committed while we looked."""

    def __init__(self, done: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start, self._first = clock(), done
        self._last: tuple[float, int] | None = None

    def remaining(self, state: Snapshot) -> float | None:
        if state.done <= self._first or state.status != "training":
            return None
        if self._last is None or self._last[1] != state.done:
            self._last = (self._clock(), state.done)
        when, done = self._last
        per_epoch = (when - self._start) / (done - self._first)
        return max(0.0, per_epoch * (state.planned - done) - (self._clock() - when))


def render(state: Snapshot, remaining: float | None = None) -> RenderableType:
    """The view of one snapshot, for rich."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    if state.status == "waiting":
        return Panel("No epoch is committed yet.", title=f"run {state.run_id[:8]}")
    colour = {"training": "cyan", "finished": "green", "stopped": "yellow"}[state.status]
    head = Text.assemble(
        (state.status, f"bold {colour}"), f"  epoch {state.done} of {state.planned}"
    )
    if remaining is not None:
        head.append(f"  about {_duration(remaining)} left", style="dim")
    parts: list[RenderableType] = [
        head,
        # A bar ends no line by itself; a padding does.
        Padding(
            ProgressBar(total=max(state.planned, 1), completed=state.done, complete_style=colour)
        ),
    ]
    for name, values in _series(state):
        parts.append(
            Text.assemble((f"{name:<16}", "dim"), sparkline(values), f"  {values[-1]:.5g}")
        )
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("epoch", "lr", "train loss", "val loss", "val acc"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for record in state.epochs[-_SHOWN:]:
        train, val = record.monitored_train_edp(), record.val_edp
        table.add_row(
            str(record.epoch_idx),
            f"{record.lr:.3g}",
            _number(train.loss),
            _number(val.loss if val else None),
            _number(val.accuracy if val else None),
            "★ best" if record.epoch_idx in state.improved else "",
        )
    parts.append(table)
    return Panel(Group(*parts), title=f"run {state.run_id[:8]}", title_align="left")


def _series(state: Snapshot) -> list[tuple[str, list[float]]]:
    named = [
        ("training loss", [r.monitored_train_edp().loss for r in state.epochs]),
        ("validation loss", [r.val_edp.loss if r.val_edp else None for r in state.epochs]),
        ("accuracy", [r.val_edp.accuracy if r.val_edp else None for r in state.epochs]),
    ]
    kept = [(n, [float(v) for v in values if v is not None and v == v]) for n, values in named]
    return [(n, values) for n, values in kept if values]


def sparkline(values: list[float], width: int = 40) -> str:
    """A line of block characters, the lowest value the lowest block."""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    finite = [v for v in values if abs(v) != float("inf")]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = (high - low) or 1.0
    return "".join(
        _BARS[min(len(_BARS) - 1, max(0, int((v - low) / span * len(_BARS))))]
        if abs(v) != float("inf")
        else "!"
        for v in values
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {seconds:02d}s"
