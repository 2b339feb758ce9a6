"""The one training loop: epochs x batches, the same for every step owner and facade."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nnx.engine import commit, rng
from nnx.engine.batches import (
    EpochBatches,
    announce_epoch,
    loader_length,
    open_epoch,
)
from nnx.engine.checks import warn_unowned
from nnx.engine.clocks import UnreportedUpdates
from nnx.engine.progress import Progress
from nnx.engine.steps import RUNNERS, StepRunner
from nnx.engine.validation import validate

if TYPE_CHECKING:
    from nnx.engine.session import FitSession


def loop(session: FitSession) -> None:
    """Train from the session's start to its end, or until a callback stops it.

    The order at an epoch's end: validation, the decision (better or not), schedulers,
    ``on_epoch_end``, then the commit that makes the epoch durable.
    """
    step = RUNNERS[session.plan.owner.kind](session)
    reported = UnreportedUpdates(session.clocks, session.params.checkpoint_every)
    first, end = session.start.start_epoch, session.start.end_epoch
    progress = Progress(
        epochs=end - first,
        batches_per_epoch=loader_length(session.params.train_loader),
        done=session.resumed_batches,
    )
    progress.on = progress.on and session.ranks.is_writer
    try:
        for epoch in range(first, end):
            session.epoch = epoch
            progress.start_epoch(epoch - first + 1)
            if not _run_epoch(session, step, progress):
                session.discard_epoch()
                return
            reported.after_epoch(epoch, session.epoch_updates)
            _finish_epoch(session, progress)
            if session.ranks.stops_after_epoch(session.ctx):
                return
    finally:
        progress.close()


def begin_epoch(session: FitSession) -> None:
    """What happens before an epoch's first batch is read."""
    if session.plan.owner.step_fn is None:
        session.model.net.train()  # a custom step function owns the mode
    session.epoch_updates = 0
    announce_epoch(session.params.train_loader, session.epoch)
    session.hooks.dispatch("on_epoch_begin")
    if not session.warned_unowned:  # a callback may unfreeze what no optimizer was given
        session.warned_unowned = warn_unowned(session.model.net, session.optimizers)


def _run_epoch(session: FitSession, step: StepRunner, progress: Progress) -> bool:
    """Train on every batch of an epoch; ``False`` when it was stopped inside."""
    batches = _batches(session, step)
    row, run, optimizer = session.row, step.run, session.primary_optimizer
    stops_now = session.ranks.stops_now
    every = session.params.checkpoint_every
    show = progress.batch if progress.on else None
    index = session.resumed_batches - 1
    for index, batch, is_last in batches:
        lr = optimizer.param_groups[0]["lr"]
        if type(lr) is not float:
            lr = lr.clone() if hasattr(lr, "clone") else float(lr)  # a tensor will change in place
        loss = run(batch, index, is_last)
        row(lr, index)
        if show is not None:
            show(loss)
        if stops_now(session.ctx) and not is_last and not batches.exhausted():
            return False
        if every and session.updates_since_point >= every and not is_last:
            commit.check_weights(session)
            commit.step_point(session, step, consumed=index + 1)
    if index < 0:
        raise ValueError(
            f"train_loader yielded no batches in epoch {session.epoch}; give it data that can "
            "be iterated once per epoch"
        )
    if step.close(index):
        session.rows.amend_update_count(session.update_count)
    session.resumed_batches = 0
    session.ranks.after_epoch(session.model.net, session.plan.owner, session.engine.updates)
    commit.check_weights(session)
    return True


def _batches(session: FitSession, step: StepRunner) -> EpochBatches:
    """The epoch's batches, from the start or from where a resumed epoch stood."""
    plan, loader = session.plan, session.params.train_loader
    point = session.take_position()
    if point is None:
        begin_epoch(session)
        step.begin_epoch()
        if plan.params.checkpoint_every:
            session.epoch_rng = rng.capture(session.loaders)
        source = open_epoch(loader)
    else:  # begin_epoch has run, before the components were restored
        step.resume_epoch(point.window)
        session.epoch_rng = point.epoch_rng
        rng.restore(point.epoch_rng, session.loaders)
        source = open_epoch(loader, skip=point.consumed, state=point.loader_state)
        if point.fetch_rng is not None:
            rng.restore(point.fetch_rng, session.loaders)
    batches = EpochBatches(
        source,
        length=loader_length(loader),
        start=session.resumed_batches,
        look_ahead=plan.looks_ahead,
        before_fetch=session.note_fetch if plan.params.checkpoint_every else None,
    )
    if point is not None:  # a batch that had been fetched in advance has been fetched again
        rng.restore(point.rng, session.loaders)
    return batches


def _finish_epoch(session: FitSession, progress: Progress) -> None:
    plan = session.plan
    session.rows.flush()
    last = session.writer.idps[-1].with_val_edp(validate(session))
    summary = session.epoch_summary()
    decision, last = session.judge.judge(last, summary if plan.declares_summary else None)
    session.writer.replace_last(last)
    for clock in session.clocks.values():
        clock.after_epoch(decision.plateau)
    ctx = session.ctx
    ctx.idp = last
    if summary is not last.train_summary:  # a callback's own monitor reads what is not recorded
        ctx.idp = last.with_epoch_summary(summary, None)
    progress.note(**commit.headline(last))
    session.hooks.dispatch("on_epoch_end")
    commit.epoch(session, last, improved=decision.improved)
