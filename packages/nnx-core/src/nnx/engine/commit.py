"""Making progress durable: an epoch's commit, a point inside an epoch, the last refresh."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from nnx.engine import rng
from nnx.engine.batches import is_stateful, loader_length
from nnx.engine.topology import optimizer_topology
from nnx.enums import Checkpoints
from nnx.models import check_recorded, same_topology, state_topology
from nnx.params import NNParams
from nnx.store import NNCheckpoint

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


def step_point(session: FitSession, step: StepRunner, *, consumed: int) -> None:
    """Write a resume point inside the epoch, after ``consumed`` of its batches."""
    check_topology_kept(session)
    session.flush()
    partial = session.partial_records()
    state = training_state(session, completed_epoch=session.epoch - 1)
    loader = session.params.train_loader
    state["position"] = {
        "epoch": session.epoch,
        "consumed": consumed,
        "epoch_updates": session.epoch_updates,
        "epoch_rng": session.epoch_rng,
        "fetch_rng": session.fetch_rng,
        "loader_state": loader.state_dict() if _keeps_position(session) else None,
        "window": step.window_state(),
        "recorder": session.recorder.state(),
        "records": [record.state() for record in partial],
    }
    session.writer.commit_step(make_checkpoint(session, partial[-1]), state)
    session.updates_at_point = session.committed_updates


class NetBefore(NamedTuple):
    """The net before a conversion: its weights, and each optimizer's parameters."""

    weights: dict[str, Any]
    owned: dict[str, Any]

    @staticmethod
    def of(session: FitSession) -> NetBefore:
        net = session.model.net
        return NetBefore(
            weights=copy.deepcopy(net.state_dict()),
            owned={name: optimizer_topology(net, o) for name, o in session.optimizers.items()},
        )


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
        for callback in session.callbacks
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
        if session.trainer is None:
            state["optimizer_topology"] = before.owned[session.primary]
        else:
            state["optimizer_topologies"] = before.owned
    session.writer.refresh_last(checkpoint, state)


def make_checkpoint(
    session: FitSession, idp: NNIterationDataPoint, *, extra: tuple[Any, ...] = ()
) -> NNCheckpoint:
    """The model as it is now, with the record ``idp``."""
    model = session.model
    check_recorded(model)
    return NNCheckpoint(
        net_params=current_net_params(model),
        net_state=model.net.state_dict(),
        model_params=model.params,
        idp=idp,
        transforms=(*model.transforms, *extra),
    )


def snapshot(session: FitSession) -> Callable[..., NNCheckpoint]:
    """The model as it is now, a checkpoint that only lacks its record ``idp``."""
    model = session.model
    return partial(
        NNCheckpoint,
        net_params=current_net_params(model),
        net_state=copy.deepcopy(model.net.state_dict()),
        model_params=model.params,
        transforms=tuple(model.transforms),
    )


def current_net_params(model: Any) -> Any:
    """The parameters that rebuild the net: its own, which surgery keeps true."""
    own = getattr(model.net, "params", None)
    return own if model.params.builtin and isinstance(own, NNParams) else model.net_params


def training_state(session: FitSession, *, completed_epoch: int) -> dict[str, Any]:
    """Everything a resume needs besides the weights, as plain data and tensors."""
    plan = session.plan
    state: dict[str, Any] = {
        "completed_epoch": completed_epoch,
        "rng_state": rng.capture(session.loaders),
        "scaler_state": None if plan.scaler is None else plan.scaler.state_dict(),
        "precision": session.precision.record(),
        "components": plan.registry.collect(),
        "counters": {
            "global_step": session.global_step,
            "committed_updates": session.committed_updates,
            "planned_n_epochs": plan.end_epoch,
        },
    }
    if plan.compiled is not None:
        state["compile"] = plan.compiled.record.record()
    net = session.model.net
    described = {
        name: _describe(net, optimizer, plan.optim_params[name], session.clocks[name].scheduler)
        for name, optimizer in session.optimizers.items()
    }
    if session.trainer is None:
        state.update(described[session.primary])
        return plan.ranks.complete(state)
    for key, plural in PLURALS.items():
        state[plural] = {name: one[key] for name, one in described.items()}
    return plan.ranks.complete(state)


PLURALS = {
    "optimizer_state": "optimizers_state",
    "optimizer_type": "optimizer_types",
    "optimizer_topology": "optimizer_topologies",
    "optimizer_factory": "optimizer_factories",
    "scheduler_state": "schedulers_state",
    "scheduler_type": "scheduler_types",
}


def _describe(net: Any, optimizer: Any, params: Any, scheduler: Any) -> dict[str, Any]:
    return {
        "optimizer_state": optimizer.state_dict(),
        "optimizer_type": type_name(optimizer),
        "optimizer_topology": optimizer_topology(net, optimizer),
        "optimizer_factory": factory_state(params),
        "scheduler_state": scheduler_state(scheduler),
        "scheduler_type": type_name(scheduler),
    }


def scheduler_state(scheduler: Any) -> dict[str, Any]:
    """A scheduler's state without the functions that its constructor set."""
    return {k: v for k, v in scheduler.state_dict().items() if not callable(v)}


def type_name(value: Any) -> str:
    """``package.Class`` of a value."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def factory_state(optim_params: Any) -> dict[str, Any] | None:
    """The identity of a registered optimizer factory; ``None`` for torch's own optimizers."""
    factory = getattr(optim_params, "factory", None)
    return None if factory is None else factory.state()


def phases(session: FitSession) -> tuple[Checkpoints, ...]:
    """The phase checkpoints that fall on this epoch: FIRST, or one of the quartiles."""
    plan = session.plan
    if not plan.params.save_phase_checkpoints:
        return ()
    done = session.epoch - plan.cadence_start + 1
    total = plan.params.n_epochs
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
