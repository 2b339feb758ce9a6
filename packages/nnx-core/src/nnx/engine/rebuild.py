"""A model from a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nnx.engine.unbuilt import load_weights, uninitialized
from nnx.models import (
    MissingModelFactoryError,
    check_state_topology,
    state_topology,
)
from nnx.params import RuntimeModule
from nnx.plugins import manager
from nnx.seeding import isolated_rng

if TYPE_CHECKING:
    from nnx.models import Model
    from nnx.store import NNCheckpoint


def rebuild(
    cls: type,
    checkpoint: NNCheckpoint,
    *,
    device: Any,
    module: Any,
    batch_adapter: Any,
    precision: Any,
    exclude: Sequence[str],
    model_kwargs: Mapping[str, Any],
) -> Any:
    """Build, replay the recorded transforms, compare with the weights, load them."""
    if checkpoint is None:
        raise ValueError(
            "from_checkpoint got None: the run has no such checkpoint (NNCheckpoint.load and "
            "from_file return None for one that does not exist)"
        )
    params = checkpoint.model_params
    if device is not None:
        params = dataclasses.replace(params, device=device)
    if precision is not None:
        params = dataclasses.replace(params, precision=precision, mixed_precision=False)
    weights = _without(checkpoint.net_state, exclude)
    kwargs = {**model_kwargs, **_source(checkpoint, params.net, module, weights)}
    if batch_adapter is not None:
        kwargs["batch_adapter"] = batch_adapter
    loads_all = params.net if not checkpoint.transforms else None
    with isolated_rng():
        with uninitialized(loads_all):  # every weight is loaded below, or this fails
            model = cls(params=params, **kwargs)
        for transform in checkpoint.transforms:
            replay = manager.registry("transform").resolve(transform.name, transform.version)
            model.net = replay(model.net, transform.options).to(model.device)
    if checkpoint.transforms:
        model.transforms = checkpoint.transforms
        model.recorded_topology = state_topology(model.net)
    if module is None:
        _check_weights(model, weights, params)
    load_weights(model.net, weights)
    return model


def _source(
    checkpoint: NNCheckpoint, net: Any, module: Any, weights: Mapping[str, Any]
) -> dict[str, Any]:
    """What the net is made from: the caller's ``module`` or the stored parameters."""
    if isinstance(net, RuntimeModule):
        _check_runtime(checkpoint, net, module)
        check_state_topology(module, weights, what="module=")
        return {"module": module}
    if module is not None:
        raise ValueError(
            "module= is for a checkpoint of NNModel(module=...); this one builds its own"
        )
    return {"net_params": checkpoint.net_params}


def _without(net_state: Mapping[str, Any], exclude: Sequence[str]) -> dict[str, Any]:
    names = {key.split(".", 1)[0] for key in net_state}
    unknown = [name for name in exclude if name not in names]
    if unknown:
        raise ValueError(
            f"exclude_submodules names {', '.join(map(repr, unknown))}, which the checkpoint "
            f"does not hold (it has {', '.join(sorted(names))})"
        )
    return {k: v for k, v in net_state.items() if k.split(".", 1)[0] not in set(exclude)}


def _check_runtime(checkpoint: NNCheckpoint, descriptor: RuntimeModule, module: Any) -> None:
    if module is None:
        raise MissingModelFactoryError(
            f"this checkpoint holds a runtime-only module ({descriptor.module}), which no factory "
            "can rebuild; pass a fresh instance as module="
        )
    if checkpoint.transforms:
        names = ", ".join(transform.name for transform in checkpoint.transforms)
        raise ValueError(
            f"this checkpoint of a runtime-only module ({descriptor.module}) records {names}, which "
            "is replayed on a net that a factory builds, not on a caller's instance. Load an "
            "earlier checkpoint of the run, or register a factory and train from a ModelSpec"
        )
    if not descriptor.describes(module):
        raise ValueError(
            f"module= has another topology than the checkpoint's {descriptor.module}; build it "
            "with the same layers, adapters and hyperparameters"
        )


def _check_weights(model: Model, weights: Mapping[str, Any], params: Any) -> None:
    built = {key.split(".", 1)[0] for key in model.net.state_dict()}
    extra = sorted({key.split(".", 1)[0] for key in weights} - built)
    if extra:
        shown = ", ".join(map(repr, extra))
        raise ValueError(
            f"the checkpoint holds submodules that {params.net} does not build: {shown}; leave "
            f"them out with exclude_submodules=({shown},)"
        )
    if not model.transforms and any(
        key.endswith(".scales") and f"{key.removesuffix('scales')}zeros" in weights
        for key in weights
    ):
        raise ValueError(
            "the checkpoint holds weights that quantization-aware training converted, without the "
            "record that rebuilds them. Train again with nnx.quantize.QATLifecycleCallback, whose "
            "checkpoints carry it, or load an earlier checkpoint of that run (best, first, ...)"
        )
    if params.builtin:
        return  # load_state_dict names what differs
    check_state_topology(model.net, weights, what=f"the module of {params.net.id}")
