"""The names and shapes that a module saves, compared with those that were saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from nnx.utils.topology import module_topology, tensor_shape

__all__ = [
    "check_state_topology",
    "module_topology",
    "same_topology",
    "state_topology",
    "without_attached",
]


def state_topology(module: nn.Module) -> dict[str, tuple[int, ...] | None]:
    """Names and shapes of all that ``module`` saves; ``None`` where a lazy layer waits."""
    return _shapes(module.state_dict())


def check_state_topology(
    module: nn.Module, state: Mapping[str, Any], *, what: str = "the module"
) -> None:
    """Compare ``module`` with saved weights by names and shapes; load nothing.

    Raises ``ValueError`` that names what is missing, unexpected or shaped
    otherwise. An uninitialized lazy tensor fits any shape.
    """
    built, saved = state_topology(module), _shapes(state)
    problems = [f"{name} is not in the checkpoint" for name in built if name not in saved]
    problems += [f"{name} is only in the checkpoint" for name in saved if name not in built]
    problems += [
        f"{name} is {shape} but {saved[name]} in the checkpoint"
        for name, shape in built.items()
        if name in saved and None not in (shape, saved[name]) and shape != saved[name]
    ]
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" * (len(problems) > 5))
        raise ValueError(f"{what} has another topology than the saved weights: {shown}")


def same_topology(
    before: Mapping[str, Any], now: Mapping[str, Any], *, attached: bool = False
) -> bool:
    """Whether two :func:`state_topology` agree; a lazy tensor agrees with any shape.

    With ``attached``, submodules that ``now`` has under names of their own are left out.
    """
    now = without_attached(now, before) if attached else now
    return before.keys() == now.keys() and all(
        None in (shape, now[name]) or shape == now[name] for name, shape in before.items()
    )


def without_attached(topology: Mapping[str, Any], recorded: Mapping[str, Any]) -> Mapping[str, Any]:
    """``topology`` without named top-level submodules that the recorded net did not have."""
    known = {name.partition(".")[0] for name in recorded}
    return {
        name: shape
        for name, shape in topology.items()
        if (top := name.partition("."))[0] in known or not top[1] or top[0].isdigit()
    }


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...] | None]:
    return {
        name: tensor_shape(value)
        for name, value in state.items()
        if isinstance(value, torch.Tensor)  # extra state may be anything
    }
