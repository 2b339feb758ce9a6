"""Lion (Chen et al., 2023, "Symbolic Discovery of Optimization Algorithms", Algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

DEFAULT_BETAS = (0.9, 0.99)


class Lion(torch.optim.Optimizer):
    """Steps by the sign of an interpolated momentum, with decoupled weight decay.

    ``betas[0]`` weighs the momentum against the gradient in the step, ``betas[1]``
    in the momentum that is kept.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = DEFAULT_BETAS,
        weight_decay: float = 0.0,
    ) -> None:
        if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"Lion's betas must be two numbers in [0, 1), not {betas!r}")
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        momentum, (beta1, beta2) = state["exp_avg"], group["betas"]
        direction = torch.lerp(grad, momentum, beta1).sign_()
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
        momentum.lerp_(grad, 1 - beta2)


def build(param_groups: list[dict[str, Any]], config: Mapping[str, Any]) -> Lion:
    """The factory behind ``acme.lion`` version 1; ``config`` takes ``betas``."""
    unknown = set(config) - {"betas"}
    if unknown:
        raise ValueError(f"acme.lion takes 'betas', not {', '.join(map(repr, sorted(unknown)))}")
    return Lion(param_groups, betas=tuple(config.get("betas", DEFAULT_BETAS)))
