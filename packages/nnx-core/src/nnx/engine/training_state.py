"""What a checkpoint holds of a fit: the model, and all that a resume needs beside it."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple

from nnx.engine import rng
from nnx.engine.topology import optimizer_topology
from nnx.models import check_recorded, current_net_params
from nnx.records import NNIterationDataPoint
from nnx.store import NNCheckpoint

if TYPE_CHECKING:
    from nnx.engine.session import FitSession


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


def training_state(session: FitSession, *, completed_epoch: int) -> dict[str, Any]:
    """Everything a resume needs besides the weights, as plain data and tensors."""
    state: dict[str, Any] = {
        "completed_epoch": completed_epoch,
        "rng_state": rng.capture(session.loaders),
        "scaler_state": None if session.scaler is None else session.scaler.state_dict(),
        "precision": session.precision.record(),
        "components": session.registry.collect(),
        "counters": {
            "global_step": session.global_step,
            "committed_updates": session.committed_updates,
            "planned_n_epochs": session.start.end_epoch,
        },
    }
    if session.compiled is not None:
        state["compile"] = session.compiled.record.record()
    net, optims = session.model.net, session.plan.optims
    each = {
        name: _describe(net, optimizer, optims[name], session.schedulers[name])
        for name, optimizer in session.optimizers.items()
    }
    return session.ranks.complete({**state, **session.naming.pack(each)})


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
