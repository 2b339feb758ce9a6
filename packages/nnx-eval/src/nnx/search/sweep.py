"""Many processes, one study: workers join and leave, and take up what a killed one left."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from nnx.params import MonitorSpec
from nnx.plans import ExperimentPlan
from nnx.plans.continuing import newest, train_or_continue
from nnx.plans.fitting import refuse_ranks
from nnx.search.outcomes import SearchBudget, SearchResult, TrialOutcome
from nnx.search.space import SearchSpace
from nnx.search.study import (
    OUTCOME,
    is_exhausted,
    open_study,
    outcomes_of,
    require_optuna,
    result_of,
    spent,
)
from nnx.search.trial import ConfigurationError, Limits, Watch, applied, check_plan, outcome_of
from nnx.store import NNRun, RunBusyError
from nnx.store.paths import runs_root
from nnx.utils import validation as check
from nnx.utils.locks import LockBusyError, locked

ATTEMPT = "sweep"  # of every sweep, so that a configuration is known again by its run id
KNOWN = ("reuse", "skip")
TAKES = "nnx.takes"
_MOST_TAKES = 3
_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A search that several processes work at, as a value that each of them builds.

    ``known`` says what becomes of a configuration whose run is complete already: "reuse"
    tells its value without training, "skip" fails the trial. ``storage`` must be one that all
    workers reach; by default a journal file in the runs folder.
    """

    plan: ExperimentPlan
    space: SearchSpace
    apply: Callable[[Any, Mapping[str, Any]], Any]
    monitor: MonitorSpec
    budget: SearchBudget
    study_name: str = "sweep"
    storage: str | None = None
    sampler: Callable[[], Any] | None = None
    pruner: Callable[[], Any] | None = None
    known: str = "reuse"

    def __post_init__(self) -> None:
        check.name("Sweep", "study_name", self.study_name)
        check.choice("Sweep", "known", self.known, KNOWN)
        for name in ("sampler", "pruner"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                check.refuse_type("Sweep", name, value, "a function that makes one")

    def work(self, *, first: bool = True) -> SearchResult:
        """Be one worker until the budget is spent; others may work at the same study.

        A worker that is not the ``first`` draws from a sampler that is seeded anew.
        """
        return _Worker(self, first).run()

    def result(self) -> SearchResult:
        """The study as it stands."""
        monitor = check_plan(self.plan, self.monitor, self.budget)
        study = self._open(monitor)
        return result_of(study, monitor, _reason(study, self.budget), {}, overrun=None)

    def _open(self, monitor: MonitorSpec) -> Any:
        return open_study(
            self.plan, self.space, monitor, study_name=self.study_name, storage=self._storage(),
            sampler=None if self.sampler is None else self.sampler(),
            pruner=None if self.pruner is None else self.pruner(),
        )  # fmt: skip

    def _storage(self) -> str:
        if self.storage is not None:
            return self.storage
        return os.path.join(runs_root(None), ".sweeps", f"{self._stem()}.journal")

    def _stem(self) -> str:
        return hashlib.sha256(self.study_name.encode()).hexdigest()[:16]

    def lock(self, name: str) -> str:
        """The path of a lock of this study, where every worker sees it."""
        return os.path.join(runs_root(None), ".sweeps", f"{self._stem()}.{name}.lock")


class _Worker:
    def __init__(self, sweep: Sweep, first: bool) -> None:
        refuse_ranks()
        self.sweep = sweep
        self.monitor = check_plan(sweep.plan, sweep.monitor, sweep.budget)
        os.makedirs(os.path.join(runs_root(None), ".sweeps"), exist_ok=True)
        with self._alone():
            self.study = sweep._open(self.monitor)
        self.study.stop = lambda: None  # a grid that is used up asks for it; see is_exhausted
        if not first:
            self.study.sampler.reseed_rng()
        clock = time.monotonic
        seconds = sweep.budget.deadline_seconds
        deadline = None if seconds is None else clock() + seconds
        self.limits = Limits(sweep.budget, clock, deadline)
        self.runs: dict[int, Any] = {}

    def run(self) -> SearchResult:
        while self.limits.overrun() is None:
            with self._claimed() as trial:
                if trial is None:
                    break
                self._work(trial)
        late = self.limits.overrun()
        reason = "deadline" if late is not None else _reason(self.study, self.sweep.budget)
        return result_of(self.study, self.monitor, reason, self.runs, overrun=late)

    def _alone(self) -> Any:
        return locked(self.sweep.lock("ask"), timeout=120, what="the study")

    @contextlib.contextmanager
    def _claimed(self) -> Iterator[Any]:
        """A trial that this worker alone holds, as long as it lives; ``None`` when none is left."""
        with contextlib.ExitStack() as held:
            with self._alone():
                trial = self._orphan(held)
                left = spent(self.study) < self.sweep.budget.trials
                if trial is None and left and not is_exhausted(self.study):
                    trial = self.study.ask()
                    held.enter_context(self._hold(trial.number))
            yield trial

    def _hold(self, number: int) -> Any:
        return locked(self.sweep.lock(f"trial-{number}"), timeout=0, what=f"trial {number}")

    def _orphan(self, held: contextlib.ExitStack) -> Any:
        """A running trial that nobody holds: its worker was killed."""
        optuna = require_optuna()
        for frozen in self.study.get_trials(deepcopy=False):
            if frozen.state.name != "RUNNING":
                continue
            try:
                held.enter_context(self._hold(frozen.number))
            except LockBusyError:
                continue
            trial = optuna.trial.Trial(self.study, frozen._trial_id)
            takes = int(frozen.user_attrs.get(TAKES, 0)) + 1
            if takes <= _MOST_TAKES:
                trial.set_user_attr(TAKES, takes)
                return trial
            outcome = TrialOutcome(
                frozen.number, frozen.params, "failed", "error",
                error=f"its worker died {takes} times",
            )  # fmt: skip
            self._tell(trial, outcome)
            held.pop_all().close()
        return None

    def _work(self, trial: Any) -> None:
        watch = Watch(trial, self.limits)
        began = self.limits.clock()
        outcome = TrialOutcome(trial.number, {}, "failed", "error", attempt_id=ATTEMPT)
        try:
            params = self.sweep.space.suggest(trial)
            outcome = replace(outcome, params=params)
            branch = applied(
                self.sweep.plan, MappingProxyType(params), self.sweep.apply, self.monitor,
                self.limits.budget,
            )  # fmt: skip
            outcome = self._fit(branch, outcome, watch, trial)
        except BaseException as error:
            cause = error.__cause__ or error if isinstance(error, ConfigurationError) else error
            reason = "error" if isinstance(error, Exception) else "cancelled"
            reason = "configuration" if isinstance(error, ConfigurationError) else reason
            reason = "nonfinite" if isinstance(error, FloatingPointError) else reason
            outcome = replace(
                outcome, reason=reason, error=f"{type(cause).__name__}: {cause}",
                run_id=watch.run_id, epochs=watch.epochs, updates=watch.updates,
                observations=tuple(watch.observations), checkpoint="last" if watch.epochs else None,
            )  # fmt: skip
            self._tell(trial, replace(outcome, seconds=self.limits.clock() - began))
            if _concerns_all(error):
                raise cause from None
            return
        self._tell(trial, replace(outcome, seconds=self.limits.clock() - began))

    def _fit(
        self, branch: ExperimentPlan, outcome: TrialOutcome, watch: Watch, trial: Any
    ) -> TrialOutcome:
        made = branch.callback_factories
        watched = branch.with_callback_factories(*made, lambda: watch)
        while True:
            standing = newest(watched, ATTEMPT)
            if standing.complete and standing.run_id is not None:
                taken = TAKES in trial.user_attrs  # then it may be this trial's own run
                return self._known(outcome, standing.run_id, standing.run_ids, taken=taken)
            for epoch, value in _earlier(standing.run_ids):
                trial.report(value, step=epoch)
            try:
                fitted = train_or_continue(watched, ATTEMPT)
            except (RunBusyError, FileExistsError):
                time.sleep(_POLL_SECONDS)  # another worker trains this configuration
                continue
            break
        self.runs[outcome.number] = fitted.run
        found = outcome_of(outcome, fitted.run, watch, str(self.monitor.mode))
        return _over_lineage(found, standing.run_ids, str(self.monitor.mode))

    def _known(
        self, outcome: TrialOutcome, run_id: str, ids: tuple[str, ...], *, taken: bool
    ) -> TrialOutcome:
        """A configuration whose run is complete: as it came out the first time."""
        if self.sweep.known == "skip" and not taken:
            text = f"its configuration was trained before, as run {run_id}"
            return replace(outcome, reason="reused", run_id=run_id, error=text)
        for other in outcomes_of(self.study):
            if (
                other.run_id == run_id
                and other.number != outcome.number
                and other.state != "orphaned"
            ):
                return replace(other, number=outcome.number, params=outcome.params, reason="reused")
        found = outcome_of(outcome, NNRun.load(run_id), None, str(self.monitor.mode))
        found = _over_lineage(found, ids[:-1], str(self.monitor.mode))
        return replace(found, reason="reused") if found.state == "completed" else found

    def _tell(self, trial: Any, outcome: TrialOutcome) -> None:
        states = require_optuna().trial.TrialState
        trial.set_user_attr(OUTCOME, outcome.attributes())
        if outcome.state == "completed":
            self.study.tell(trial, outcome.monitor_value)
        else:
            state = states.PRUNED if outcome.state == "pruned" else states.FAIL
            self.study.tell(trial, state=state)


def sweep(
    file: str | os.PathLike[str],
    *,
    trials: int | None = None,
    workers: int = 1,
    study_name: str | None = None,
    storage: str | None = None,
) -> SearchResult:
    """Run the sweep that a Python file defines, in ``workers`` processes.

    The file holds ``sweep = Sweep(...)``. ``trials``, ``study_name`` and ``storage`` replace
    its own. More workers may join from other places with the same call. Raises
    ``RuntimeError`` when workers failed and the budget is not spent.
    """
    check.count("sweep", "workers", workers)
    planned = load_sweep(file, trials=trials, study_name=study_name, storage=storage)
    planned.result()  # refuses what does not fit before a process starts
    if workers == 1:
        return planned.work()
    command = [sys.executable, "-m", "nnx", "sweep", os.fspath(file), "--study", planned.study_name]
    command += ["--trials", str(planned.budget.trials)]
    if storage is not None:
        command += ["--storage", storage]
    others = {**os.environ, "NNX_TQDM_DISABLE": "1"}
    running = [
        subprocess.Popen([*command, "--worker", str(index)], env=others) for index in range(workers)
    ]
    try:
        codes = [process.wait() for process in running]
    except BaseException:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()
        raise
    result = planned.result()
    unfinished = any(outcome.state == "orphaned" for outcome in result.outcomes)
    if any(codes) and (unfinished or result.asked < planned.budget.trials):
        raise RuntimeError(
            f"{sum(map(bool, codes))} of {workers} workers failed, and {result.asked} of "
            f"{planned.budget.trials} trials ran; start the sweep again to go on with it"
        )
    return result


def load_sweep(
    file: str | os.PathLike[str],
    *,
    trials: int | None = None,
    study_name: str | None = None,
    storage: str | None = None,
) -> Sweep:
    """The ``sweep`` of a Python file, with what is given in place of its own."""
    import runpy

    path = os.fspath(file)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"there is no file {path}")
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    try:
        found = runpy.run_path(path, run_name="nnx_sweep").get("sweep")
    finally:
        sys.path.pop(0)
    if not isinstance(found, Sweep):
        raise ValueError(f"{path} must define sweep = Sweep(...), not {check.show(found)}")
    if trials is not None:
        found = replace(found, budget=replace(found.budget, trials=trials))
    if study_name is not None:
        found = replace(found, study_name=study_name)
    return found if storage is None else replace(found, storage=storage)


def _concerns_all(error: BaseException) -> bool:
    """Whether the next trial would fail for the same reason."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
    return full or isinstance(error, ConfigurationError) or not isinstance(error, Exception)


def _reason(study: Any, budget: SearchBudget) -> str:
    return "budget" if spent(study) >= budget.trials else "exhausted"


def _selected(run_ids: tuple[str, ...]) -> Iterator[tuple[int, float, bool]]:
    for run_id in run_ids:
        for idp in NNRun.load(run_id).idps or ():
            selection = idp.selection
            if selection is not None and selection.value is not None:
                yield idp.epoch_idx, float(selection.value), selection.improved


def _earlier(run_ids: tuple[str, ...]) -> Iterator[tuple[int, float]]:
    """What an interrupted trial had seen, for the pruner."""
    return ((e, value) for e, value, _ in _selected(run_ids) if math.isfinite(value))


def _over_lineage(outcome: TrialOutcome, earlier: tuple[str, ...], mode: str) -> TrialOutcome:
    """The outcome of a continued trial over all its runs: the last elected epoch of any."""
    if not earlier or outcome.state == "pruned":
        return outcome
    before = [value for _, value, improved in _selected(earlier) if improved]
    epochs = outcome.epochs + len({epoch for epoch, *_ in _selected(earlier)})
    value = outcome.monitor_value
    if value is None and before:  # no later epoch beat the best that was carried over
        value = before[-1]
    if value is None:
        return replace(outcome, epochs=epochs)
    return replace(
        outcome, epochs=epochs, monitor_value=value, state="completed", checkpoint="best",
        reason=outcome.reason if outcome.state == "completed" else "completed", error=None,
    )  # fmt: skip
