"""Refusals before an objective run is reserved: one owner of every update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from nnx.objectives.base import Objective
from nnx.precision import ResolvedPrecision

if TYPE_CHECKING:
    from nnx.models import Model


def check_update_owner(*, objective: Any, step_fn: Any, step_name: str = "train_step_fn") -> None:
    """Refuse a run with two owners of the update, or with one passed as the other."""
    if objective is not None and step_fn is not None:
        raise ValueError(
            f"pass either objective= or {step_name}=, not both: a run has one owner of its "
            "optimizer updates"
        )
    if objective is not None:
        if not callable(objective):
            raise TypeError(f"objective must be callable, not {type(objective).__name__}")
        if getattr(objective, "steps_optimizer", False):
            raise ValueError(
                f"{_name(objective)} steps the optimizer itself, so it cannot be an objective: "
                f"the update engine would step twice. Pass it as {step_name}=."
            )
    if isinstance(step_fn, Objective):
        raise ValueError(
            f"{_name(step_fn)} is an objective, which takes no optimizer step itself. Pass it as "
            f"objective= instead of {step_name}=."
        )


def check_objective_run(
    objective: Any,
    model: Model,
    *,
    optimizers: Mapping[str, torch.optim.Optimizer],
    callbacks: Sequence[Any] = (),
) -> None:
    """Refuse optimizers that share a parameter, then ask the objective's ``check_run``."""
    owners: dict[int, str] = {}
    names = {id(parameter): name for name, parameter in model.net.named_parameters()}
    for name, optimizer in optimizers.items():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                other = owners.setdefault(id(parameter), name)
                if other != name:
                    raise ValueError(
                        f"optimizers {other!r} and {name!r} share the parameter "
                        f"{names.get(id(parameter), tuple(parameter.shape))!r}. An objective run "
                        "steps every optimizer at every update, so a shared parameter would be "
                        "updated twice. Separate them with param_groups."
                    )
    check = getattr(objective, "check_run", None)
    if callable(check):
        check(model, optimizers=optimizers, callbacks=callbacks)


def check_step_precision(step_fn: Any, precision: ResolvedPrecision) -> None:
    """Refuse a full-precision-only step function under a reduced precision."""
    if precision.reduced and getattr(step_fn, "full_precision_only", False):
        raise ValueError(
            f"{_name(step_fn)} trains in full precision only, but this run resolves to "
            f"{precision.effective}. Use the corresponding objective, or "
            'PrecisionPolicy("fp32").'
        )


def _name(thing: Any) -> str:
    return getattr(thing, "__qualname__", None) or type(thing).__qualname__
