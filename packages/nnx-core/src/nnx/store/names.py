"""Names in files of other forms, and those that are read today."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from nnx.params import NNConvParams
from nnx.store import original_streams

# A training state of the original NNx, by the names of NNCheckpoint.save.
ORIGINAL_STATE = {
    "optimizer": "optimizer_state",
    "scheduler": "scheduler_state",
    "scaler": "scaler_state",
    "rng": "rng_state",
    "model": "resume_net_state",
    "optimizers": "optimizers_state",
    "schedulers": "schedulers_state",
    "checkpoint_id": "generation",
}

_ORIGINAL_VERSION = 4
# In the order in which the original writes them.
_ORIGINAL_FIELDS = (
    "checkpoint_id", "optimizer", "optimizer_type", "optimizer_topology", "optimizer_factory",
    "scheduler", "scheduler_type", "scaler", "rng", "completed_epoch", "generation", "counters",
    "model", "components", "optimizers", "optimizer_types", "optimizer_topologies",
    "optimizer_factories", "schedulers", "scheduler_types", "precision", "compile", "distributed",
)  # fmt: skip


def is_original_state(value: Mapping[str, Any]) -> bool:
    return "nnx_training_state_version" in value or "optimizer" in value or "optimizers" in value


def from_original_state(value: Mapping[str, Any]) -> dict[str, Any]:
    """A training state of the original NNx under the names that are read here."""
    known = {
        k: v for k, v in value.items() if k not in ("nnx_training_state_version", "generation")
    }
    state = {ORIGINAL_STATE.get(key, key): v for key, v in known.items() if v is not None}
    streams = state.get("rng_state")
    if isinstance(streams, Mapping) and original_streams.is_original(streams):
        state["rng_state"] = original_streams.from_original(streams)
    return state


def to_original_state(
    state: Mapping[str, Any],
    *,
    checkpoint_id: str | None,
    generation: int | None,
    completed_epoch: int,
) -> dict[str, Any]:
    """A training state as the original NNx names it, with every field that it has.

    What only a point inside an epoch has is beside them.
    """
    known = {key: state.get(ORIGINAL_STATE.get(key, key)) for key in _ORIGINAL_FIELDS}
    extra = {key: state[key] for key in ("position",) if state.get(key) is not None}
    if known["rng"] is not None:
        known["rng"] = original_streams.to_original(known["rng"])
    return {
        "nnx_training_state_version": _ORIGINAL_VERSION,
        **known,
        "checkpoint_id": checkpoint_id or state.get("generation"),
        "completed_epoch": completed_epoch,
        "generation": generation,
        **extra,
    }


def with_original_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """A training state that scripts of the original NNx find their way in, too."""
    names = {theirs: state[ours] for theirs, ours in ORIGINAL_STATE.items() if ours in state}
    return {**state, **names}


def weights(net: Any, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A state dict of ``net`` (its params) under the names that its module has today."""
    if not _is_earlier(net, state):
        return state
    return OrderedDict((_fc(name), value) for name, value in state.items())


def training_state(net: Any, state: dict[str, Any]) -> dict[str, Any]:
    """The same for the parameter names in a training state."""
    if not isinstance(net, NNConvParams):
        return state
    changed = dict(state)
    if state.get("resume_net_state") is not None:
        changed["resume_net_state"] = weights(net, state["resume_net_state"])
    if state.get("optimizer_topology") is not None:
        changed["optimizer_topology"] = _topology(state["optimizer_topology"])
    if state.get("optimizer_topologies") is not None:
        several = state["optimizer_topologies"]
        changed["optimizer_topologies"] = {name: _topology(t) for name, t in several.items()}
    return changed


def _is_earlier(net: Any, state: Mapping[str, Any]) -> bool:
    # The dense layers of a convolutional net were `layers`; they are `fcs`.
    return isinstance(net, NNConvParams) and any(name.startswith("layers.") for name in state)


def _fc(name: str) -> str:
    return f"fcs.{name.removeprefix('layers.')}" if name.startswith("layers.") else name


def _topology(groups: Any) -> Any:
    return [[{**p, "name": _fc(p["name"])} for p in group] for group in groups]
