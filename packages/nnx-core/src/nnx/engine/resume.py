"""Continuing from a checkpoint: find it, check everything, restore all of it or nothing."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from nnx.components import ComponentRegistry, ComponentRestoreError
from nnx.engine import commit, rng
from nnx.engine.batches import is_stateful
from nnx.engine.clocks import BUDGETED
from nnx.engine.topology import describe_difference, optimizer_topology
from nnx.enums import Schedulers
from nnx.models import check_state_topology
from nnx.monitors.tracker import COMPONENT as MONITOR
from nnx.records import NNIterationDataPoint, ResumeStatus
from nnx.utils.caller import warn_caller
from nnx.utils.jsonlike import canonical

if TYPE_CHECKING:
    from nnx.engine.plan import FitPlan
    from nnx.engine.request import FitRequest
    from nnx.engine.session import FitSession
    from nnx.store.inherited import InheritedBest
    from nnx.store.points import ResumePoint


class ResumeError(ValueError):
    """A checkpoint that does not fit the run that wants to continue from it.

    ``problems`` lists everything that was found.
    """

    def __init__(self, source: str, problems: list[str]) -> None:
        self.problems = tuple(problems)
        lines = "".join(f"\n  - {problem}" for problem in problems)
        super().__init__(
            f"cannot resume from {source}:{lines}\nNothing was restored. Make this run match the "
            'one that wrote the checkpoint, or resume with resume_mode="weights_only".'
        )


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePlan:
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
    def fresh(n_epochs: int, registry: ComponentRegistry) -> ResumePlan:
        return ResumePlan(start_epoch=0, end_epoch=n_epochs, components=registry.fresh_plan())

    def without_tensors(self) -> ResumePlan:
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


def check_request(params: Any, schedules: Mapping[str, Any]) -> None:
    """What a resume needs of its own configuration, before the checkpoint is read."""
    if params.resume_from_run_id is None and _plans(params):
        raise ValueError(
            "resume_epochs='planned' continues another run's plan, but resume_from_run_id is "
            "None: nothing would be resumed. Name the run, or leave resume_epochs at 'additional'"
        )
    if params.resume_from_run_id is None or params.resume_mode == "weights_only":
        return
    for name, schedule in schedules.items():
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


def find(request: FitRequest, *, whole: bool = True) -> ResumePoint | None:
    """Read and verify the resume point the request names; ``None`` for a fresh run."""
    params = request.params
    if params.resume_from_run_id is None:
        return None
    from nnx.store.points import read_point

    return read_point(
        params.resume_from_run_id, params.resume_from_checkpoint, map_location="cpu", whole=whole,
        with_state=params.resume_mode != "weights_only",
    )  # fmt: skip


def check(plan: FitPlan, point: ResumePoint) -> ResumePlan:
    """Compare a resume point with the run that was built; change nothing.

    Raises one error that lists every problem.
    """
    params, source = plan.params, f"{point.tag!r} of run {point.run_id}"
    mode = params.resume_mode
    state = point.training_state if mode != "weights_only" else None
    planned = continues_plan(params)
    if state is None:
        _refuse_weights_only(point, mode, planned, source)
    problems: list[str] = []
    net_state = _net_state(plan, point, state, problems)
    components = plan.registry.fresh_plan()
    if state is not None:
        problems += _state_problems(plan, state)
        problems += _plan_problems(params, point, state, planned)
        components = _component_plan(plan, state, problems)
    if problems:
        raise ResumeError(source, problems)
    return _resume_plan(plan, point, state, net_state, components, planned)


def take_over_best(plan: FitPlan) -> ResumePlan:
    """A stateful resume's plan with the best so far: the value to beat, and the checkpoint.

    What cannot be taken over is said, and the best starts afresh.
    """
    start = plan.resume
    if start.mode != "stateful":
        return start
    best = plan.ranks.from_writer(lambda: _best_of(plan))
    if best is None:
        return replace(start, components=start.components.without(MONITOR))
    plan.judge.continue_from(best.record)
    return replace(start, best=best)


def _best_of(plan: FitPlan) -> InheritedBest | None:
    from nnx.store import inherited
    from nnx.store.errors import ResumePointError

    point = plan.resume.point
    try:
        best = inherited.find(point.run_id, plan.run.state(), until=point.completed_epoch)
        saved = (point.training_state.get("components") or {}).get(MONITOR) or {}
        if best is None and (saved.get("state") or {}).get("best") is not None:
            raise ResumePointError(f"run {point.run_id} has no BEST checkpoint")
        validated = plan.params.val_loader is not None
        judged = best is None or best.record.selection or plan.params.monitor
        if best is not None and not judged and (best.record.val_edp is not None) != validated:
            raise ResumePointError(
                f"the BEST checkpoint of run {point.run_id} was chosen "
                f"{'without' if validated else 'by'} validation, this run's is not"
            )
    except (ResumePointError, OSError) as error:
        warn_caller(f"{error}: this run's BEST starts afresh, at its first epoch", RuntimeWarning)
        return None
    return best


def _refuse_weights_only(point: Any, mode: str, planned: bool, source: str) -> None:
    if mode == "stateful":
        raise ValueError(
            f"resume_mode='stateful' needs the training state, and {source} holds weights only; "
            "resume with resume_mode='weights_only', or from a checkpoint of the training loop"
        )
    if planned:
        raise ValueError(
            f"resume_epochs='planned' continues a recorded plan, and {source} gives weights only"
        )
    if mode == "auto":
        warn_caller(
            f"{source} holds no training state: the weights are restored; optimizer, scheduler, "
            "random streams and components start fresh",
            RuntimeWarning,
        )


def _net_state(plan: FitPlan, point: Any, state: Any, problems: list[str]) -> Mapping[str, Any]:
    """The weights to continue from, once their topology and recipe are known to fit."""
    checkpoint, model = point.checkpoint, plan.model
    recorded = tuple(t.state() for t in checkpoint.transforms)
    held = tuple(t.state() for t in model.transforms)
    weights: Mapping[str, Any] = checkpoint.net_state
    if state is not None and state.get("resume_net_state") is not None:
        weights = state["resume_net_state"]  # what the net was before a conversion at the end
        recorded = recorded[: len(held)]
    if recorded != held:
        problems.append(
            f"the checkpoint's topology recipe {list(recorded)} is not the model's {list(held)}; "
            "materialize the same recipe before resuming"
        )
        return weights
    try:
        check_state_topology(model.net, weights, what="the model")
    except ValueError as error:
        problems.append(str(error))
    return weights


def _state_problems(plan: FitPlan, state: Mapping[str, Any]) -> list[str]:
    """Precision, optimizers and schedulers."""
    problems = plan.ranks.resume_problems(state)
    saved = state.get("precision")
    if saved is not None and saved.get("effective") != plan.precision.effective:
        problems.append(
            f"the checkpoint was trained in {saved.get('effective')}, this run in "
            f"{plan.precision.effective}"
        )
    several = state.get("optimizers_state") is not None
    if several != (plan.trainer is not None):
        wrote, reads = ("Trainer.train", "NNModel.train")[:: 1 if several else -1]
        problems.append(f"the checkpoint was written by {wrote}, so {reads} cannot continue it")
        return problems
    if not several:
        return problems + _optimizer_problems(plan, next(iter(plan.optimizers)), state, "")
    saved_names, names = set(state["optimizers_state"]), set(plan.optimizers)
    if saved_names != names:
        problems.append(f"optimizers saved: {sorted(saved_names)}; this run's: {sorted(names)}")
        return problems
    for name in plan.optimizers:
        one = {key: (state.get(plural) or {}).get(name) for key, plural in commit.PLURALS.items()}
        problems += _optimizer_problems(plan, name, one, f"optimizer {name!r}: ")
    return problems


def _optimizer_problems(
    plan: FitPlan, name: str, saved: Mapping[str, Any], prefix: str
) -> list[str]:
    problems = []
    optimizer, scheduler = plan.optimizers[name], plan.clocks[name].scheduler

    def compare(key: str, built: Any, what: str) -> None:
        if saved.get(key) is not None and saved[key] != built:
            problems.append(f"{prefix}the checkpoint's {what} is {saved[key]}, this run's {built}")

    compare("optimizer_type", commit.type_name(optimizer), "optimizer")
    factory = commit.factory_state(plan.optim_params[name])
    recorded = saved.get("optimizer_factory")
    described = recorded is not None or saved.get("optimizer_type") is not None
    if described and canonical(recorded) != canonical(factory):  # 1 and 1.0 are two configs
        made, makes = (f or "none: it is one of torch's" for f in (recorded, factory))
        problems.append(f"{prefix}the checkpoint's optimizer factory is {made}, this run's {makes}")
    if saved.get("optimizer_topology") is not None:
        built = optimizer_topology(plan.model.net, optimizer)
        difference = describe_difference(saved["optimizer_topology"], built)
        if difference:
            problems.append(f"{prefix}the optimizer owns other parameters: {difference}")
    compare("scheduler_type", commit.type_name(scheduler), "scheduler")
    if not problems:
        problems += _schedule_problems(plan, name, saved.get("scheduler_state"), prefix)
    return problems


def _schedule_problems(
    plan: FitPlan, name: str, saved: Mapping[str, Any] | None, prefix: str
) -> list[str]:
    """A plateau's improvement rule, and a horizon that must cover what is still planned."""
    if saved is None:
        return []
    clock = plan.clocks[name]
    scheduler = clock.scheduler
    if clock.is_plateau:
        rule = ("mode", "threshold_mode", "threshold")
        differing = [
            f"{field} (saved {saved.get(field)!r}, this run's {getattr(scheduler, field)!r})"
            for field in rule
            if field in saved and saved[field] != getattr(scheduler, field)
        ]
        if differing:
            return [
                f"{prefix}the plateau scheduler was saved under another improvement rule: "
                f"{', '.join(differing)}; resume with the original monitor and threshold"
            ]
    if clock.limit is not None and clock.unit == "epoch" and clock.automatic:
        params, taken = plan.params, int(saved.get("last_epoch", 0))
        end = params.n_epochs if continues_plan(params) else taken + params.n_epochs
        if end > clock.limit:
            return [
                f"{prefix}the schedule has {clock.limit} steps (total_steps); the checkpoint took "
                f"{taken} and this run would bring them to {end}"
            ]
    return []


def _plan_problems(params: Any, point: Any, state: Mapping[str, Any], planned: bool) -> list[str]:
    if not planned:
        return []
    counters = state.get("counters") or {}
    total = counters.get("planned_n_epochs")
    if total is None:
        return ["resume_epochs='planned': the checkpoint does not record its plan"]
    if total != params.n_epochs:
        return [
            f"resume_epochs='planned': the source planned {total} epochs, this run {params.n_epochs}"
        ]
    if point.completed_epoch is not None and point.completed_epoch + 1 >= total:
        return [f"resume_epochs='planned': the source has finished its plan of {total} epochs"]
    return []


def _component_plan(plan: FitPlan, state: Mapping[str, Any], problems: list[str]) -> Any:
    saved = plan.ranks.components(state.get("components"), plan.registry.names)
    counting = [c for c in plan.clocks.values() if c.unit == "optimizer_update"]
    if saved is None and counting:
        problems.append(
            "the checkpoint has no component state, so its scheduler counts epochs; this run's "
            "counts optimizer updates"
        )
        return plan.registry.fresh_plan()
    try:
        return plan.registry.plan(saved)
    except ComponentRestoreError as error:
        if not problems:
            raise
        problems.extend(error.problems)
        return plan.registry.fresh_plan()


def _resume_plan(
    plan: FitPlan, point: Any, state: Any, net_state: Any, components: Any, planned: bool
) -> ResumePlan:
    params = plan.params
    counters = (state or {}).get("counters") or {}
    start = 0 if point.completed_epoch is None else point.completed_epoch + 1
    base = ResumePlan(
        mode="weights_only" if state is None else "stateful",
        start_epoch=start,
        end_epoch=params.n_epochs if planned else start + params.n_epochs,
        planned=planned,
        components=components,
        net_state=net_state,
        state=state,
        point=point,
        start_step=counters.get("global_step", 0) if planned else 0,
        start_updates=counters.get("committed_updates", 0) if planned else 0,
    )
    if state is None or state.get("position") is None:
        return base
    position = _position(state, rebase=not planned)
    if planned:
        return replace(base, position=position)
    return replace(
        base,
        position=position,
        start_step=len(position.records),
        start_updates=position.epoch_updates,
    )


def _position(state: Mapping[str, Any], *, rebase: bool) -> Position:
    saved = state["position"]
    records = tuple(NNIterationDataPoint.from_state(r) for r in saved["records"])
    if rebase:
        records = tuple(replace(r, iter_idx=i) for i, r in enumerate(records))
    return Position(
        epoch=saved["epoch"],
        consumed=saved["consumed"],
        epoch_updates=saved["epoch_updates"],
        epoch_rng=saved["epoch_rng"],
        fetch_rng=saved["fetch_rng"],
        rng=state["rng_state"],
        loader_state=saved["loader_state"],
        window=saved["window"],
        recorder=saved["recorder"],
        records=records,
    )


# Restoring ---------------------------------------------------------------------------------


@contextlib.contextmanager
def undone_on_error(session: FitSession) -> Iterator[None]:
    """Put the model and every random stream back when a restore fails."""
    net, streams = session.model.net, rng.capture(session.loaders)
    before = {name: _kept(value) for name, value in net.state_dict().items()}
    try:
        yield
    except BaseException:
        try:
            session.model.net.load_state_dict(before)
        except Exception as error:
            warn_caller(
                f"the model could not be rolled back after a failed resume: "
                f"{type(error).__name__}: {error}",
                RuntimeWarning,
            )
        rng.restore(streams, session.loaders)
        raise


def _kept(value: Any) -> Any:
    """A copy in main memory: a device holds the model and the checkpoint already."""
    return value.detach().cpu().clone() if hasattr(value, "detach") else copy.deepcopy(value)


def restore_tensors(session: FitSession) -> None:
    """Load weights, optimizers, schedulers and scaler. Callbacks have not begun."""
    plan = session.plan
    start = plan.resume
    session.model.net.load_state_dict(start.net_state)  # type: ignore[arg-type]
    state = start.state
    if state is None:
        return
    for name, optimizer in plan.optimizers.items():
        if plan.trainer is None:
            saved, schedule = state.get("optimizer_state"), state.get("scheduler_state")
        else:
            saved = state["optimizers_state"][name]
            schedule = (state.get("schedulers_state") or {}).get(name)
        if saved is not None:
            optimizer.load_state_dict(saved)
        if schedule is not None:
            plan.clocks[name].scheduler.load_state_dict(schedule)
            plan.clocks[name].restored()
    if plan.scaler is not None and state.get("scaler_state") is not None:
        plan.scaler.load_state_dict(state["scaler_state"])


def restore_streams(session: FitSession) -> None:
    """Set every random stream to the checkpoint's, right before the first resumed epoch."""
    start = session.plan.resume
    if start.state is None:
        return
    saved = session.plan.ranks.streams(start.state)
    if saved is None:
        warn_caller(
            "the checkpoint holds no random state: the resumed run draws other numbers than an "
            "uninterrupted one",
            RuntimeWarning,
        )
        return
    unmatched = rng.restore(saved, session.loaders)
    if unmatched:
        warn_caller(
            f"the checkpoint's state of {', '.join(unmatched)} fits no generator of the same seed, "
            "nor a loader with persistent workers, in this run's loaders; those streams start fresh",
            RuntimeWarning,
        )
    _warn_of_workers(session.loaders, saved)


def _warn_of_workers(loaders: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Worker processes have random states of their own, which no checkpoint holds."""
    workers = {
        name: part
        for name, part in rng.parts_of(loaders)
        if isinstance(part, DataLoader) and part.num_workers and not is_stateful(part)
    }
    if not workers:
        return
    lasting = [name for name, loader in workers.items() if loader.persistent_workers]
    if lasting and "workers" not in saved:
        what = "; nor does the checkpoint say whether they had been started"
    else:
        what = ""
    exception = "" if lasting else " from anything but the streams that torch seeds each epoch"
    warn_caller(
        f"the loaders {', '.join(workers)} use workers, whose own random state is not saved{what}. "
        "The resumed batches are those of an uninterrupted run only if the workers draw nothing "
        f"themselves{exception}",
        RuntimeWarning,
    )
