"""LoRA+: a larger learning rate for B than for A (Hayou et al. 2024, arXiv:2402.12354)."""

from __future__ import annotations

from typing import Any

from nnx.finetune import NNParamGroupSpec
from nnx.peft.low_rank import LowRank
from nnx.utils import validation as check
from torch import nn


def lora_plus_groups(
    module: nn.Module, *, lr: float, ratio: float = 16.0, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Parameter groups for a torch optimizer: ``lora_B`` at ``lr * ratio``, all else at ``lr``.

    Only trainable parameters are listed. Raises ``ValueError`` for a rate or
    ratio that is not positive and finite, or when no ``lora_B`` trains.
    """
    _check(lr=lr, ratio=ratio)
    fast = {id(m.lora_B) for m in module.modules() if isinstance(m, LowRank)}
    trainable = [p for p in module.parameters() if p.requires_grad]
    b = [p for p in trainable if id(p) in fast]
    rest = [p for p in trainable if id(p) not in fast]
    if not b:
        raise ValueError("no lora_B of this module trains; wrap layers with apply_lora_to first")
    groups = [{"params": rest, "lr": lr}, {"params": b, "lr": lr * ratio}]
    return [{**group, "weight_decay": weight_decay} for group in groups if group["params"]]


def lora_plus_specs(*, ratio: float = 16.0) -> list[NNParamGroupSpec]:
    """The same for ``NNOptimParams(param_groups=...)``, by name."""
    _check(ratio=ratio)
    return [NNParamGroupSpec(name_pattern="*lora_B", lr_multiplier=ratio)]


def _check(**values: float) -> None:
    for name, value in values.items():
        check.real("LoRA+", name, value, above=0)
