"""Building learning-rate schedules, and the arithmetic of their horizons."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import lr_scheduler

from nnx.enums import Schedulers
from nnx.params.monitor import MonitorSpec
from nnx.params.scheduler import AnySchedulerParams, NNSchedulerParams, SchedulerSpec
from nnx.registered_schedulers import TOTAL_STEPS, build_registered, has_end
from nnx.utils.validation import count, refuse

# The field of NNSchedulerParams that a schedule's budget comes from.
_BUDGET = {
    Schedulers.STEP: "step_size",
    Schedulers.COSINE_ANNEALING: "T_max",
    Schedulers.ONE_CYCLE: "total_steps",
    Schedulers.LINEAR_WARMUP_DECAY: "total_steps",
}


@dataclass(frozen=True, slots=True)
class Horizon:
    """The resolved lengths of a schedule, in steps of its clock.

    ``steps`` is the budget: the period of a step schedule, half the cosine's
    period, or the total of a one-cycle or warm-up schedule; ``None`` for a
    plateau, which has none. ``explicit`` says that the run chose it.
    """

    steps: int | None = None
    explicit: bool = False
    warmup_steps: int | None = None


def planned_updates(n_epochs: int, batches: int, accumulate_grad_batches: int = 1) -> int:
    """How many updates a run commits when no window is masked or skipped."""
    return n_epochs * math.ceil(batches / accumulate_grad_batches)


def schedule_horizon(
    params: AnySchedulerParams, *, n_epochs: int, updates: int | None = None, owner: str = ""
) -> Horizon:
    """Resolve a schedule's lengths for a run of ``n_epochs``.

    Without a budget of its own a step schedule takes a third of the run, every
    other one the whole of it; a warm-up takes a tenth of the epochs, or of the
    updates on the update clock.

    ``updates`` is the planned number of committed updates, or ``None`` when NNx
    cannot know it: an update clock then needs its budget spelled out. ``owner``
    names the optimizer in errors.
    """
    if isinstance(params, SchedulerSpec):
        return _registered_horizon(params, n_epochs, updates)
    return _horizon(_kind(params), params, n_epochs, updates, owner)


def check_horizon(
    kind: Schedulers, params: NNSchedulerParams, horizon: Horizon, *, n_epochs: int, owner: str = ""
) -> None:
    """Refuse a schedule that ends before the epochs that step it.

    On the update clock the last update is known only when it comes.
    """
    last = kind in (Schedulers.ONE_CYCLE, Schedulers.LINEAR_WARMUP_DECAY)
    if last and params.clock == "epoch" and horizon.steps is not None and horizon.steps < n_epochs:
        name = f"NNSchedulerParams of {owner!r}" if owner else "NNSchedulerParams"
        accepted = f"at least the {n_epochs} epochs that it is stepped in (or None: as many)"
        refuse(name, "total_steps", horizon.steps, accepted)


def build_scheduler(
    optimizer: torch.optim.Optimizer,
    params: AnySchedulerParams,
    horizon: Horizon,
    *,
    monitor: MonitorSpec | None = None,
) -> Any:
    """The torch scheduler of ``params``.

    A ``monitor`` (resolved) gives a plateau schedule its direction and its
    minimum improvement, an absolute one, in place of ``params.threshold``.
    """
    if isinstance(params, SchedulerSpec):
        return build_registered(optimizer, params, horizon.steps)
    return _BUILD[_kind(params)](optimizer, params, horizon, monitor)


def _registered_horizon(spec: SchedulerSpec, n_epochs: int, updates: int | None) -> Horizon:
    if not has_end(spec):
        return Horizon()
    chosen = spec.config.get(TOTAL_STEPS)
    if chosen is not None:
        steps = count(f"the schedule {spec.id!r}", TOTAL_STEPS, chosen)
        return Horizon(steps, explicit=True)
    return Horizon(updates if spec.clock == "optimizer_update" else n_epochs)


def build_kind(
    kind: Schedulers,
    optimizer: torch.optim.Optimizer,
    params: NNSchedulerParams,
    n_epochs: int,
    *,
    n_updates: int | None = None,
) -> Any:
    """What calling a :class:`Schedulers` member does; the member decides the kind."""
    horizon = _horizon(kind, params, n_epochs, n_updates, "")
    check_horizon(kind, params, horizon, n_epochs=n_epochs)
    return _BUILD[kind](optimizer, params, horizon, None)


class WarmupDecay:
    """The multiplier of the linear warm-up: up to 1 over ``warmup``, down to 0 at ``total``.

    Step ``s`` (from 0) is multiplied by ``(s + 1) / warmup`` while warming up and
    by ``(total - s) / (total - warmup)`` after. An object rather than a closure,
    so that ``LambdaLR`` saves its two numbers.
    """

    def __init__(self, warmup: int, total: int) -> None:
        self.warmup = warmup
        self.total = total

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        return max(0.0, (self.total - step) / max(1, self.total - self.warmup))


def _kind(params: NNSchedulerParams) -> Schedulers:
    return Schedulers.REDUCE_LR_ON_PLATEAU if params.kind is None else params.kind


def call_builder(
    build: Callable[..., Any],
    optimizer: torch.optim.Optimizer,
    params: AnySchedulerParams,
    horizon: Horizon,
    monitor: MonitorSpec | None,
) -> Any:
    """A model's ``_build_scheduler``, with what it takes.

    An override may leave out ``monitor``, or ``horizon`` and ``monitor``.
    """
    takes = inspect.signature(build).parameters
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in takes.values()):
        return build(optimizer, params, horizon, monitor)
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in takes.values()):
        return build(optimizer, params, horizon=horizon, monitor=monitor)
    further = {"horizon": horizon, "monitor": monitor}
    return build(optimizer, params, **{n: v for n, v in further.items() if n in takes})


def _horizon(
    kind: Schedulers, params: NNSchedulerParams, n_epochs: int, updates: int | None, owner: str
) -> Horizon:
    name = f"NNSchedulerParams of {owner!r}" if owner else "NNSchedulerParams"
    per_update = params.clock == "optimizer_update"
    if kind is Schedulers.REDUCE_LR_ON_PLATEAU:
        if per_update:
            refuse(name, "clock", params.clock, "'epoch' for a plateau schedule")
        return Horizon()
    field = _BUDGET[kind]
    chosen: int | None = getattr(params, field)
    planned = updates if per_update else n_epochs
    if chosen is None and planned is None:
        refuse(
            name,
            field,
            None,
            "set on the optimizer_update clock when the number of updates is not known in advance "
            "(a custom step, or a loader without a length)",
        )
    if chosen is not None:
        steps = chosen
    else:
        assert planned is not None
        steps = max(1, planned // 3) if kind is Schedulers.STEP else max(1, planned)
    warmup = None
    if kind is Schedulers.LINEAR_WARMUP_DECAY:
        tenth = max(1, (steps if per_update else n_epochs) // 10)
        warmup = tenth if params.warmup_steps is None else params.warmup_steps
    return Horizon(steps, chosen is not None, warmup)


def _plateau(
    optimizer: torch.optim.Optimizer,
    params: NNSchedulerParams,
    horizon: Horizon,
    monitor: MonitorSpec | None,
) -> Any:
    rule: dict[str, Any] = {"mode": "min", "threshold": params.threshold}
    if monitor is not None:
        rule = {"mode": monitor.mode, "threshold": monitor.min_delta, "threshold_mode": "abs"}
    return lr_scheduler.ReduceLROnPlateau(
        optimizer,
        factor=params.factor,
        patience=params.patience,
        cooldown=params.cooldown,
        min_lr=params.min_lr,
        **rule,
    )


def _step(optimizer: Any, params: NNSchedulerParams, horizon: Horizon, _: Any) -> Any:
    return lr_scheduler.StepLR(optimizer, step_size=_steps(horizon), gamma=params.factor)


def _cosine(optimizer: Any, params: NNSchedulerParams, horizon: Horizon, _: Any) -> Any:
    return lr_scheduler.CosineAnnealingLR(optimizer, T_max=_steps(horizon), eta_min=params.min_lr)


def _one_cycle(optimizer: Any, params: NNSchedulerParams, horizon: Horizon, _: Any) -> Any:
    rates = [group["lr"] for group in optimizer.param_groups]
    cycles = "momentum" in optimizer.defaults or "betas" in optimizer.defaults
    return lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=rates if params.max_lr is None else params.max_lr,
        total_steps=_steps(horizon),
        cycle_momentum=cycles,
    )


def _warmup(optimizer: Any, params: NNSchedulerParams, horizon: Horizon, _: Any) -> Any:
    return lr_scheduler.LambdaLR(optimizer, WarmupDecay(horizon.warmup_steps or 1, _steps(horizon)))


def _steps(horizon: Horizon) -> int:
    if horizon.steps is None:
        raise ValueError("this schedule needs a horizon with steps; see schedule_horizon()")
    return horizon.steps


_BUILD: dict[Schedulers, Callable[..., Any]] = {
    Schedulers.REDUCE_LR_ON_PLATEAU: _plateau,
    Schedulers.STEP: _step,
    Schedulers.COSINE_ANNEALING: _cosine,
    Schedulers.ONE_CYCLE: _one_cycle,
    Schedulers.LINEAR_WARMUP_DECAY: _warmup,
}
