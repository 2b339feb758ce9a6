"""LoRA: low-rank adaptation of frozen layers (Hu et al. 2021, arXiv:2106.09685)."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from nnx.peft.lora_conv import LoRAConv2d
from nnx.peft.lora_embedding import LoRAEmbedding
from nnx.peft.low_rank import LoRALayer, LowRank, accumulate, as_input
from nnx.peft.ownership import Owners, Source, load_owned, save_owned
from nnx.peft.placement import select, wrap
from torch import nn

LORA_TENSORS: Owners = ((LowRank, ("lora_A", "lora_B")),)


class LoRALinear(LoRALayer):
    """``y = base(x) + scaling * B(A(dropout(x)))`` over a frozen ``nn.Linear``.

    ``lora_A`` is (r, in_features), Kaiming-uniform; ``lora_B`` is
    (out_features, r), zero, so the output starts as the base's, bit for bit.
    Both take dtype and device from ``base.weight``.

    Args:
        base: the Linear to adapt; its parameters are frozen.
        r: rank of the update, >= 1.
        alpha: numerator of the scale ``alpha / r``.
        dropout: dropout on the input of the update, in [0, 1).
        rslora: scale by ``alpha / sqrt(r)`` instead.
    """

    base: nn.Linear

    def __init__(
        self,
        base: nn.Linear,
        *,
        r: int = 8,
        alpha: float = 16.0,
        dropout: float = 0.0,
        rslora: bool = False,
    ) -> None:
        if not isinstance(base, nn.Linear):
            raise TypeError(f"{type(self).__name__} adapts nn.Linear, not {type(base).__name__}")
        super().__init__(base, r=r, alpha=alpha, dropout=dropout, rslora=rslora)

    @property
    def in_features(self) -> int:
        return self.base.in_features

    @property
    def out_features(self) -> int:
        return self.base.out_features

    def matrix_shapes(self, r: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (r, self.in_features), (self.out_features, r)

    def add_update(self, y: torch.Tensor, x: torch.Tensor, adapter: LowRank) -> torch.Tensor:
        low = F.linear(as_input(adapter.lora_dropout(x), adapter.lora_A), adapter.lora_A)
        if low.dtype != y.dtype:
            return y + (adapter.scaling * F.linear(low, adapter.lora_B)).to(y.dtype)
        # One fused multiply-add: the scaled product is never materialised.
        return torch.addmm(
            y.reshape(-1, y.shape[-1]),
            low.reshape(-1, low.shape[-1]),
            adapter.lora_B.t(),
            alpha=adapter.scaling,
        ).view(y.shape)

    def delta(self, adapter: LowRank) -> torch.Tensor:
        return adapter.scaling * (accumulate(adapter.lora_B) @ accumulate(adapter.lora_A))


def lora_wrapper(module: nn.Module) -> type[LoRALayer]:
    """The wrapper class for ``module``'s kind of layer."""
    for kind, wrapper in (
        (nn.Linear, LoRALinear),
        (nn.Conv2d, LoRAConv2d),
        (nn.Embedding, LoRAEmbedding),
    ):
        if isinstance(module, kind):
            return wrapper
    raise TypeError(f"LoRA adapts Linear, Conv2d and Embedding layers, not {type(module).__name__}")


def apply_lora_to(
    module: nn.Module,
    *name_patterns: str,
    r: int = 8,
    alpha: float = 16.0,
    dropout: float = 0.0,
    rslora: bool = False,
    kinds: tuple[type[nn.Module], ...] = (nn.Linear,),
) -> int:
    """Wrap every matching layer of ``module`` with LoRA, in place; return how many.

    Patterns are ``fnmatch`` globs over dotted submodule names and are tried on
    every path under which a layer is registered. ``kinds`` chooses among
    ``nn.Linear``, ``nn.Conv2d`` and ``nn.Embedding``. Layers that are wrapped
    already are left as they are.

    Raises ``ValueError``, and changes nothing, without a pattern, for a
    hyperparameter outside its domain, and when a selected layer has aliases or
    is read directly by its parent.
    """
    options: dict[str, Any] = {"r": r, "alpha": alpha, "dropout": dropout, "rslora": rslora}
    return wrap(
        select(module, name_patterns, kinds=kinds),
        lambda base: lora_wrapper(base)(base, **options),
    )


def save_lora_weights(module: nn.Module, path: str | os.PathLike[str]) -> str:
    """Write only the ``lora_A`` / ``lora_B`` of every LoRA layer; return ``path``.

    A module without LoRA layers writes an empty file. DoRA's magnitude is not
    part of it: keep the full ``state_dict()`` for DoRA.
    """
    return save_owned(module, path, LORA_TENSORS)


def load_lora_weights(module: nn.Module, source: Source) -> int:
    """Load LoRA tensors into an already wrapped ``module``; return how many were taken.

    ``source`` is a path or a state dict; only keys that a LoRA layer of
    ``module`` owns are read. A tensor of another shape raises torch's
    size-mismatch ``RuntimeError``, and nothing is changed.
    """
    return load_owned(module, source, LORA_TENSORS)
