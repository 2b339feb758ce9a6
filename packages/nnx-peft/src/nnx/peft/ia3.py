"""IA3: one learned factor per output feature (Liu et al. 2022, arXiv:2205.05638)."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from nnx.peft.base import AdaptedLayer, floating_weight
from nnx.peft.ownership import Owners, Source, load_adapter, owned_keys, save_adapter
from nnx.peft.placement import adapt
from nnx.precision import full_precision
from torch import nn


class IA3Linear(AdaptedLayer):
    """``y = base(x) * scaling`` over a frozen ``nn.Linear``.

    ``scaling`` is (out_features,), ones, the only trainable tensor, in the
    dtype and on the device of ``base.weight``.
    """

    base: nn.Linear
    mergeable = ("weight", "bias")

    def __init__(self, base: nn.Linear) -> None:
        if not isinstance(base, nn.Linear):
            raise TypeError(f"IA3Linear adapts nn.Linear, not {type(base).__name__}")
        weight = floating_weight(base)
        super().__init__(base)
        self.scaling = nn.Parameter(
            torch.ones(base.out_features, dtype=weight.dtype, device=weight.device)
        )
        self.freeze_base()

    @property
    def in_features(self) -> int:
        return self.base.in_features

    @property
    def out_features(self) -> int:
        return self.base.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        return y if self.merged else y * self.scaling

    def merged_tensors(self) -> dict[str, torch.Tensor]:
        weight, bias, scaling = self.base.weight, self.base.bias, full_precision(self.scaling)
        merged = {"weight": (full_precision(weight) * scaling.unsqueeze(1)).to(weight.dtype)}
        if bias is not None:
            merged["bias"] = (full_precision(bias) * scaling).to(bias.dtype)
        return merged

    def extra_repr(self) -> str:
        return f"out_features={self.out_features}"


IA3_TENSORS: Owners = ((IA3Linear, ("scaling",)),)


def apply_ia3_to(
    module: nn.Module,
    *name_patterns: str,
    freeze_base: bool = False,
    modules_to_save: Sequence[str] = (),
) -> int:
    """Wrap every matching ``nn.Linear`` of ``module`` with IA3; return how many.

    Selection, freezing, refusals and idempotence are those of
    :func:`nnx.peft.apply_lora_to`.
    """
    return adapt(
        "apply_ia3_to",
        module,
        name_patterns,
        kinds=(nn.Linear,),
        build=IA3Linear,  # type: ignore[arg-type]
        freeze_base=freeze_base,
        modules_to_save=modules_to_save,
    )


def save_ia3_weights(
    module: nn.Module, path: str | os.PathLike[str], *, include_trainable: bool = False
) -> str:
    """Write the ``scaling`` of every IA3 layer; return ``path``.

    What travels with it and what is refused: see :func:`nnx.peft.save_lora_weights`.
    """
    return save_adapter(
        module, path, owned_keys(module, IA3_TENSORS),
        what="IA3 layer", include_trainable=include_trainable,
    )  # fmt: skip


def load_ia3_weights(module: nn.Module, source: Source, *, include_trainable: bool = False) -> int:
    """Load IA3 tensors into an already wrapped ``module``; return how many were taken.

    As :func:`nnx.peft.load_lora_weights`, for the ``scaling`` of IA3 layers.
    """
    owned = owned_keys(module, IA3_TENSORS)
    return load_adapter(module, source, owned, include_trainable=include_trainable)
