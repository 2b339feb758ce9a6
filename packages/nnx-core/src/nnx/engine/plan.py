"""A checked request: every refusal has happened, everything that training needs is built."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nnx.components import ComponentRegistry
from nnx.engine import checks, commit, resume
from nnx.engine.batches import loader_length
from nnx.engine.clocks import SchedulerClock
from nnx.engine.compiled import check_compile, compiled_forward
from nnx.engine.decision import Judge
from nnx.engine.step import default_train_step
from nnx.engine.update import UpdateEngine
from nnx.models import describe_borrowed
from nnx.monitors import MonitorTracker
from nnx.objectives import check_objective_run
from nnx.optimizers import build_optimizer
from nnx.precision import ResolvedPrecision, resolve_precision
from nnx.store import NNRun, providers
from nnx.tasks.recorder import EpochRecorder
from nnx.utils.caller import warn_caller

if TYPE_CHECKING:
    import torch

    from nnx.compilation.forward import CompiledForward
    from nnx.engine.ranks import Alone
    from nnx.engine.request import FitRequest
    from nnx.engine.resume import ResumePlan

# How an optimizer is called in NNModel.train, which has one.
ONLY = "default"


@dataclass(slots=True, kw_only=True)
class FitPlan:
    """Everything a session needs, built and checked; nothing has been changed yet."""

    request: FitRequest
    model: Any
    trainer: Any
    params: Any
    callbacks: tuple[Any, ...]
    step_fn: Any
    eval_step_fn: Any
    objective: Any
    history: Any
    precision: ResolvedPrecision
    scaler: Any
    optim_params: Mapping[str, Any]
    optimizers: Mapping[str, torch.optim.Optimizer]
    clocks: Mapping[str, SchedulerClock]
    engine: UpdateEngine
    recorder: EpochRecorder
    judge: Judge
    registry: ComponentRegistry
    run: NNRun
    resume: ResumePlan
    ranks: Alone
    compiled: CompiledForward | None = None

    @property
    def owns_step(self) -> bool:
        """Whether NNx itself takes the updates (no step function of the caller's)."""
        return self.step_fn is None

    @property
    def looks_ahead(self) -> bool:
        """Whether a step needs to know an epoch's last batch when there is no length."""
        return self.trainer is None and self.step_fn is not None

    @property
    def start_epoch(self) -> int:
        return self.resume.start_epoch

    @property
    def end_epoch(self) -> int:
        return self.resume.end_epoch

    @property
    def cadence_start(self) -> int:
        """The epoch from which the phase checkpoints are counted."""
        return 0 if self.resume.planned else self.resume.start_epoch


def plan_fit(request: FitRequest, ranks: Alone) -> FitPlan:
    """Check ``request`` and build what it needs; raises before anything is touched."""
    checks.check_arguments(request)
    request = _normalized(request)
    params, model = request.params, request.model
    if params.resume_from_run_id is not None:
        providers.remember_of(params.resume_from_run_id)
    ranks.check(request)
    asked = checks.check_callbacks(request)
    callbacks = ranks.callbacks(asked, bounded=request.history is not None)
    if request.trainer is not None:
        checks.check_trainer_optimizers(request)
    checks.check_model(request)
    checks.check_monitors(request, callbacks)
    precision = _precision(request)
    checks.check_precision(request, precision)
    check_compile(request, callbacks, precision)
    optim_params = _optim_params(request)
    checks.check_optim_params(tuple(optim_params.values()))
    checks.check_param_groups(request, optim_params)
    resume.check_request(params, _schedules(request))

    describe_borrowed(model)
    run = _run(request, precision)
    run.ensure_writable(overwrite=params.overwrite_existing)
    ranks.shard(model)
    optimizers = {
        name: build_optimizer(model.net, optim, strict_param_groups=request.trainer is not None)
        for name, optim in optim_params.items()
    }
    checks.check_trainable(request, optimizers)
    point = ranks.find(request, optimizers)
    judge = Judge(_tracker(params))
    clocks = _clocks(request, optimizers, point)
    if request.objective is not None:
        check_objective_run(request.objective, model, optimizers=optimizers, callbacks=callbacks)
    scaler = precision.build_scaler() if request.trainer is None or request.objective else None
    engine = UpdateEngine(
        optimizers,
        accumulate=next(iter(optim_params.values())).accumulate_grad_batches,
        clip_norms={name: optim.grad_clip_norm for name, optim in optim_params.items()},
        scaler=scaler,
        nonfinite=getattr(request.objective, "nonfinite", "fail"),
        synchronize=ranks.synchronizer,
        net=model.net,
    )
    registry = ComponentRegistry.discover(
        callbacks,
        request.step_fn,
        request.objective,
        judge.tracker,
        engine if request.objective is not None else None,
        [clock for clock in clocks.values() if clock.unit == "optimizer_update"],
        list(model.components),
        explicit=request.components or (),
    )
    plan = FitPlan(
        request=request, model=model, trainer=request.trainer, params=params,
        callbacks=callbacks, step_fn=request.step_fn, eval_step_fn=request.eval_step_fn,
        objective=request.objective, history=request.history, precision=precision,
        scaler=scaler, optim_params=optim_params, optimizers=optimizers, clocks=clocks,
        engine=engine, recorder=ranks.recorder(_recorder(request, asked)), judge=judge, registry=registry, run=run,
        resume=resume.ResumePlan.fresh(params.n_epochs, registry), ranks=ranks,
    )  # fmt: skip
    plan.compiled = compiled_forward(request)
    if plan.compiled is not None:
        engine.on_backward_error = plan.compiled.backward_failed
    if point is not None:
        plan.resume = resume.check(plan, point)
        plan.resume = resume.take_over_best(plan)
    return plan


def _normalized(request: FitRequest) -> FitRequest:
    """``train_step_fn=default_train_step`` is the default step."""
    if request.step_fn is default_train_step:
        return dataclasses.replace(request, step_fn=None)
    return request


def _precision(request: FitRequest) -> ResolvedPrecision:
    model = request.model
    precision = resolve_precision(model.params, model.device)
    if request.trainer is None or precision.source != "mixed_precision":
        return precision
    if precision.reduced and request.objective is not None:
        warn_caller(
            "Trainer.train does not apply the legacy mixed_precision flag; the objective runs in "
            "full precision. Declare a PrecisionPolicy to reduce it",
            RuntimeWarning,
        )
    return resolve_precision(dataclasses.replace(model.params, mixed_precision=False), model.device)


def _optim_params(request: FitRequest) -> dict[str, Any]:
    if request.trainer is None:
        return {ONLY: request.params.optim}
    return dict(request.params.optims)


def _schedules(request: FitRequest) -> dict[str, Any]:
    """The scheduler parameters of each optimizer by name."""
    from nnx.params.training import DEFAULT_SCHEDULER

    params = request.params
    if request.trainer is None:
        return {ONLY: params.scheduler}
    return {name: params.schedulers.get(name, DEFAULT_SCHEDULER) for name in params.optims}


def _run(request: FitRequest, precision: ResolvedPrecision) -> NNRun:
    params, model = request.params, request.model
    return NNRun(
        net=commit.current_net_params(model),
        train=train_of(params),
        model=model.params,
        trainer=params if request.trainer is not None else None,
        salt=request.salt,
        transforms=model.transforms,
        precision=precision,
    )


def train_of(params: Any) -> Any:
    """The ``NNTrainParams`` a run stores; a Trainer's is derived from its own parameters."""
    from nnx.params import NNTrainerParams, NNTrainParams

    if not isinstance(params, NNTrainerParams):
        return params
    return NNTrainParams(
        n_epochs=params.n_epochs,
        optim=params.optims[min(params.optims)],
        seed=params.seed,
        data_id=params.data_id,
        train_loader=params.train_loader,
        val_loader=params.val_loader,
        parent_run_id=params.resume_from_run_id or params.parent_run_id,
        resume_from_checkpoint=params.resume_from_checkpoint,
    )


def _tracker(params: Any) -> MonitorTracker | None:
    if params.monitor is None:
        return None
    return MonitorTracker(params.monitor.resolve(params.metrics), warn_missing=True)


def _recorder(request: FitRequest, callbacks: tuple[Any, ...]) -> EpochRecorder:
    """``callbacks`` are those of every process: a summary is made by all or by none."""
    params = request.params
    watched = (getattr(callback, "monitor_spec", None) for callback in callbacks)
    default = request.trainer is None and request.step_fn is None and request.objective is None
    return EpochRecorder(
        request.model,
        extra_metrics=params.extra_metrics,
        metrics=params.metrics if default else (),
        summarize=declares_summary(params) or any(m and m.split == "train" for m in watched),
    )


def declares_summary(params: Any) -> bool:
    """Whether a run's records carry the summary of each training epoch."""
    return bool(params.metrics) or params.monitor is not None


def _clocks(
    request: FitRequest, optimizers: Mapping[str, Any], point: Any
) -> dict[str, SchedulerClock]:
    """A scheduler and its clock for every optimizer."""
    from nnx.schedulers import call_builder, check_horizon, schedule_horizon

    params, trainer = request.params, request.trainer is not None
    automatic = not trainer or params.auto_step_schedulers
    monitor = None if params.monitor is None else params.monitor.resolve(params.metrics)
    owns = request.step_fn is None
    batches = loader_length(params.train_loader)
    clocks = {}
    for name, schedule in _schedules(request).items():
        accumulate = _optim_params(request)[name].accumulate_grad_batches
        updates = None
        if owns and batches is not None:
            updates = params.n_epochs * -(-batches // accumulate)
        horizon = schedule_horizon(schedule, n_epochs=params.n_epochs, updates=updates, owner=name)
        if automatic and schedule.kind is not None:
            check_horizon(schedule.kind, schedule, horizon, n_epochs=params.n_epochs, owner=name)
        scheduler = call_builder(
            request.model._build_scheduler, optimizers[name], schedule, horizon, monitor
        )
        clocks[name] = SchedulerClock(
            scheduler, schedule, horizon, owner=name if trainer else None, automatic=automatic,
            planned_updates=updates, continues_plan=resume.continues_plan(params),
        )  # fmt: skip
    return clocks
