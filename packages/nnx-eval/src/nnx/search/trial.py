"""One trial: a plan's fit under caps, deadline and pruner, and the outcome it comes to."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nnx.callbacks import Callback
from nnx.errors import NNxError
from nnx.params import MonitorSpec
from nnx.plans import ExperimentPlan
from nnx.plans.validation import is_factory, training_source, validation_source
from nnx.search.outcomes import SearchBudget, TrialOutcome
from nnx.store import NNRun


class ConfigurationError(NNxError):
    """A plan that a search cannot score; the cause is what is raised to the caller."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a trial may spend; ``deadline`` is a reading of ``clock``."""

    budget: SearchBudget
    clock: Callable[[], float]
    deadline: float | None

    def overrun(self) -> float | None:
        """Seconds past the deadline; ``None`` before it."""
        if self.deadline is None:
            return None
        late = self.clock() - self.deadline
        return late if late >= 0 else None


class Watch(Callback):
    """Reports each validated epoch to the trial and stops the fit at a cap, deadline or prune."""

    def __init__(self, trial: Any, limits: Limits) -> None:
        self._trial = trial
        self._limits = limits
        self.reason: str | None = None
        self.overrun: float | None = None
        self.observations: list[tuple[int, float]] = []
        self.updates = 0
        self.epochs = 0
        self.run_id: str | None = None

    def on_train_begin(self, ctx: Any) -> None:
        self.run_id = ctx.run.id
        budget = self._limits.budget
        if budget.updates_per_trial is not None or self._limits.deadline is not None:
            ctx.update_listeners.append(self._on_update)

    def _on_update(self, ctx: Any) -> None:
        self.updates = ctx.committed_updates
        cap = self._limits.budget.updates_per_trial
        if cap is not None and self.updates >= cap:
            self._stop("update_cap")
        elif (late := self._limits.overrun()) is not None:
            self._stop("deadline", late)
        if self.reason is not None:
            ctx.stop_at_update = True

    def on_epoch_end(self, ctx: Any) -> None:
        self.updates = ctx.committed_updates
        self.epochs += 1
        selection = ctx.idp.selection
        if selection is not None and selection.value is not None:
            value = float(selection.value)
            if math.isfinite(value):
                self._trial.report(value, step=ctx.epoch)
                self.observations.append((ctx.epoch, value))
                if self.reason is None and self._trial.should_prune():
                    self._stop("pruned")
        if self.reason is None and (late := self._limits.overrun()) is not None:
            self._stop("deadline", late)
        if self.reason is not None:
            ctx.should_stop = True

    def _stop(self, reason: str, overrun: float | None = None) -> None:
        if self.reason is None:
            self.reason, self.overrun = reason, overrun


def check_plan(
    plan: Any, monitor: Any, budget: SearchBudget, *, where: str = "the plan"
) -> MonitorSpec:
    """The monitor with its direction, of a plan that a search can fit again and again and score."""
    if not isinstance(plan, ExperimentPlan):
        raise TypeError(f"{where} must be an ExperimentPlan, not {type(plan).__name__}")
    plan.validate().raise_for_errors()
    assert plan.train is not None
    if not isinstance(monitor, MonitorSpec) or monitor.split != "val":
        raise ValueError(
            f"monitor must be a MonitorSpec of the validation split, not {monitor!r}: a training "
            "value scores no trial"
        )
    own = plan.train.monitor
    wanted = monitor.resolve(plan.train.metrics)
    if own is None or own.resolve(plan.train.metrics) != wanted:
        raise ValueError(
            f"{where} watches {own!r}, but the search is scored by {monitor!r}; declare it with "
            "with_metrics(monitor=...), so that BEST and the score are one decision"
        )
    for name, source in (("train", training_source(plan)), ("val", validation_source(plan))):
        if not is_factory(source):
            raise ValueError(
                f"{where} lends its {name} data to all trials; pass a function that makes it: "
                f"with_data({name}=make_loader)"
            )
    if plan.callbacks:
        raise ValueError(
            f"{where} lends its callbacks to all trials; pass functions that make them: "
            "with_callback_factories(...)"
        )
    if budget.updates_per_trial is not None and plan.train_step_fn is not None:
        raise ValueError(
            "updates_per_trial counts reported updates, and a train_step_fn of one's own may "
            "report none; search without the cap, or train by an objective"
        )
    return wanted


def applied(
    plan: ExperimentPlan,
    params: Mapping[str, Any],
    apply: Callable[[Any, Mapping[str, Any]], Any],
    monitor: MonitorSpec,
    budget: SearchBudget,
) -> ExperimentPlan:
    """The plan of one trial; :class:`ConfigurationError` for one that cannot be scored."""
    try:
        branch = apply(plan, params)
        check_plan(branch, monitor, budget, where="the plan that apply returned")
    except Exception as error:
        raise ConfigurationError(str(error)) from error
    return branch


def outcome_of(base: TrialOutcome, run: NNRun, watch: Watch | None, direction: str) -> TrialOutcome:
    """What a fit that ended comes to: the value of the epoch that BEST holds."""
    idps = run.idps or []
    ends = [idp for idp in idps if idp.selection is not None]
    elected = [idp for idp in ends if idp.selection is not None and idp.selection.improved]
    value = None
    if elected and elected[-1].selection is not None:
        value = elected[-1].selection.value
    reason = None if watch is None else watch.reason
    base = replace(
        base,
        run_id=run.id,
        monitor_value=value,
        epochs=len({idp.epoch_idx for idp in idps}),
        checkpoint="best" if value is not None else "last" if idps else None,
    )
    if watch is not None:
        base = replace(
            base, updates=watch.updates, overrun_seconds=watch.overrun,
            observations=tuple(watch.observations),
        )  # fmt: skip
    if reason == "pruned":
        return replace(base, state="pruned", reason="pruned")
    if not idps:
        return replace(base, state="failed", reason="no_epoch", error=f"stopped by {reason}")
    if value is None or not math.isfinite(value):
        known = [idp.selection.value for idp in ends if idp.selection is not None]
        why = "nonfinite" if any(v is not None for v in known) else "missing"
        return replace(base, state="failed", reason=why, monitor_value=None)
    return replace(base, state="completed", reason=reason or "completed")
