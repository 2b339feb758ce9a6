"""What a fit will do: a checked request and all that follows from it, as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nnx.engine import checks
from nnx.engine.compiled import check_compile
from nnx.engine.owner import OwnerKind, UpdateOwner
from nnx.engine.resume.point import check_request
from nnx.models import current_net_params, described_params
from nnx.precision import ResolvedPrecision
from nnx.store import NNRun, providers
from nnx.store.paths import BEST_POINTER
from nnx.store.pointer import locate_run

if TYPE_CHECKING:
    from nnx.engine.ranks.base import Ranks
    from nnx.engine.request import FitRequest
    from nnx.models import Model
    from nnx.params import AnySchedulerParams, NNModelParams, NNOptimParams


@dataclass(frozen=True, slots=True, kw_only=True)
class FitPlan:
    """A request that can be trained. To make one changes nothing.

    ``callbacks`` are those of this process. ``watches_training``: a callback of some
    process monitors the training split. ``model_params`` describe the net as it is now.
    """

    request: FitRequest
    callbacks: tuple[Any, ...]
    watches_training: bool
    precision: ResolvedPrecision
    optims: Mapping[str, NNOptimParams]
    schedules: Mapping[str, AnySchedulerParams]
    model_params: NNModelParams
    run: NNRun

    @property
    def model(self) -> Model:
        return self.request.model

    @property
    def params(self) -> Any:
        return self.request.params

    @property
    def owner(self) -> UpdateOwner:
        return self.request.owner

    @property
    def looks_ahead(self) -> bool:
        """Whether a step needs to know an epoch's last batch when there is no length."""
        return self.owner.kind is OwnerKind.STEP_FUNCTION

    @property
    def declares_summary(self) -> bool:
        """Whether the run's records carry the summary of each training epoch."""
        return bool(self.params.metrics) or self.params.monitor is not None

    @property
    def monitor(self) -> Any:
        """The declared monitor with the direction of its metric; ``None`` without one."""
        params = self.params
        return None if params.monitor is None else params.monitor.resolve(params.metrics)


def plan_fit(request: FitRequest, ranks: Ranks) -> FitPlan:
    """Check ``request`` and say what follows from it."""
    checks.check_arguments(request)
    request = _naming_runs_in_full(request)
    params, model, optimizers = request.params, request.model, request.optimizers
    if params.resume_from_run_id is not None:
        providers.remember_of(params.resume_from_run_id)
    ranks.check(request)
    asked = checks.check_callbacks(request)
    callbacks = ranks.callbacks(asked, bounded=request.history is not None)
    optimizers.check(params, request.owner)
    checks.check_model(request)
    checks.check_monitors(request, callbacks)
    precision = optimizers.precision(model, request.owner)
    checks.check_precision(request, precision)
    check_compile(request, callbacks, precision)
    optims, schedules = optimizers.optims(params), optimizers.schedules(params)
    checks.check_optims(request, optims)
    check_request(params, schedules, goes_on=request.goes_on)
    model_params = described_params(model)
    train, trainer = optimizers.stored(params)
    run = NNRun(
        net=current_net_params(model),
        train=train,
        model=model_params,
        trainer=trainer,
        salt=request.salt,
        transforms=model.transforms,
        precision=precision,
        name=params.name,
        tags=params.tags,
    )
    watched = [getattr(callback, "monitor_spec", None) for callback in asked]
    return FitPlan(
        request=request, callbacks=callbacks, precision=precision, optims=optims,
        schedules=schedules, model_params=model_params, run=run,
        watches_training=any(spec and spec.split == "train" for spec in watched),
    )  # fmt: skip


def _naming_runs_in_full(request: FitRequest) -> FitRequest:
    """The same with the whole id of the run to resume, which is part of the new run's own."""
    named = request.params.resume_from_run_id
    if named is None or named == BEST_POINTER or request.point is not None:
        return request
    whole = locate_run(named).id
    if whole == named:
        return request
    return replace(request, params=replace(request.params, resume_from_run_id=whole))
