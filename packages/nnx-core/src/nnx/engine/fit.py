"""From a request to a trained run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from nnx.engine import commit, resume, rng
from nnx.engine.callback_context import overrides
from nnx.engine.compiled import compiling
from nnx.engine.loop import begin_epoch, loop
from nnx.engine.plan import plan_fit
from nnx.engine.ranks import join
from nnx.engine.session import FitSession
from nnx.models import state_topology
from nnx.seeding import set_seed
from nnx.store.paths import runs_root

if TYPE_CHECKING:
    from nnx.engine.request import FitRequest
    from nnx.store import NNRun


def fit(request: FitRequest) -> NNRun:
    """Check, reserve, train, commit; the finished run.

    A request that cannot be trained raises before anything is changed. A fit that
    fails later keeps its committed epochs.
    """
    ranks = join(request)
    with ranks.guarded():
        plan = plan_fit(request, ranks)
        with ranks.open_writer(
            plan.run,
            history=request.history,
            overwrite=plan.params.overwrite_existing,
            provenance=request.provenance,
            parent=plan.resume.point,
            best=plan.resume.best,
        ) as writer:
            writer.run = writer.run.with_resume_status(plan.resume.status())
            session = FitSession(plan, writer)
            try:
                with compiling(plan.model, plan.compiled), _in_training(plan.model):
                    _train(session)
            finally:
                session.close()
            run = writer.finish()
    if ranks.is_writer:
        print(f"Run saved to {_display_path(run.id)}")
    return run


@contextlib.contextmanager
def _in_training(model: Any) -> Iterator[None]:
    """Let others know that the net must keep its shape. Fits of one model may be nested."""
    before, model.in_training = getattr(model, "in_training", False), True
    try:
        yield
    finally:
        model.in_training = before


def _train(session: FitSession) -> None:
    try:
        _start(session)
        loop(session)
    except BaseException:
        session.note_compilation()
        session.clean_up()
        raise
    _end(session)


def _start(session: FitSession) -> None:
    """Seed, restore, let the callbacks begin, restore their state."""
    _begin(session)
    session.topology = state_topology(session.model.net)


def _begin(session: FitSession) -> None:
    plan = session.plan
    if plan.resume.point is None:
        if plan.params.seed is not None:
            set_seed(plan.ranks.seed(plan.params.seed))
        session.begin()
        plan.ranks.begin(session)
        return
    with resume.undone_on_error(session):
        if plan.params.seed is not None:
            set_seed(plan.ranks.seed(plan.params.seed))
        resume.restore_tensors(session)
        session.begin()
        if session.position is not None:  # its epoch has begun already
            session.epoch = session.position.epoch
            begin_epoch(session)
        plan.registry.restore(plan.resume.components)
        plan.ranks.begin(session)
        resume.restore_streams(session)
    plan.resume = plan.resume.without_tensors()


def _end(session: FitSession) -> None:
    """``on_train_end``, then LAST once more when a callback had a say."""
    hooked = session.plan.ranks.any(
        any(overrides(callback, "on_train_end") for callback in session.callbacks)
    )
    session.rng_at_end = rng.capture(session.loaders)
    before = _snapshot(session) if hooked else None
    session.end()
    if hooked and not session.discarded:
        commit.refresh_last(session, before=before)


def _snapshot(session: FitSession) -> commit.NetBefore | None:
    """The net before callbacks that declare a topology change convert it."""
    if any(overrides(callback, "checkpoint_transforms") for callback in session.callbacks):
        return commit.NetBefore.of(session)
    return None


def _display_path(run_id: str) -> str:
    """Where the run is, without an absolute prefix and with the same separators everywhere."""
    folder = runs_root(None)
    if os.path.isabs(folder):
        inside = os.path.relpath(folder)
        folder = os.path.basename(folder) if inside.startswith(os.pardir) else inside
    return f"{folder}/{run_id}".replace(os.sep, "/")
