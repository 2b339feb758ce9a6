"""Making progress durable: an epoch's commit, a point inside an epoch, the last refresh."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.parameter import is_lazy

from nnx.engine.batches import is_stateful, loader_length
from nnx.engine.gradients import nonfinite_names
from nnx.engine.resume.point import Position
from nnx.engine.training_state import NetBefore, make_checkpoint, training_state
from nnx.enums import Checkpoints
from nnx.models import same_topology, state_topology

if TYPE_CHECKING:
    from nnx.engine.session import FitSession
    from nnx.engine.steps import StepRunner
    from nnx.records import NNIterationDataPoint


def epoch(session: FitSession, last: NNIterationDataPoint, *, improved: bool) -> None:
    """Commit the epoch in progress; ``last`` is its final record.

    history -> LAST -> phase and BEST -> the checkpoints that callbacks asked for.
    """
    session.note_compilation()
    check_topology_kept(session)
    checkpoint = make_checkpoint(session, last)
    deferred = {tag: make(idp=last) for tag, make in session.ctx.take_deferred().items()}
    session.writer.commit_epoch(
        checkpoint,
        training_state(session, completed_epoch=session.epoch),
        phases=phases(session),
        best=improved,
        deferred=deferred,
    )
    session.updates_at_point = session.committed_updates
    session.committed = last


def check_topology_kept(session: FitSession) -> None:
    """Refuse to write a net that took another shape in training: nothing could load it.

    What a recorded transform changed before training is part of what is compared
    with; a submodule attached under a name of its own is left out by a reload.
    """
    before, now = session.topology, state_topology(session.model.net)
    if same_topology(before, now, attached=True):
        return
    changed = [n for n in {**before, **now} if before.get(n, "") != now.get(n, "")]
    raise ValueError(
        f"the net's topology was changed while it trained ({', '.join(changed[:5])}), and no "
        "transform declares it, so a checkpoint of it could not be loaded again. Nothing was "
        "written: LAST is what it was. Change the net before training, record the change with a "
        "nnx.transforms.TransformRecipe, or declare it in the callback's checkpoint_transforms"
    )


def check_weights(session: FitSession) -> None:
    """Refuse to commit trained weights that are NaN or infinite, whoever took the step."""
    named = session.model.net.named_parameters()
    trained = {n: p for n, p in named if p.requires_grad and not is_lazy(p)}
    names = nonfinite_names(trained)
    if not session.ranks.any(bool(names)):
        return
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" * (len(names) > 3))
    committed = session.committed
    raise FloatingPointError(
        f"training made {shown or 'the weights of another process'} NaN or infinite in epoch "
        f"{session.epoch}, which was not committed; "
        + (
            "there is no earlier epoch"
            if committed is None
            else f"LAST is epoch {committed.epoch_idx}"
        )
        + ". Lower the learning rate or clip gradients; a step function of your own must look at "
        "the loss and the gradients before it steps"
    )


def step_point(session: FitSession, step: StepRunner, *, consumed: int) -> None:
    """Write a resume point inside the epoch, after ``consumed`` of its batches."""
    check_topology_kept(session)
    partial = session.rows.of_epoch()
    state = training_state(session, completed_epoch=session.epoch - 1)
    loader = session.params.train_loader
    position = Position(
        epoch=session.epoch,
        consumed=consumed,
        epoch_updates=session.epoch_updates,
        epoch_rng=session.epoch_rng,
        fetch_rng=session.fetch_rng,
        rng=state["rng_state"],
        loader_state=loader.state_dict() if _keeps_position(session) else None,
        window=step.window_state(),
        recorder=session.recorder.state(),
        records=tuple(partial),
    )
    state["position"] = position.state()
    session.writer.commit_step(make_checkpoint(session, partial[-1]), state)
    session.updates_at_point = session.committed_updates


def _keeps_position(session: FitSession) -> bool:
    """Whether the loader's own position is where training stands.

    It is one batch further where a step had to know the epoch's last batch in advance.
    """
    loader = session.params.train_loader
    ahead = session.plan.looks_ahead and loader_length(loader) is None
    return is_stateful(loader) and not ahead


def refresh_last(session: FitSession, *, before: NetBefore | None) -> None:
    """Write LAST again after ``on_train_end``, with what the callbacks made of the net.

    ``before`` is the net from before the hooks: what a resume continues from when
    they declare a transform. The random streams stay those
    of the epoch's end, where an uninterrupted run would have gone on.
    """
    if session.committed is None:
        return
    session.note_compilation()
    converted = tuple(
        transform
        for callback in session.hooks.callbacks
        for transform in callback.checkpoint_transforms()
    )
    if not converted:
        check_topology_kept(session)
        before = None
    checkpoint = make_checkpoint(session, session.committed, extra=converted)
    state = training_state(session, completed_epoch=session.epoch)
    state["rng_state"] = session.rng_at_end
    if before is not None:
        state["resume_net_state"] = before.weights
        owned = {name: {"optimizer_topology": own} for name, own in before.owned.items()}
        state.update(session.naming.pack(owned))
    session.writer.refresh_last(checkpoint, state)


def phases(session: FitSession) -> tuple[Checkpoints, ...]:
    """The phase checkpoints that fall on this epoch: FIRST, or one of the quartiles."""
    if not session.params.save_phase_checkpoints:
        return ()
    done = session.epoch - session.start.cadence_start + 1
    total = session.params.n_epochs
    if done == 1:
        return (Checkpoints.FIRST,)
    quartiles = (Checkpoints.Q1, Checkpoints.Q2, Checkpoints.Q3)
    return tuple(tag for k, tag in enumerate(quartiles, 1) if done == k * total // 4)


def headline(last: NNIterationDataPoint) -> dict[str, float | None]:
    """What the progress bar shows of a finished epoch."""
    if last.selection is not None:
        return {last.selection.monitor.key: last.selection.value}
    if last.val_edp is not None:
        return {"val_loss": last.val_edp.loss, "val_error": last.val_edp.error}
    return {}
