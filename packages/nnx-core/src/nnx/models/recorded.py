"""Whether a checkpoint of a model, as its net is now, could be rebuilt and loaded."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from nnx.enums import Nets
from nnx.models.model import Model
from nnx.models.topology import same_topology, state_topology, without_attached
from nnx.params import NNModelParams, NNParams, RuntimeModule
from nnx.plugins.manager import registry

__all__ = [
    "RuntimeModule",
    "check_exportable",
    "check_recorded",
    "check_topology",
    "check_wrapped_weights",
    "current_net_params",
    "describe_borrowed",
    "described_params",
]


def current_net_params(model: Model) -> Any:
    """The parameters that rebuild the net: its own, which surgery keeps true."""
    own = getattr(model.net, "params", None)
    return own if model.params.builtin and isinstance(own, NNParams) else model.net_params


def described_params(model: Model) -> NNModelParams:
    """``model.params``, with a borrowed module described as it is now.

    Its tensors may have changed since (adapters were put in). A run, its id and its
    checkpoints then name the module that loads them.
    """
    if isinstance(model.params.net, RuntimeModule) and not same_topology(
        model.recorded_topology, state_topology(model.net)
    ):
        return dataclasses.replace(model.params, net=RuntimeModule.of(model.net))
    return model.params


def describe_borrowed(model: Model) -> None:
    """Give a model its :func:`described_params`."""
    params = described_params(model)
    if params is not model.params:
        model.params, model.recorded_topology = params, state_topology(model.net)


def check_recorded(model: Model) -> None:
    """Refuse a net whose recorded transforms are not as they were recorded any more.

    A transform's replay may have ``changes(net, options)``, which yields
    ``(submodule, what)`` for each setting that a rebuild would not bring back.
    """
    found = []
    for transform in model.transforms:
        replay = registry("transform").resolve(transform.name, transform.version)
        changes = getattr(replay, "changes", None)
        if changes is not None:
            found += [f"{where!r}: {what}" for where, what in changes(model.net, transform.options)]
    if found:
        raise ValueError(
            "a checkpoint would rebuild another net than this one, which was changed after it was "
            f"recorded ({'; '.join(found)}). Set it back, or materialize a recipe with the new "
            "values on a fresh model"
        )


def check_topology(model: Model) -> None:
    """Refuse a model whose weights could not be loaded into what its run rebuilds.

    A borrowed module is never rebuilt, so it passes. A built-in net whose own
    ``params`` were kept true by surgery passes, and so does a submodule attached to
    the net under a name of its own, which a reload leaves out by
    ``exclude_submodules``.
    """
    descriptor, recorded = model.params.net, model.recorded_topology
    if isinstance(descriptor, RuntimeModule):
        return
    check_wrapped_weights(model)
    topology = without_attached(state_topology(model.net), recorded)
    if topology == recorded:
        check_recorded(model)
        return
    params = getattr(model.net, "params", None)
    if isinstance(descriptor, Nets) and isinstance(params, NNParams) and not model.transforms:
        with torch.device("meta"):
            if topology == state_topology(descriptor(params=params)):
                return
    changed = [
        name
        for name in {**recorded, **topology}
        if topology.get(name, "") != recorded.get(name, "")
    ]
    raise ValueError(
        f"the net's topology was changed without a record ({', '.join(changed[:5])}), so a "
        f"checkpoint of it could not be loaded again. Record the change with a "
        f"nnx.transforms.TransformRecipe, or train the net as NNModel(module=net, ...)"
    )


def check_wrapped_weights(model: Model) -> None:
    """Refuse pruning masks and parametrizations on a net that checkpoints must rebuild."""
    if isinstance(model.params.net, RuntimeModule):
        return
    for name, module in model.net.named_modules():
        where = f"{name or 'the net'} ({type(module).__name__})"
        for parameter in module._parameters.values():
            kind = type(parameter).__module__
            if kind.startswith(("torchao.", "torch.sparse.")):
                raise ValueError(
                    f"{where} holds a {type(parameter).__name__} weight (quantized or 2:4 sparse), "
                    f"which is for inference: train and save the model it was made from"
                )
        if parametrize.is_parametrized(module):
            problem, remove = "a parametrization", "parametrize.remove_parametrizations"
        else:
            hooks = module._forward_pre_hooks.values()
            found = [
                (what, how) for kind, what, how in _WRAPPERS for h in hooks if isinstance(h, kind)
            ]
            if not found:
                continue
            problem, remove = found[0]
        raise ValueError(
            f"{where} carries {problem}, which a checkpoint cannot rebuild. Remove it with "
            f"torch.nn.utils.{remove}, or train the net as NNModel(module=net, ...)"
        )


_WRAPPERS = (
    (prune.BasePruningMethod, "pruning masks", "prune.remove"),
    (WeightNorm, "weight_norm", "remove_weight_norm"),
    (SpectralNorm, "spectral_norm", "remove_spectral_norm"),
)


def check_exportable(module: nn.Module) -> None:
    """Refuse ONNX for a module that says ``exportable = False``, before anything is written."""
    if getattr(module, "exportable", True) is False:
        raise TypeError(
            f"{type(module).__name__} cannot be exported to ONNX; export_state_dict() keeps "
            "its weights"
        )
