"""Whether a fit can continue from a checkpoint, asked before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nnx.components import ComponentRestoreError
from nnx.engine.clocks import UPDATE
from nnx.engine.resume.point import FitStart, continues_plan
from nnx.engine.topology import describe_difference, optimizer_topology
from nnx.engine.training_state import factory_state, type_name
from nnx.errors import NNxError
from nnx.models import check_state_topology
from nnx.monitors.tracker import COMPONENT as MONITOR
from nnx.utils.caller import warn_caller
from nnx.utils.jsonlike import canonical

if TYPE_CHECKING:
    from nnx.engine.session import FitSession
    from nnx.store.inherited import InheritedBest
    from nnx.store.points import ResumePoint


class ResumeError(ValueError, NNxError):
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


def begin_from(session: FitSession, point: ResumePoint | None) -> FitStart:
    """Where a fit begins, once ``point`` is known to fit it; changes nothing of the model.

    Raises one error that lists every problem.
    """
    params = session.params
    if point is None:
        return FitStart.fresh(params.n_epochs, session.registry)
    source, mode = f"{point.tag!r} of run {point.run_id}", params.resume_mode
    state = point.training_state if mode != "weights_only" else None
    if state is None:
        _refuse_weights_only(point, mode, continues_plan(params), source)
    problems: list[str] = []
    net_state = _net_state(session, point, state, problems)
    components = session.registry.fresh_plan()
    if state is not None:
        problems += _state_problems(session, state)
        problems += _plan_problems(params, point, state)
        components = _component_plan(session, state, problems)
    if problems:
        raise ResumeError(source, problems)
    start = FitStart.resuming(
        point, params, state=state, net_state=net_state, components=components
    )
    return _with_best(session, start)


def _with_best(session: FitSession, start: FitStart) -> FitStart:
    """A stateful resume's start with the best so far: the value to beat, and the checkpoint.

    What cannot be taken over is said, and the best starts afresh.
    """
    if start.mode != "stateful":
        return start
    # The BEST of a bundle's run is elsewhere, or nowhere.
    bundled = start.point.bundle is not None
    best = None if bundled else session.ranks.from_writer(lambda: _best_of(session, start.point))
    if best is None:
        return replace(start, components=start.components.without(MONITOR))
    session.judge.continue_from(best.record)
    return replace(start, best=best)


def _best_of(session: FitSession, point: ResumePoint) -> InheritedBest | None:
    from nnx.store import inherited
    from nnx.store.errors import ResumePointError

    plan = session.plan
    try:
        best = inherited.find(point.run_id, plan.run.state(), until=point.completed_epoch)
        components = (point.training_state or {}).get("components") or {}
        saved = components.get(MONITOR) or {}
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


def _net_state(
    session: FitSession, point: Any, state: Any, problems: list[str]
) -> Mapping[str, Any]:
    """The weights to continue from, once their topology and recipe are known to fit."""
    checkpoint, model = point.checkpoint, session.model
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


def _state_problems(session: FitSession, state: Mapping[str, Any]) -> list[str]:
    """Precision, optimizers and schedulers."""
    problems = session.ranks.resume_problems(state)
    precision = state.get("precision")
    if precision is not None and precision.get("effective") != session.precision.effective:
        problems.append(
            f"the checkpoint was trained in {precision.get('effective')}, this run in "
            f"{session.precision.effective}"
        )
    saved = session.naming.unpack(state)
    if saved is None:
        writers = ("NNModel.train", "Trainer.train")
        reads = session.naming.entry
        wrote = writers[1 - writers.index(reads)]
        problems.append(f"the checkpoint was written by {wrote}, so {reads} cannot continue it")
        return problems
    if set(saved) != set(session.optimizers):
        names = sorted(session.optimizers)
        problems.append(f"optimizers saved: {sorted(saved)}; this run's: {names}")
        return problems
    for name in session.optimizers:
        problems += _optimizer_problems(session, name, saved[name])
    return problems


def _optimizer_problems(session: FitSession, name: str, saved: Mapping[str, Any]) -> list[str]:
    problems = []
    label = session.naming.label(name)
    prefix = "" if label is None else f"optimizer {label!r}: "
    optimizer, scheduler = session.optimizers[name], session.clocks[name].scheduler

    def compare(key: str, built: Any, what: str) -> None:
        if saved.get(key) is not None and saved[key] != built:
            problems.append(f"{prefix}the checkpoint's {what} is {saved[key]}, this run's {built}")

    compare("optimizer_type", type_name(optimizer), "optimizer")
    factory = factory_state(session.plan.optims[name])
    recorded = saved.get("optimizer_factory")
    described = recorded is not None or saved.get("optimizer_type") is not None
    if described and canonical(recorded) != canonical(factory):  # 1 and 1.0 are two configs
        made, makes = (f or "none: it is one of torch's" for f in (recorded, factory))
        problems.append(f"{prefix}the checkpoint's optimizer factory is {made}, this run's {makes}")
    if saved.get("optimizer_topology") is not None:
        built = optimizer_topology(session.model.net, optimizer)
        difference = describe_difference(saved["optimizer_topology"], built)
        if difference:
            problems.append(f"{prefix}the optimizer owns other parameters: {difference}")
    compare("scheduler_type", type_name(scheduler), "scheduler")
    if not problems:
        problems += _schedule_problems(session, name, saved.get("scheduler_state"), prefix)
    return problems


def _schedule_problems(
    session: FitSession, name: str, saved: Mapping[str, Any] | None, prefix: str
) -> list[str]:
    """A plateau's improvement rule, and a horizon that must cover what is still planned."""
    if saved is None:
        return []
    clock = session.clocks[name]
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
        params, taken = session.params, int(saved.get("last_epoch", 0))
        end = params.n_epochs if continues_plan(params) else taken + params.n_epochs
        if end > clock.limit:
            return [
                f"{prefix}the schedule has {clock.limit} steps (total_steps); the checkpoint took "
                f"{taken} and this run would bring them to {end}"
            ]
    return []


def _plan_problems(params: Any, point: Any, state: Mapping[str, Any]) -> list[str]:
    if not continues_plan(params):
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


def _component_plan(session: FitSession, state: Mapping[str, Any], problems: list[str]) -> Any:
    saved = session.ranks.components(state.get("components"), session.registry.names)
    counting = [c for c in session.clocks.values() if c.unit == UPDATE]
    if saved is None and counting:
        problems.append(
            "the checkpoint has no component state, so its scheduler counts epochs; this run's "
            "counts optimizer updates"
        )
        return session.registry.fresh_plan()
    try:
        return session.registry.plan(saved)
    except ComponentRestoreError as error:
        if not problems:
            raise
        problems.extend(error.problems)
        return session.registry.fresh_plan()
