"""Which named parameters an optimizer owns, in which order and groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

Topology = list[list[dict[str, Any]]]


def optimizer_topology(net: nn.Module, optimizer: torch.optim.Optimizer) -> Topology:
    """Per parameter group, each parameter's name and shape, in the optimizer's order.

    A parameter that the net does not name is called ``"?"``; the shape of one that
    is not materialized yet is ``None``.
    """
    names = {id(p): name for name, p in net.named_parameters()}
    return [
        [{"name": names.get(id(p), "?"), "shape": _shape(p)} for p in group["params"]]
        for group in optimizer.param_groups
    ]


def _shape(parameter: torch.Tensor) -> list[int] | None:
    if isinstance(parameter, UninitializedParameter):
        return None
    return list(parameter.shape)


def describe_difference(saved: Any, built: Topology) -> str | None:
    """The first place where two topologies differ, in words; ``None`` when they agree."""
    if saved == built:
        return None
    if not isinstance(saved, list) or len(saved) != len(built):
        count = len(saved) if isinstance(saved, list) else "no"
        return f"{count} parameter groups saved, {len(built)} built"
    for index, (old, new) in enumerate(zip(saved, built)):
        for position, (a, b) in enumerate(zip(old, new)):
            if dict(a) != b and b["shape"] is None and a["name"] == b["name"]:
                return (
                    f"{b['name']} has no shape yet: run one batch through the module to "
                    "materialize its lazy layers before the resume"
                )
            if dict(a) != b:
                return (
                    f"group {index}, parameter {position}: saved {a['name']} {a['shape']}, "
                    f"built {b['name']} {b['shape']}"
                )
        if len(old) != len(new):
            return f"group {index}: {len(old)} parameters saved, {len(new)} built"
    return "the order of the groups differs"


def unowned_parameters(
    net: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]
) -> list[str]:
    """Names of parameters that require gradients and that no optimizer owns."""
    owned = {
        id(p)
        for optimizer in optimizers.values()
        for group in optimizer.param_groups
        for p in group["params"]
    }
    return [n for n, p in net.named_parameters() if p.requires_grad and id(p) not in owned]
