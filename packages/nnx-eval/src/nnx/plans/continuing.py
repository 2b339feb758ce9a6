"""An attempt that may have been made before: found by its run id, and gone on with.

An attempt's first run has the id of its plan. Each continuation of an interrupted one is
a run of its own, whose parent is the run before; its id is that of the resuming plan.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from nnx.plans.experiment import Experiment
from nnx.plans.fitting import fit, manifest_of, planned_run
from nnx.plans.outcomes import FitResult
from nnx.store import NNRun
from nnx.store.committed import NOTHING, committed_epoch
from nnx.store.paths import RunPaths


@dataclass(frozen=True, slots=True)
class Standing:
    """How far an attempt is: its newest run, the epochs that are committed, and the plan of
    the fit that comes next."""

    run_id: str | None
    epochs: int
    complete: bool
    next_plan: Experiment
    run_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fitted:
    """A run of an attempt, and how it came to be."""

    run: NNRun
    result: FitResult | None
    reused: bool
    resumed_from: str | None = None


def newest(plan: Experiment, attempt: str) -> Standing:
    """Follow an attempt's runs from the first to the newest that committed an epoch."""
    assert plan.train is not None
    wanted = plan.train.n_epochs
    current, ids, epochs = plan, [], 0
    while True:
        run_id = planned_run(current, attempt).id
        paths = RunPaths.of(run_id)
        done = committed_epoch(paths) if os.path.isfile(paths.run_yaml) else NOTHING
        if done is None or done == NOTHING:
            break
        ids.append(run_id)
        epochs = done + 1
        if epochs >= wanted or _ended(run_id):
            break
        current = plan.resuming(run_id, mode="stateful", epochs="planned")
    complete = bool(ids) and (epochs >= wanted or _ended(ids[-1]))
    return Standing(ids[-1] if ids else None, epochs, complete, current, tuple(ids))


def _ended(run_id: str) -> bool:
    """Whether a run ended by itself before its planned epochs, as early stopping does."""
    attempt = getattr(NNRun.load(run_id).provenance, "attempt", None)
    return attempt is not None and attempt.status == "completed"


def train_or_continue(plan: Experiment, attempt: str) -> Fitted:
    """The attempt's run: trained, gone on with, or there already."""
    standing = newest(plan, attempt)
    if standing.complete:
        assert standing.run_id is not None
        return Fitted(NNRun.load(standing.run_id), None, reused=True)
    planned = standing.next_plan
    if planned.provenance is None:  # without it nobody could tell whether an attempt ended
        planned = planned.with_provenance(manifest_of(planned))
    result = fit(planned, attempt=attempt)
    return Fitted(result.run, result, reused=False, resumed_from=standing.run_id)
