"""Everything a report says of a run, read from its directory. No checkpoint is loaded."""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nnx.history import iter_history
from nnx.store.metadata import read_metadata
from nnx.store.paths import RunPaths
from nnx.store.pointer import locate_run
from nnx.store.points import verify_point, written_tags
from nnx.store.predictions import StoredPredictions, load_predictions
from nnx.store.run import NNRun
from nnx.utils.tables import flatten_dict

if TYPE_CHECKING:
    from nnx.records import NNIterationDataPoint

# Records beyond this are thinned for drawing; epoch ends are always kept.
MAX_STEPS = 2000


@dataclass(frozen=True, slots=True)
class PointView:
    """One resume point and what verifying it said."""

    tag: str
    epoch: int | None
    generation: int | None
    files: int
    bytes: int
    status: str  # "intact" | "unverified" | "damaged"
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Relative:
    """A run in the lineage of another, by the edge that leads to it."""

    run_id: str
    parent_id: str | None
    checkpoint: str | None
    epoch: int | None
    mode: str
    epochs: int | None
    known: bool


@dataclass(frozen=True, slots=True)
class RunView:
    """One run as the report shows it."""

    run: NNRun
    steps: list[NNIterationDataPoint]
    epochs: list[NNIterationDataPoint]
    total_steps: int
    improved: frozenset[int]  # epochs at which BEST was written
    metadata: Mapping[str, Any]
    points: list[PointView]
    predictions: list[StoredPredictions]
    lineage: list[Relative]
    modified: str
    batches: Mapping[int, int] = field(default_factory=dict)  # epoch -> its number of records

    @property
    def id(self) -> str:
        return self.run.id

    @property
    def short(self) -> str:
        return self.run.id[:8]

    @property
    def config(self) -> dict[str, Any]:
        state = {k: v for k, v in self.run.state().items() if k != "id"}
        return flatten_dict(state)

    def epoch_position(self, record: NNIterationDataPoint) -> float:
        """Where a record lies on an axis of epochs: 1.0 is the end of the first one."""
        return record.epoch_idx + (record.batch_idx + 1) / self.batches[record.epoch_idx]


def read_run(run_id: str, root: str | None = None) -> RunView:
    """Read one run; raises what ``NNRun.load`` raises for one that is not there."""
    run = NNRun.load(run_id, root=root)
    paths = locate_run(run.id, root)
    records = list(iter_history(run.id, root=root)) if run.history else list(run.idps or [])
    return view_of(
        run,
        records,
        best_before=_best_before(run, root),
        metadata=read_metadata(paths),
        points=[_point(paths, tag, root) for tag in written_tags(paths)],
        predictions=load_predictions(run.id, root),
        lineage=_lineage(run, root),
        modified=_modified(paths.dir),
    )


def view_of(
    run: NNRun,
    records: list[NNIterationDataPoint],
    *,
    best_before: float = math.inf,
    **details: Any,
) -> RunView:
    """A view of ``run`` from its records alone; ``details`` as far as they are known.

    ``best_before`` is the score that a continued run had to beat.
    """
    batches: dict[int, int] = {}
    ends: dict[int, NNIterationDataPoint] = {}
    for record in records:
        batches[record.epoch_idx] = max(batches.get(record.epoch_idx, 0), record.batch_idx + 1)
        ends[record.epoch_idx] = record
    return RunView(
        run=run,
        steps=_thinned(records, set(map(id, ends.values()))),
        epochs=list(ends.values()),
        total_steps=len(records),
        improved=_improved(list(ends.values()), best_before),
        batches=batches,
        **{
            "metadata": {},
            "points": [],
            "predictions": [],
            "lineage": [],
            "modified": "",
            **details,
        },
    )


def _thinned(records: list[Any], kept: set[int]) -> list[Any]:
    """Every k-th record and every epoch's last one."""
    stride = -(-len(records) // MAX_STEPS)
    if stride <= 1:
        return records
    return [r for i, r in enumerate(records) if i % stride == 0 or id(r) in kept]


def _best_before(run: NNRun, root: str | None) -> float:
    """The score of the BEST that a run took over; +inf without one, or where it is gone."""
    from nnx.store.standing import score

    status, found = run.resume_status, math.inf
    if status is not None and status.best_epoch is not None:
        for record in iter_history(run.id, root=root, lineage=True):
            if record.epoch_idx > status.best_epoch:
                break
            if record.epoch_idx == status.best_epoch:
                found = score(record)  # in the end, that of the epoch's last record
    return found


def _improved(ends: list[NNIterationDataPoint], best: float) -> frozenset[int]:
    """The epochs that wrote BEST: the monitor's decision, else the first finite score's."""
    from nnx.store.standing import score

    if any(r.selection is not None for r in ends):
        return frozenset(r.epoch_idx for r in ends if r.selection and r.selection.improved)
    epochs = []
    for record in ends:
        value = score(record)
        if value < best:
            best = value
            epochs.append(record.epoch_idx)
    return frozenset(epochs)


def _point(paths: RunPaths, tag: str, root: str | None) -> PointView:
    size = os.path.getsize(paths.checkpoint(tag)) if os.path.exists(paths.checkpoint(tag)) else 0
    try:
        manifest = verify_point(paths.id, tag, root)
    except ValueError as error:
        return PointView(tag, None, None, 0, size, "damaged", str(error))
    if manifest is None:
        return PointView(tag, None, None, 1, size, "unverified", "written without a manifest")
    files = manifest.get("files", {})
    entries = files.values() if isinstance(files, Mapping) else files
    position = manifest.get("position", manifest)
    return PointView(
        tag,
        position.get("completed_epoch"),
        manifest.get("generation"),
        len(files),
        sum(int(e.get("size", 0)) for e in entries) or size,
        "intact",
    )


def _lineage(run: NNRun, root: str | None) -> list[Relative]:
    """Ancestors (oldest first), the run, and the runs that continue it."""
    chain: list[Relative] = []
    seen: set[str] = set()
    current: NNRun | None = run
    while current is not None and current.id not in seen:
        seen.add(current.id)
        parent = _parent_of(current)
        chain.append(_relative(current))
        current, missing = _load(parent, root)
        if missing and parent is not None:
            chain.append(Relative(parent, None, None, None, "unknown", None, known=False))
    chain.reverse()
    queue = [run.id]
    children: dict[str, list[NNRun]] = {}
    for other in NNRun.all(root):
        parent = _parent_of(other)
        if parent is not None:
            children.setdefault(parent, []).append(other)
    while queue:
        for child in children.get(queue.pop(0), []):
            if child.id not in seen:
                seen.add(child.id)
                queue.append(child.id)
                chain.append(_relative(child))
    return chain


def _load(run_id: str | None, root: str | None) -> tuple[NNRun | None, bool]:
    if run_id is None:
        return None, False
    try:
        return NNRun.load(run_id, root=root), False
    except (OSError, ValueError):
        return None, True


def _parent_of(run: NNRun) -> str | None:
    training: Any = run.trainer or run.train
    return None if training is None else training.parent_run_id or training.resume_from_run_id


def _relative(run: NNRun) -> Relative:
    status = run.resume_status
    last = run.idps[-1].epoch_idx + 1 if run.idps else None
    training: Any = run.trainer or run.train
    return Relative(
        run.id,
        _parent_of(run),
        (status.source_checkpoint if status else None)
        or getattr(training, "resume_from_checkpoint", None),
        status.source_epoch if status else None,
        status.mode if status else "fresh",
        last,
        known=True,
    )


def _modified(folder: str) -> str:
    newest = max((os.path.getmtime(os.path.join(folder, n)) for n in os.listdir(folder)), default=0)
    when = datetime.datetime.fromtimestamp(newest, tz=datetime.timezone.utc)
    return when.strftime("%Y-%m-%d %H:%M UTC")
