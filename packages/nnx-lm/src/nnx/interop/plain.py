"""What can leave: a transformer whose weights are its own, with nothing added around them."""

from __future__ import annotations

from typing import Any

import torch
from nnx.lm.layers import RMSNorm
from nnx.lm.transformer import TransformerNN
from torch import nn

_PLAIN = (nn.Linear, nn.Embedding, RMSNorm)


def plain_transformer(model: Any, what: str) -> TransformerNN:
    """The ``TransformerNN`` of a model (or the net itself), ready to be written as it is.

    Raises ``TypeError`` for another network, and ``ValueError`` that names the module for one
    whose weights are adapted, pruned by a mask, quantized or prefixed.
    """
    net = getattr(model, "net", model)
    if type(net) is not TransformerNN:
        raise TypeError(
            f"{what} writes a TransformerNN, not {type(net).__name__}"
            + ("; merge its adapters first" if _transformer_in(net) else "")
        )
    for name, module in net.named_modules():
        if getattr(module, "kv_prefix", None) is not None:
            raise ValueError(
                f"{what}: {name} attends to a learned prefix, which the format cannot hold; "
                "remove the prefix tuner first"
            )
        own = isinstance(module, _PLAIN)
        if own and (type(module) not in _PLAIN or hasattr(module, "parametrizations")):
            raise ValueError(
                f"{what}: {name} is a {type(module).__name__} with a weight that is computed; "
                "bake it in first (merge adapters, remove parametrizations)"
            )
        if not own and next(module.parameters(recurse=False), None) is not None:
            raise ValueError(
                f"{what}: {name} is a {type(module).__name__}, which the format has no place for; "
                "merge adapters for good first: merge_adapters(net, unload=True)"
            )
    for name, value in net.state_dict().items():
        if not torch.is_floating_point(value) or type(value) is not torch.Tensor:
            raise ValueError(
                f"{what}: {name} is {value.dtype}, no plain floating-point weight; export the "
                "model before it is quantized"
            )
    return net


def _transformer_in(net: Any) -> bool:
    return isinstance(net, nn.Module) and any(isinstance(m, TransformerNN) for m in net.modules())
