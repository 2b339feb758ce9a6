"""A slow copy of the net that says what the net should see."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from nnx.components import ComponentSpec
from nnx.objectives import Objective, UpdateEvent
from nnx.utils import validation as check
from nnx.utils.modes import eval_mode
from torch import nn

if TYPE_CHECKING:
    from nnx.models import Model


def build_target_encoder(source: nn.Module) -> nn.Module:
    """A frozen copy of ``source`` in eval mode, for :func:`update_ema` to move."""
    target = copy.deepcopy(source)
    target.requires_grad_(False)
    return target.eval()


@torch.no_grad()
def update_ema(source: nn.Module, target: nn.Module, momentum: float) -> None:
    """``target ← momentum · target + (1 − momentum) · source``, in place.

    Parameters are paired by name; buffers (batch statistics) are copied. Raises
    ``ValueError`` for ``momentum`` outside [0, 1) and ``KeyError`` for a parameter of
    ``target`` that ``source`` lacks, before anything is moved.
    """
    momentum = check.real("update_ema", "momentum", momentum, at_least=0, below=1)
    theirs = dict(source.named_parameters())
    pairs = []
    for name, parameter in target.named_parameters():
        if name not in theirs:
            raise KeyError(f"update_ema: the source has no parameter {name!r}")
        pairs.append((parameter, theirs[name]))
    for parameter, other in pairs:
        parameter.lerp_(other.to(parameter), 1.0 - momentum)
    buffers = dict(source.named_buffers())
    for name, buffer in target.named_buffers():
        if name in buffers:
            buffer.copy_(buffers[name])


class TargetObjective(Objective):
    """An objective with a target that follows the net, once per committed update.

    The target, its counter and what :meth:`spec` says are component state. ``predictor``,
    where there is one, is a submodule of the net.
    """

    component_name: str
    owner: str

    def __init__(
        self,
        target_encoder: nn.Module,
        predictor: nn.Module | None = None,
        *,
        ema_momentum: float,
        nonfinite: str = "fail",
    ) -> None:
        super().__init__(nonfinite=nonfinite)
        self.ema_momentum = momentum_of(self.owner, ema_momentum)
        freeze(target_encoder)
        self.target_encoder, self.predictor = target_encoder, predictor
        self.updates = 0
        self.net: nn.Module | None = None
        self._predictor_name: str | None = None

    def spec(self) -> dict[str, Any]:
        """What a resume must agree with."""
        named = {} if self.predictor is None else {"predictor": self._predictor_name}
        return {"ema_momentum": self.ema_momentum, **named}

    def wanted(self, view: torch.Tensor) -> torch.Tensor:
        """What the target makes of ``view``, without gradients, in eval mode."""
        with torch.no_grad(), eval_mode(self.target_encoder):
            output: torch.Tensor = self.target_encoder(view)
        return output

    def check_run(
        self,
        model: Model,
        *,
        optimizers: Mapping[str, torch.optim.Optimizer],
        callbacks: Sequence[Any],
    ) -> None:
        """Refuse a predictor that would not train and a target that cannot follow."""
        if self.predictor is not None:
            self._predictor_name = self._found(self.predictor, model.net, optimizers)
        held = {id(p) for p in self.target_encoder.parameters()}
        if any(id(p) in held for p in model.net.parameters()):
            raise ValueError(
                f"{self.owner}: the target encoder shares parameters with model.net; make it with "
                "build_target_encoder(model.net)"
            )
        missing = {n for n, _ in self.target_encoder.named_parameters()} - {
            n for n, _ in model.net.named_parameters()
        }
        if missing:
            raise ValueError(
                f"{self.owner}: model.net has no parameter {sorted(missing)[0]!r} of the target "
                "encoder; make it with build_target_encoder(model.net)"
            )
        self.net = model.net

    def _found(
        self,
        predictor: nn.Module,
        net: nn.Module,
        optimizers: Mapping[str, torch.optim.Optimizer],
    ) -> str:
        names = [n for n, m in net.named_modules() if m is predictor]
        if not names:
            raise ValueError(
                f"{self.owner}: the predictor is no part of model.net, so neither the optimizer "
                "nor a checkpoint would have it. Attach it first: model.net._predictor = predictor"
            )
        owned = {id(p) for o in optimizers.values() for g in o.param_groups for p in g["params"]}
        if any(p.requires_grad and id(p) not in owned for p in predictor.parameters()):
            raise ValueError(f"{self.owner}: no optimizer owns the predictor's parameters")
        return names[0]

    def after_update(self, events: tuple[UpdateEvent, ...]) -> None:
        """Move the target: once per committed update, whatever the number of optimizers."""
        assert self.net is not None
        update_ema(self.net, self.target_encoder, self.ema_momentum)
        self.updates += 1

    def component_spec(self) -> ComponentSpec:
        return ComponentSpec(self.component_name, version=1)

    def component_state(self) -> dict[str, Any]:
        target = state_of(self.target_encoder)
        return {"spec": self.spec(), "target": target, "updates": self.updates}

    def check_component_state(self, state: Mapping[str, Any], *, version: int) -> list[str]:
        """Another momentum or predictor, or a target that does not fit."""
        saved = state.get("spec")
        saved = saved if isinstance(saved, Mapping) else {}
        problems = [
            f"{name} is {value!r}, but the checkpoint was trained with {saved.get(name)!r}"
            for name, value in self.spec().items()
            if saved.get(name) != value
        ]
        return [*problems, *target_problems(self.target_encoder, state.get("target"))]

    def load_component_state(self, state: Mapping[str, Any], *, version: int) -> None:
        self.target_encoder.load_state_dict(state["target"])
        self.updates = int(state["updates"])


def momentum_of(owner: str, value: float) -> float:
    """``value``, inside [0, 1)."""
    return float(check.real(owner, "ema_momentum", value, at_least=0, below=1))


def freeze(target: nn.Module) -> None:
    """No gradients, and no batch of its own moves its statistics."""
    target.requires_grad_(False)
    target.eval()


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the module's state, to save."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def target_problems(target: nn.Module, saved: Any) -> list[str]:
    """Where a saved target does not fit this one."""
    if not isinstance(saved, Mapping):
        return ["the saved state has no target encoder"]
    shapes = {name: tuple(value.shape) for name, value in target.state_dict().items()}
    other = {name: tuple(value.shape) for name, value in saved.items()}
    if shapes == other:
        return []
    names = sorted(n for n in shapes.keys() | other.keys() if shapes.get(n) != other.get(n))
    return [
        f"the saved target encoder differs in {names[0]!r}: {other.get(names[0])}, here {shapes.get(names[0])}"
    ]
