"""From a request to a trained run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from nnx.engine import commit, rng
from nnx.engine.compiled import compiling
from nnx.engine.existing import load, settle
from nnx.engine.loop import begin_epoch, loop
from nnx.engine.ranks import join
from nnx.engine.resume import restore
from nnx.engine.resume.check import begin_from
from nnx.engine.session import FitSession
from nnx.engine.training_state import NetBefore
from nnx.models import state_topology
from nnx.seeding import set_seed

if TYPE_CHECKING:
    from nnx.engine.request import FitRequest
    from nnx.models import Model
    from nnx.store import NNRun


def fit(request: FitRequest) -> NNRun:
    """Check, reserve, train, commit; the finished run.

    A request that cannot be trained raises before anything is changed. A fit that
    fails later keeps its committed epochs. A run that is there already, and is only to be
    loaded, is returned as it is, with its last weights in the model.
    """
    ranks = join(request)
    with ranks.guarded():
        plan, overwrite, found = settle(request, ranks)
        if found:
            run = load(plan)
            if ranks.is_writer:
                print(f"Run loaded from {run.display_path()}")
            return run
        session = FitSession(plan, ranks)
        session.begin_at(begin_from(session, session.found))
        with ranks.open_writer(
            plan.run,
            history=request.history,
            overwrite=overwrite,
            provenance=request.provenance,
            parent=session.start.point,
            best=session.start.best,
        ) as writer:
            session.open(writer)
            try:
                with compiling(plan.model, session.compiled), _in_training(plan.model):
                    _train(session)
            finally:
                session.close()
            run = writer.finish()
    if ranks.is_writer:
        print(f"Run saved to {run.display_path()}")
    return run


@contextlib.contextmanager
def _in_training(model: Model) -> Iterator[None]:
    """Let others know that the net must keep its shape. Fits of one model may be nested."""
    before, model.in_training = model.in_training, True
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
        session.hooks.clean_up()
        raise
    _end(session)


def _start(session: FitSession) -> None:
    """Seed, restore, let the callbacks begin, restore their state."""
    plan, model = session.plan, session.model
    if model.params is not plan.model_params:  # a borrowed module that is described anew
        model.params, model.recorded_topology = plan.model_params, state_topology(model.net)
    if session.start.point is None:
        _seed(session)
        session.hooks.begin()
        session.ranks.begin(plan.run.id, model.net, session.ctx)
    else:
        with restore.undone_on_error(session):
            _resume(session)
        session.start = session.start.without_tensors()
    session.topology = state_topology(model.net)


def _resume(session: FitSession) -> None:
    _seed(session)
    restore.restore_tensors(session)
    session.hooks.begin()
    if session.position is not None:  # its epoch has begun already
        session.epoch = session.position.epoch
        begin_epoch(session)
    session.registry.restore(session.start.components)
    session.ranks.begin(session.plan.run.id, session.model.net, session.ctx)
    restore.restore_streams(session)


def _seed(session: FitSession) -> None:
    if session.params.seed is not None:
        set_seed(session.ranks.seed(session.params.seed))


def _end(session: FitSession) -> None:
    """``on_train_end``, then LAST once more when a callback had a say."""
    hooked = session.ranks.any(session.hooks.any_override("on_train_end"))
    session.rng_at_end = rng.capture(session.loaders)
    before = None
    if hooked and session.hooks.any_override("checkpoint_transforms"):
        before = NetBefore.of(session)
    session.hooks.end()
    if hooked and not session.discarded:
        commit.refresh_last(session, before=before)
