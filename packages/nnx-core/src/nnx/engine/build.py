"""The live parts of a fit, made from its plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nnx.components import ComponentRegistry
from nnx.engine import checks
from nnx.engine.batches import loader_length
from nnx.engine.clocks import UPDATE, SchedulerClock
from nnx.engine.owner import OwnerKind
from nnx.engine.resume.point import continues_plan
from nnx.engine.update import UpdateEngine
from nnx.optimizers import build_optimizer
from nnx.schedulers import call_builder, check_horizon, schedule_horizon
from nnx.tasks.recorder import EpochRecorder

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from nnx.engine.decision import Judge
    from nnx.engine.plan import FitPlan


def build_optimizers(plan: FitPlan) -> dict[str, torch.optim.Optimizer]:
    """The optimizers by name, each over parameters that can train."""
    strict = plan.request.optimizers.strict_groups
    optimizers = {
        name: build_optimizer(plan.model.net, optim, strict_param_groups=strict)
        for name, optim in plan.optims.items()
    }
    checks.check_trainable(plan.request, optimizers)
    return optimizers


def build_clocks(
    plan: FitPlan, optimizers: Mapping[str, torch.optim.Optimizer]
) -> dict[str, SchedulerClock]:
    """A scheduler and its clock for every optimizer."""
    params, naming = plan.params, plan.request.optimizers
    automatic = naming.steps_schedulers(params)
    batches = loader_length(params.train_loader)
    clocks = {}
    for name, schedule in plan.schedules.items():
        updates = None
        if plan.owner.step_fn is None and batches is not None:
            updates = params.n_epochs * -(-batches // plan.optims[name].accumulate_grad_batches)
        horizon = schedule_horizon(schedule, n_epochs=params.n_epochs, updates=updates, owner=name)
        if automatic and schedule.kind is not None:
            check_horizon(schedule.kind, schedule, horizon, n_epochs=params.n_epochs, owner=name)
        scheduler = call_builder(
            plan.model._build_scheduler, optimizers[name], schedule, horizon, plan.monitor
        )
        clocks[name] = SchedulerClock(
            scheduler, schedule, horizon, owner=naming.label(name), automatic=automatic,
            planned_updates=updates, continues_plan=continues_plan(params),
        )  # fmt: skip
    return clocks


def build_scaler(plan: FitPlan) -> Any:
    """The gradient scaler of an FP16 run; ``None`` where NNx scales nothing."""
    return None if plan.owner.kind is OwnerKind.TRAINER_STEP else plan.precision.build_scaler()


def build_engine(
    plan: FitPlan,
    optimizers: Mapping[str, torch.optim.Optimizer],
    *,
    scaler: Any,
    synchronize: Any,
) -> UpdateEngine:
    """The update engine of the run."""
    return UpdateEngine(
        optimizers,
        accumulate=next(iter(plan.optims.values())).accumulate_grad_batches,
        clip_norms={name: optim.grad_clip_norm for name, optim in plan.optims.items()},
        scaler=scaler,
        nonfinite=getattr(plan.owner.objective, "nonfinite", "fail"),
        synchronize=synchronize,
        net=plan.model.net,
    )


def build_recorder(plan: FitPlan) -> EpochRecorder:
    """The scores of batches and, where something reads it, of the epoch."""
    params = plan.params
    return EpochRecorder(
        plan.model,
        extra_metrics=params.extra_metrics,
        metrics=params.metrics if plan.owner.is_default else (),
        summarize=plan.declares_summary or plan.watches_training,
    )


def discover_components(
    plan: FitPlan, engine: UpdateEngine, judge: Judge, clocks: Mapping[str, SchedulerClock]
) -> ComponentRegistry:
    """Whatever has state that a checkpoint of the run carries."""
    return ComponentRegistry.discover(
        plan.callbacks,
        plan.owner.function,
        judge.tracker,
        engine if plan.owner.objective is not None else None,
        [clock for clock in clocks.values() if clock.unit == UPDATE],
        list(plan.model.components),
        explicit=plan.request.components or (),
    )
