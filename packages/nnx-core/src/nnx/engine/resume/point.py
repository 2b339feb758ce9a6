"""Where a fit begins: at its start, or where the point that it resumes left off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from nnx.components import ComponentRegistry
from nnx.engine.clocks import BUDGETED
from nnx.enums import Schedulers
from nnx.params.scheduler import SchedulerSpec
from nnx.records import NNIterationDataPoint, ResumeStatus
from nnx.registered_schedulers import TOTAL_STEPS, has_end

if TYPE_CHECKING:
    from nnx.engine.request import FitRequest
    from nnx.store.inherited import InheritedBest
    from nnx.store.points import ResumePoint


@dataclass(frozen=True, slots=True)
class Position:
    """Where a fit stood inside an epoch."""

    epoch: int
    consumed: int
    epoch_updates: int
    epoch_rng: Mapping[str, Any]
    fetch_rng: Mapping[str, Any] | None
    rng: Mapping[str, Any]
    loader_state: Any
    window: Mapping[str, Any] | None
    recorder: Mapping[str, Any]
    records: tuple[NNIterationDataPoint, ...]

    def state(self) -> dict[str, Any]:
        """As plain data and tensors; a training state has the random streams ``rng`` itself."""
        state = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "rng"}
        return {**state, "records": [record.state() for record in self.records]}

    @staticmethod
    def of(training_state: Mapping[str, Any], *, rebase: bool) -> Position | None:
        """That of a point inside an epoch; with ``rebase`` its batches are counted from 0."""
        saved = training_state.get("position")
        if saved is None:
            return None
        records = tuple(NNIterationDataPoint.from_state(r) for r in saved["records"])
        if rebase:
            records = tuple(replace(r, iter_idx=i) for i, r in enumerate(records))
        return Position(**{**saved, "records": records, "rng": training_state["rng_state"]})


@dataclass(frozen=True, slots=True, kw_only=True)
class FitStart:
    """Where a fit begins and ends, and what it restores first."""

    start_epoch: int
    end_epoch: int
    components: Any
    mode: str = "fresh"
    planned: bool = False
    start_step: int = 0
    start_updates: int = 0
    net_state: Mapping[str, Any] | None = None
    state: Mapping[str, Any] | None = None
    position: Position | None = None
    point: Any = None
    best: InheritedBest | None = None

    @staticmethod
    def fresh(n_epochs: int, registry: ComponentRegistry) -> FitStart:
        return FitStart(start_epoch=0, end_epoch=n_epochs, components=registry.fresh_plan())

    @staticmethod
    def resuming(
        point: ResumePoint, params: Any, *, state: Any, net_state: Any, components: Any
    ) -> FitStart:
        """At ``point``; ``state`` is its training state, ``None`` to continue from weights."""
        planned = continues_plan(params)
        counters = (state or {}).get("counters") or {}
        start = 0 if point.completed_epoch is None else point.completed_epoch + 1
        position = None if state is None else Position.of(state, rebase=not planned)
        steps, updates = 0, 0
        if planned:
            steps = counters.get("global_step", 0)
            updates = counters.get("committed_updates", 0)
        elif position is not None:
            steps, updates = len(position.records), position.epoch_updates
        return FitStart(
            mode="weights_only" if state is None else "stateful",
            start_epoch=start,
            end_epoch=params.n_epochs if planned else start + params.n_epochs,
            planned=planned,
            components=components,
            net_state=net_state,
            state=state,
            position=position,
            point=point,
            start_step=steps,
            start_updates=updates,
        )

    @property
    def cadence_start(self) -> int:
        """The epoch from which the phase checkpoints are counted."""
        return 0 if self.planned else self.start_epoch

    def without_tensors(self) -> FitStart:
        """The same, once everything is restored: the checkpoint's memory is given back."""
        return replace(self, net_state=None, state=None, position=None, point=None)

    def status(self) -> ResumeStatus:
        """What the run reports of its start."""
        if self.point is None:
            return ResumeStatus(fresh_components=self.components.fresh)
        point = self.point
        return ResumeStatus(
            mode=self.mode,
            source_run_id=point.run_id,
            source_checkpoint=point.tag,
            restored_components=self.components.restored,
            fresh_components=self.components.fresh,
            source_epoch=point.completed_epoch,
            source_generation=point.generation,
            source_checkpoint_id=point.checkpoint_id,
            best_run_id=None if self.best is None else self.best.run_id,
            best_epoch=None if self.best is None else self.best.epoch,
        )


def continues_plan(params: Any) -> bool:
    """Whether ``n_epochs`` is the total of the resumed run's own plan. Never in a Trainer."""
    return params.resume_from_run_id is not None and _plans(params)


def _plans(params: Any) -> bool:
    return getattr(params, "resume_epochs", "additional") == "planned"


def check_request(params: Any, schedules: Mapping[str, Any], *, goes_on: bool = False) -> None:
    """What a resume needs of its own configuration, before the checkpoint is read.

    One that ``goes_on`` with its own plan has its own horizons.
    """
    if params.resume_from_run_id is None and _plans(params):
        raise ValueError(
            "resume_epochs='planned' continues another run's plan, but resume_from_run_id is "
            "None: nothing would be resumed. Name the run, or leave resume_epochs at 'additional'"
        )
    if params.resume_from_run_id is None or params.resume_mode == "weights_only" or goes_on:
        return
    for name, schedule in schedules.items():
        if isinstance(schedule, SchedulerSpec):
            _check_registered(name, schedule)
            continue
        if schedule.kind not in BUDGETED:
            continue
        if schedule.total_steps is None:
            raise ValueError(
                f"the {schedule.kind.value} schedule of {name!r} has no total_steps: a resume needs "
                "one explicit horizon that covers the original and the resumed "
                f"{'updates' if schedule.clock == 'optimizer_update' else 'epochs'}"
            )
        if (
            schedule.kind is Schedulers.LINEAR_WARMUP_DECAY
            and schedule.clock == "epoch"
            and schedule.warmup_steps is None
            and not continues_plan(params)
        ):
            raise ValueError(
                f"the {schedule.kind.value} schedule of {name!r} has no warmup_steps: its default is "
                "a tenth of each session's epochs, so a resume needs it set explicitly"
            )


def _check_registered(name: str, schedule: SchedulerSpec) -> None:
    if TOTAL_STEPS not in schedule.config and has_end(schedule):
        raise ValueError(
            f"the {schedule.id} schedule of {name!r} has no {TOTAL_STEPS} in its config: a resume "
            "needs one explicit horizon that covers the original and the resumed "
            f"{'updates' if schedule.clock == 'optimizer_update' else 'epochs'}"
        )


def find_point(request: FitRequest, *, whole: bool = True) -> ResumePoint | None:
    """The resume point that was asked for, read and verified; ``None`` for a fresh run."""
    params = request.params
    if request.point is not None or params.resume_from_run_id is None:
        return request.point
    from nnx.store.points import read_point

    return read_point(
        params.resume_from_run_id, params.resume_from_checkpoint, map_location="cpu", whole=whole,
        with_state=params.resume_mode != "weights_only",
    )  # fmt: skip
