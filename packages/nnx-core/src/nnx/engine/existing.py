"""What becomes of a run of the same configuration that is there already.

A continuation is a run of its own, whose parent is the run before. Its id follows from the
parent's, so that the newest of them is found by following the chain from the first.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

from nnx.engine.plan import FitPlan, plan_fit
from nnx.models import check_state_topology, state_topology
from nnx.store import NNRun
from nnx.store.committed import NOTHING, committed_epoch
from nnx.store.errors import RunBusyError, RunExistsError
from nnx.store.manifest import locate
from nnx.store.metadata import has_finished, read_metadata
from nnx.store.paths import LAST, STEP, PointFiles, RunPaths
from nnx.store.points import LATEST, read_point, step_is_newer
from nnx.utils.locks import is_held

if TYPE_CHECKING:
    from nnx.engine.ranks.base import Ranks
    from nnx.engine.request import FitRequest

ABSENT, EMPTY, UNFINISHED, FINISHED = "absent", "empty", "unfinished", "finished"


def settle(request: FitRequest, ranks: Ranks) -> tuple[FitPlan, bool, bool]:
    """The plan to carry out, whether it replaces a run, and whether its run is to be loaded.

    Raises ``RunExistsError`` for a run that may not be touched, ``RunBusyError`` for one
    that is being trained.
    """
    plan = plan_fit(request, ranks)
    wanted = getattr(plan.params, "on_existing", "error")
    overwrite = plan.params.overwrite_existing or wanted == "replace"
    before: NNRun | None = None
    while wanted in ("resume", "load"):
        look = functools.partial(_state, plan.run, plan.params.n_epochs, before)
        state = ranks.from_writer(look)
        if state in (ABSENT, EMPTY):
            overwrite = state == EMPTY
            break
        if wanted == "load" or state == FINISHED:
            return plan, False, True
        before = plan.run
        plan = plan_fit(_going_on(request, plan.run.id), ranks)
    plan.run.ensure_writable(overwrite=overwrite)
    return plan, overwrite, False


def load(plan: FitPlan) -> NNRun:
    """The run of ``plan`` as it is on disk; the model gets the weights of its LAST.

    Raises ``ValueError`` when they do not fit the model, which then stays as it was.
    """
    model = plan.model
    try:
        point = read_point(plan.run.id, "last", with_state=False)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"on_existing='load': {error}. It was stopped inside its first epoch; continue it "
            "with on_existing='resume', or train anew with 'replace'"
        ) from None
    weights = point.checkpoint.net_state
    check_state_topology(model.net, weights, what="the model")
    model.net.load_state_dict(weights)
    model.params, model.recorded_topology = plan.model_params, state_topology(model.net)
    return NNRun.load(plan.run.id)


def _state(run: NNRun, n_epochs: int, before: NNRun | None) -> str:
    """How far the run on disk is, as a continuation of the one ``before`` it; changes nothing."""
    paths = RunPaths.of(run.id)
    if is_held(paths.lease):
        raise RunBusyError(f"run {run.id} in {paths.root} is being trained by another process")
    paths = RunPaths.seen(paths.root, paths.id)
    if not paths.exists():
        return ABSENT
    done = committed_epoch(paths)
    if done is None:
        raise RunExistsError(
            run.id, paths.root, why="it has no LAST checkpoint that could be loaded or continued"
        )
    if before is not None and _left_over(paths, RunPaths.seen(paths.root, before.id)):
        return EMPTY
    if done + 1 >= n_epochs or (done != NOTHING and has_finished(paths)):
        return FINISHED
    return UNFINISHED if done != NOTHING or paths.has_point() else EMPTY


def _left_over(paths: RunPaths, before: RunPaths) -> bool:
    """Whether a continuation is of a run that has been replaced by another training since."""
    resumed = read_metadata(paths).get("resume")
    source = resumed.get("source_checkpoint_id") if isinstance(resumed, dict) else None
    tag = STEP if step_is_newer(before) else LAST
    newest = locate(PointFiles(before.checkpoints, tag)).manifest
    return source is not None and newest is not None and newest["checkpoint_id"] != source


def _going_on(request: FitRequest, run_id: str) -> FitRequest:
    """The same request, from where the run stopped to the end of its plan."""
    params = dataclasses.replace(
        request.params, resume_from_run_id=run_id, resume_from_checkpoint=LATEST,
        resume_mode="stateful", resume_epochs="planned", on_existing="error",
    )  # fmt: skip
    return dataclasses.replace(request, params=params, goes_on=True)
