"""A sequential study: one trial after the other, within the budget."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from nnx.errors import NNxError
from nnx.params import MonitorSpec
from nnx.plans import ExperimentPlan
from nnx.plans.fitting import planned_training, refuse_ranks
from nnx.plugins.siblings import install_line
from nnx.search.outcomes import SearchBudget, SearchResult, TrialOutcome
from nnx.search.space import SearchSpace
from nnx.search.trial import (
    ConfigurationError,
    Limits,
    Watch,
    applied,
    check_plan,
    outcome_of,
)
from nnx.utils import validation as check
from nnx.utils.jsonlike import canonical, freeze

IDENTITY = "nnx.identity"
OUTCOME = "nnx.outcome"
_STATES = {"COMPLETE": "completed", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "orphaned"}


def search(
    plan: Any,
    space: SearchSpace,
    *,
    apply: Callable[[Any, Mapping[str, Any]], Any],
    monitor: Any,
    budget: SearchBudget,
    study_name: str,
    storage: str | None = None,
    sampler: Any = None,
    pruner: Any = None,
    clock: Callable[[], float] = time.monotonic,
) -> SearchResult:
    """Try configurations of ``plan`` until the budget is spent.

    ``apply(plan, params)`` returns the branch that a trial fits. ``monitor`` is the plan's own
    validation monitor, whose BEST epoch scores a trial. ``storage`` keeps the study: a URL of
    Optuna's, or the path of a journal file; one that is there is continued, unless its space,
    monitor or plan is another. A fit that raises is a failed trial, and the search goes on;
    a configuration that cannot be scored fails its trial and is raised.

    Needs ``optuna``. Raises ``RuntimeError`` in a process group of several ranks.
    """
    refuse_ranks()
    if not isinstance(space, SearchSpace):
        raise TypeError(f"space must be a SearchSpace, not {type(space).__name__}")
    if not isinstance(budget, SearchBudget):
        raise TypeError(f"budget must be a SearchBudget, not {type(budget).__name__}")
    check.name("search", "study_name", study_name)
    if not callable(apply):
        raise TypeError(f"apply must be callable(plan, params), not {type(apply).__name__}")
    resolved = check_plan(plan, monitor, budget)
    study = open_study(
        plan,
        space,
        resolved,
        study_name=study_name,
        storage=storage,
        sampler=sampler,
        pruner=pruner,
    )
    started = clock()
    deadline = None if budget.deadline_seconds is None else started + budget.deadline_seconds
    limits = Limits(budget, clock, deadline)
    return _Search(study, plan, space, apply, resolved, limits).run()


class _Search:
    """One call of :func:`search`."""

    def __init__(
        self,
        study: Any,
        plan: ExperimentPlan,
        space: SearchSpace,
        apply: Callable[[Any, Mapping[str, Any]], Any],
        monitor: MonitorSpec,
        limits: Limits,
    ) -> None:
        self.study, self.plan, self.space, self.apply = study, plan, space, apply
        self.monitor, self.limits = monitor, limits
        self.runs: dict[int, Any] = {}
        self._exhausted = False
        self._trial: Any = None
        stop = study.stop

        def noted_stop() -> None:  # a sampler without a point left asks for it
            self._exhausted = True
            stop()

        study.stop = noted_stop

    def run(self) -> SearchResult:
        optuna = require_optuna()
        reason = "budget"
        while spent(self.study) < self.limits.budget.trials:
            if self.limits.overrun() is not None:
                reason = "deadline"
                break
            if self._exhausted or is_exhausted(self.study):
                reason = "exhausted"
                break
            self._trial = None
            try:
                self.study.optimize(self._objective, n_trials=1, catch=(_FailedTrial,))
            except ConfigurationError as error:
                raise error.__cause__ or error from None
            except BaseException:
                if self._trial is not None:
                    self.study.tell(
                        self._trial, state=optuna.trial.TrialState.FAIL, skip_if_finished=True
                    )
                raise
        return result_of(
            self.study, self.monitor, reason, self.runs,
            overrun=self.limits.overrun() if self.limits.deadline is not None else None,
        )  # fmt: skip

    def _objective(self, trial: Any) -> float:
        self._trial = trial
        attempt = uuid.uuid4().hex
        watch = Watch(trial, self.limits)
        began = self.limits.clock()
        outcome = TrialOutcome(trial.number, {}, "failed", "error", attempt_id=attempt)
        try:
            params = self.space.suggest(trial)
            outcome = replace(outcome, params=params)
            branch = applied(
                self.plan, MappingProxyType(params), self.apply, self.monitor, self.limits.budget
            )
            made = branch.callback_factories
            fitted = branch.with_callback_factories(*made, lambda: watch).fit(attempt=attempt)
        except BaseException as error:
            outcome = self._failed(outcome, error, watch)
            self._keep(trial, outcome, began)
            if isinstance(error, Exception) and not isinstance(error, ConfigurationError):
                raise _FailedTrial(outcome.error) from error
            raise
        self.runs[trial.number] = fitted.run
        outcome = outcome_of(outcome, fitted.run, watch, str(self.monitor.mode))
        self._keep(trial, outcome, began)
        return told(outcome)

    def _failed(self, outcome: TrialOutcome, error: BaseException, watch: Watch) -> TrialOutcome:
        reason = "error" if isinstance(error, Exception) else "cancelled"
        if isinstance(error, FloatingPointError):
            reason = "nonfinite"
        if isinstance(error, ConfigurationError):
            reason, error = "configuration", error.__cause__ or error
        return replace(
            outcome, reason=reason, error=f"{type(error).__name__}: {error}", run_id=watch.run_id,
            epochs=watch.epochs, updates=watch.updates, observations=tuple(watch.observations),
            checkpoint="last" if watch.epochs else None,
        )  # fmt: skip

    def _keep(self, trial: Any, outcome: TrialOutcome, began: float) -> None:
        outcome = replace(outcome, seconds=self.limits.clock() - began)
        trial.set_user_attr(OUTCOME, outcome.attributes())


class _FailedTrial(NNxError):
    """Tells Optuna that a trial failed, and the search that it goes on."""


def told(outcome: TrialOutcome) -> float:
    """The value for Optuna; its exceptions for a trial that has none."""
    if outcome.state == "pruned":
        raise require_optuna().TrialPruned
    if outcome.state != "completed" or outcome.monitor_value is None:
        raise _FailedTrial(outcome.error or outcome.reason)
    return outcome.monitor_value


def open_study(
    plan: ExperimentPlan,
    space: SearchSpace,
    monitor: MonitorSpec,
    *,
    study_name: str,
    storage: str | None,
    sampler: Any = None,
    pruner: Any = None,
) -> Any:
    """A new study, or the stored one of this name if it is about the same search."""
    optuna = require_optuna()
    study = optuna.create_study(
        study_name=study_name,
        storage=storage_of(storage),
        sampler=sampler,
        pruner=optuna.pruners.NopPruner() if pruner is None else pruner,
        direction="minimize" if monitor.mode == "min" else "maximize",
        load_if_exists=storage is not None,
    )
    mine = {
        "space": space.digest(),
        "monitor": json.dumps(monitor.state(), sort_keys=True),
        "plan": plan_digest(plan),
    }
    stored = study.user_attrs.get(IDENTITY)
    if stored is None and not study.trials:
        study.set_user_attr(IDENTITY, mine)
    elif stored != mine:
        differing = (
            "origin" if stored is None else ", ".join(k for k in mine if stored.get(k) != mine[k])
        )
        raise ValueError(
            f"the study {study_name!r} in {storage} is of another {differing}; continue it with what "
            "it was begun with, or choose another study_name"
        )
    return study


def storage_of(storage: str | None) -> Any:
    """Optuna's storage for a URL, or for the path of a journal file."""
    if storage is None or "://" in storage:
        return storage
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    os.makedirs(os.path.dirname(os.path.abspath(storage)), exist_ok=True)
    return JournalStorage(JournalFileBackend(storage))


def plan_digest(plan: ExperimentPlan) -> str:
    """A digest of everything about a plan that has a stored form or a name."""
    train = planned_training(plan)
    assert plan.model is not None
    state = {
        "net": None if plan.net is None else plan.net.state(),
        "model": plan.model.state(),
        "train": train.state(),
        "objective": _named(plan.objective),
        "train_step_fn": _named(plan.train_step_fn),
        "eval_step_fn": _named(plan.eval_step_fn),
    }
    return hashlib.sha256(canonical(freeze(state))).hexdigest()


def spent(study: Any) -> int:
    """The trials that count: all but those that were enqueued and never ran."""
    return sum(trial.state.name != "WAITING" for trial in study.get_trials(deepcopy=False))


def is_exhausted(study: Any) -> bool:
    """Whether the sampler says that it has no point left."""
    ask = getattr(study.sampler, "is_exhausted", None)
    return bool(ask(study)) if callable(ask) else False


def outcomes_of(study: Any) -> tuple[TrialOutcome, ...]:
    """What became of every trial that ran, those of other processes included."""
    found = []
    for trial in study.get_trials(deepcopy=False):
        if trial.state.name == "WAITING":
            continue
        kept = dict(trial.user_attrs.get(OUTCOME) or {})
        state = _STATES[trial.state.name]
        if state == "orphaned" or not kept:
            kept |= {"state": state, "reason": "orphaned" if state == "orphaned" else state}
        found.append(TrialOutcome(number=trial.number, params=trial.params, **kept))
    return tuple(found)


def result_of(
    study: Any, monitor: MonitorSpec, reason: str, runs: Mapping[int, Any], *, overrun: float | None
) -> SearchResult:
    """The result of a study as it stands."""
    outcomes = outcomes_of(study)
    scored = [
        (outcome.monitor_value, outcome)
        for outcome in outcomes
        if outcome.state == "completed"
        and outcome.monitor_value is not None
        and math.isfinite(outcome.monitor_value)
    ]
    best = None
    if scored:
        pick = min if monitor.mode == "min" else max
        best = pick(scored, key=lambda pair: pair[0])[1]
    return SearchResult(
        study_name=study.study_name,
        outcomes=outcomes,
        best=best,
        asked=spent(study),
        stop_reason=reason,
        direction=str(monitor.mode),
        monitor=monitor.key,
        deadline_overrun_seconds=overrun,
        trial_runs=MappingProxyType(dict(runs)),
    )


def require_optuna() -> Any:
    """The library, or the line that installs it."""
    try:
        import optuna
    except ImportError:
        raise ImportError(
            f"a search needs optuna. Install it with: {install_line('nnx-eval', 'search')}"
        ) from None
    return optuna


def _named(thing: Any) -> str | None:
    if thing is None:
        return None
    kind = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{kind.__module__}.{kind.__qualname__}"
