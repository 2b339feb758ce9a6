"""A checkpoint as plain data, and back: one layout for ``.pt`` and safetensors."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Protocol

from nnx.params import NNCheckpointTransform, NNModelParams, NNParams
from nnx.records import NNIterationDataPoint
from nnx.store import names
from nnx.store.errors import ResumePointError

FORMAT = "nnx.checkpoint"
VERSION = 1
STATE_FORMAT = "nnx.training-state"
STATE_VERSION = 1

# What a training-state sidecar may hold, by the keyword names of NNCheckpoint.save.
STATE_FIELDS = (
    "optimizer_state", "scheduler_state", "scaler_state", "rng_state", "completed_epoch",
    "resume_net_state", "optimizer_type", "scheduler_type", "optimizer_topology",
    "optimizer_factory", "components", "optimizers_state", "schedulers_state",
    "optimizer_types", "scheduler_types", "optimizer_topologies", "optimizer_factories",
    "precision", "compile", "distributed", "counters",
)  # fmt: skip
SHARDS = "shards"  # in a checkpoint file: the generation of the tensors it refers to
STEP_FIELDS = ("position",)  # only in a point inside an epoch


class Stored(Protocol):
    """What of an ``NNCheckpoint`` is written."""

    @property
    def net_params(self) -> NNParams | None: ...
    @property
    def net_state(self) -> Mapping[str, Any]: ...
    @property
    def model_params(self) -> NNModelParams: ...
    @property
    def idp(self) -> NNIterationDataPoint: ...
    @property
    def transforms(self) -> tuple[NNCheckpointTransform, ...]: ...
    @property
    def training_state_id(self) -> str | None: ...
    @property
    def training_state_present(self) -> bool | None: ...


def header(checkpoint: Stored) -> dict[str, Any]:
    """Everything of a checkpoint but its tensors."""
    net = checkpoint.net_params
    return {
        "net_params": None if net is None else net.state(),
        "model_params": checkpoint.model_params.state(),
        "idp": checkpoint.idp.state(),
        "transforms": [t.state() for t in checkpoint.transforms],
        "training_state_id": checkpoint.training_state_id,
        "training_state_present": checkpoint.training_state_present,
    }


def to_plain(checkpoint: Stored, checkpoint_id: str | None) -> dict[str, Any]:
    """The content of a ``.pt`` checkpoint file."""
    from nnx.store.data import as_data

    return {
        "format": FORMAT,
        "version": VERSION,
        "checkpoint_id": checkpoint_id,
        **as_data(header(checkpoint), "the checkpoint"),
        "net_metadata": net_metadata(checkpoint.net_state),
        "net_state": as_data(checkpoint.net_state, "net_state"),
    }


def is_checkpoint(value: Any) -> bool:
    return isinstance(value, dict) and value.get("format") == FORMAT


def fields_of(value: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The fields of a checkpoint; a version or layout it does not know is an error."""
    if value.get("version") != VERSION:
        raise ResumePointError(
            f"{path} is a checkpoint of version {value.get('version')!r}; "
            f"this NNx reads version {VERSION}"
        )
    try:
        net = value["net_params"]
        net_params = None if net is None else NNParams.resolve_from_state(net)
        weights = names.weights(net_params, value["net_state"])
        return {
            "net_params": net_params,
            "net_state": _with_metadata(weights, value.get("net_metadata")),
            "model_params": NNModelParams.from_state(value["model_params"]),
            "idp": NNIterationDataPoint.from_state(value["idp"]),
            "transforms": tuple(NNCheckpointTransform.from_state(t) for t in value["transforms"]),
            "training_state_id": value["training_state_id"],
            "training_state_present": value["training_state_present"],
        }
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ResumePointError(f"{path} is not a readable checkpoint ({reason})") from error


def to_safetensors(checkpoint: Stored) -> tuple[dict[str, Any], dict[str, str]]:
    """Tensors and string metadata; a state that is not all tensors is refused."""
    import torch

    tensors = {}
    for name, tensor in checkpoint.net_state.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"net_state[{name!r}] is a {type(tensor).__name__}; a safetensors checkpoint "
                f"holds only tensors. Save it with format='pickle'."
            )
        tensors[name] = tensor.detach().clone().contiguous().cpu()
    parts = {**header(checkpoint), "net_metadata": net_metadata(checkpoint.net_state)}
    order = list(checkpoint.net_state)  # safetensors orders tensors by its own rule
    metadata = {key: json.dumps(value) for key, value in {**parts, "order": order}.items()}
    return tensors, {"format": FORMAT, "version": str(VERSION), **metadata}


def from_safetensors(
    tensors: Mapping[str, Any], metadata: Mapping[str, str], path: str
) -> dict[str, Any]:
    """The fields of a checkpoint in a safetensors file."""
    try:
        if metadata.get("format") == FORMAT:
            parts = {k: json.loads(v) for k, v in metadata.items() if k not in _PLAIN}
            version = int(metadata["version"])
        else:
            parts, version = _of_the_original(metadata), VERSION
        order = parts.pop("order", None) or list(tensors)
        state = {name: tensors[name] for name in order}
        return fields_of({**parts, "version": version, "net_state": state}, path)
    except (KeyError, ValueError) as error:
        if isinstance(error, ResumePointError):
            raise
        raise ResumePointError(f"{path} has no readable NNx metadata ({error})") from error


_PLAIN = ("format", "version")
_PARTS = ("net_params", "model_params", "idp")  # each as JSON


def is_safetensors_checkpoint(metadata: Mapping[str, str]) -> bool:
    """Whether a safetensors file is a checkpoint: ours, or one of the original NNx."""
    return metadata.get("format") == FORMAT or metadata.keys() >= set(_PARTS)


def _of_the_original(metadata: Mapping[str, str]) -> dict[str, Any]:
    parts: dict[str, Any] = {key: json.loads(metadata[key]) for key in _PARTS}
    transforms = json.loads(metadata.get("transforms", "[]"))
    # Its training state lies under the fixed name beside it, if there is one.
    state = {"training_state_id": None, "training_state_present": None}
    return {**parts, **state, "transforms": transforms or []}


def net_metadata(net_state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Module versions that ``state_dict()`` attaches, which loading consults."""
    metadata = getattr(net_state, "_metadata", None)
    return None if metadata is None else {name: dict(entry) for name, entry in metadata.items()}


def _with_metadata(net_state: Mapping[str, Any], metadata: Any) -> OrderedDict[str, Any]:
    state = OrderedDict(net_state)
    if metadata is not None:
        state._metadata = OrderedDict(metadata)  # type: ignore[attr-defined]
    return state


def training_state(fields: Mapping[str, Any], generation: str) -> dict[str, Any]:
    """The content of a training-state sidecar: the given fields that are set."""
    from nnx.store.data import as_data

    unknown = sorted(set(fields) - set(STATE_FIELDS) - set(STEP_FIELDS))
    if unknown:
        raise TypeError(f"unknown training state: {', '.join(unknown)}")
    plain = {k: as_data(v, k) for k, v in fields.items() if v is not None}
    return {"format": STATE_FORMAT, "version": STATE_VERSION, "generation": generation, **plain}


def is_training_state(value: Any) -> bool:
    return isinstance(value, dict) and value.get("format") == STATE_FORMAT
