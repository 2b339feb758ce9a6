"""What a checkpoint holds of a fit: the model, and all that a resume needs beside it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from nnx.engine import rng
from nnx.engine.topology import optimizer_topology
from nnx.models import check_recorded
from nnx.params import NNParams
from nnx.records import NNIterationDataPoint
from nnx.store import NNCheckpoint

if TYPE_CHECKING:
    from nnx.engine.session import FitSession
    from nnx.models import Model


@dataclass(frozen=True, slots=True)
class Position:
    """Where a fit stood inside an epoch."""

    epoch: int
    consumed: int
    epoch_updates: int
    epoch_rng: Mapping[str, Any]
    fetch_rng: Mapping[str, Any] | None
    rng: Mapping[str, Any]
    loader_state: Any
    window: Mapping[str, Any] | None
    recorder: Mapping[str, Any]
    records: tuple[NNIterationDataPoint, ...]

    def state(self) -> dict[str, Any]:
        """As plain data and tensors; a training state has the random streams ``rng`` itself."""
        state = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "rng"}
        return {**state, "records": [record.state() for record in self.records]}

    @staticmethod
    def of(training_state: Mapping[str, Any], *, rebase: bool) -> Position | None:
        """That of a point inside an epoch; with ``rebase`` its batches are counted from 0."""
        saved = training_state.get("position")
        if saved is None:
            return None
        records = tuple(NNIterationDataPoint.from_state(r) for r in saved["records"])
        if rebase:
            records = tuple(replace(r, iter_idx=i) for i, r in enumerate(records))
        return Position(**{**saved, "records": records, "rng": training_state["rng_state"]})


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


def snapshot(model: Model) -> Callable[..., NNCheckpoint]:
    """``model`` as it is now, a checkpoint that only lacks its record ``idp``."""
    return partial(
        NNCheckpoint,
        net_params=current_net_params(model),
        net_state=copy.deepcopy(model.net.state_dict()),
        model_params=model.params,
        transforms=tuple(model.transforms),
    )


def current_net_params(model: Model) -> Any:
    """The parameters that rebuild the net: its own, which surgery keeps true."""
    own = getattr(model.net, "params", None)
    return own if model.params.builtin and isinstance(own, NNParams) else model.net_params


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
