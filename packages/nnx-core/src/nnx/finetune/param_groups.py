"""Parameter groups by name: rates and decays for parts of a network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from nnx.params.optim import NNParamGroupSpec
from nnx.utils.modules import (
    describe_unmatched,
    parameter_names,
    require_module,
    warn_unmatched,
    without_match,
)
from nnx.utils.validation import show

if TYPE_CHECKING:
    from torch import nn

__all__ = ["NNParamGroupSpec", "build_param_groups", "check_patterns"]


def build_param_groups(
    module: nn.Module,
    specs: Sequence[NNParamGroupSpec],
    *,
    default_lr: float,
    default_weight_decay: float,
    strict: bool = False,
) -> list[dict[str, Any]]:
    """The parameter groups that a torch optimizer takes.

    Every trainable parameter goes to the first spec whose pattern (a
    case-sensitive shell glob) matches its dotted name, or any of the names of a
    tied one; frozen parameters are left out. Groups come in the order of
    ``specs``, each with its ``params``, ``lr`` and ``weight_decay``; a spec that
    matches nothing makes no group and is warned about.

    The parameters that no spec matches form a last group at the defaults, or,
    with ``strict``, belong to nobody: each optimizer of a ``Trainer`` owns only
    what its specs name. Specs that together match nothing are then refused.
    """
    rates = [_resolved_lr(index, spec, default_lr) for index, spec in enumerate(specs)]
    buckets: list[list[nn.Parameter]] = [[] for _ in specs]
    rest: list[nn.Parameter] = []
    names = parameter_names(require_module("build_param_groups", module))
    for parameter, several in names.items():
        if parameter.requires_grad:
            owner = next(
                (
                    bucket
                    for bucket, spec in zip(buckets, specs)
                    if any(fnmatchcase(name, spec.name_pattern) for name in several)
                ),
                rest,
            )
            owner.append(parameter)
    groups = [
        {
            "params": bucket,
            "lr": rate,
            "weight_decay": default_weight_decay if s.weight_decay is None else s.weight_decay,
        }
        for bucket, rate, s in zip(buckets, rates, specs)
        if bucket
    ]
    every = [name for several in names.values() for name in several]
    if strict and not groups:
        patterns = ", ".join(repr(spec.name_pattern) for spec in specs) or "none"
        raise ValueError(
            f"no trainable parameter matches the parameter groups (patterns: {patterns}); "
            f"the names are {show(every)}"
        )
    warn_unmatched(
        "param_groups", [spec.name_pattern for spec in specs], every, "parameter",
        consequence="What it should have matched gets the other rates",
    )  # fmt: skip
    if rest and not strict:
        groups.append({"params": rest, "lr": default_lr, "weight_decay": default_weight_decay})
    return groups


def _resolved_lr(index: int, spec: NNParamGroupSpec, default_lr: float) -> float:
    if spec.lr is not None:
        return spec.lr
    if spec.lr_multiplier is None:
        return default_lr
    rate = default_lr * spec.lr_multiplier
    if not math.isfinite(rate):
        raise ValueError(
            f"param_groups[{index}] ({spec.name_pattern!r}): lr_multiplier {spec.lr_multiplier} "
            f"times the learning rate {default_lr} is not finite"
        )
    return rate


def check_patterns(module: nn.Module, specs: Sequence[NNParamGroupSpec], *, owner: str) -> None:
    """Refuse a spec that matches no parameter: what it meant would train at other rates."""
    names = [name for several in parameter_names(module).values() for name in several]
    missing = without_match([spec.name_pattern for spec in specs], names)
    if missing:
        raise ValueError(
            f"{owner}.param_groups: {describe_unmatched(missing, names, 'parameter')}. The "
            "parameters it was meant for would train at other rates; correct it or leave it out"
        )
