"""LoRA: low-rank adaptation of frozen layers (Hu et al. 2021, arXiv:2106.09685)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from nnx.peft.lora_conv import LoRAConv2d
from nnx.peft.lora_embedding import LoRAEmbedding
from nnx.peft.low_rank import LoRALayer, LowRank, as_input
from nnx.peft.ownership import Owners, Source, load_adapter, owned_keys, save_adapter
from nnx.peft.placement import adapt
from nnx.precision import full_precision
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
        return adapter.scaling * (full_precision(adapter.lora_B) @ full_precision(adapter.lora_A))


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
    freeze_base: bool = False,
    modules_to_save: Sequence[str] = (),
) -> int:
    """Wrap every matching layer of ``module`` with LoRA, in place; return how many.

    Patterns are ``fnmatch`` globs over dotted submodule names and are tried on
    every path under which a layer is registered; one that matches no layer is
    warned about. ``kinds`` chooses among ``nn.Linear``, ``nn.Conv2d`` and
    ``nn.Embedding``. Layers that are wrapped already are left as they are.

    The base of each wrapped layer is frozen and the rest of ``module`` trains
    on, unless ``freeze_base`` freezes all that no adapter owns. The modules that
    ``modules_to_save`` names (globs; a new head, say) train whole and travel in
    the adapter's file.

    Raises ``ValueError``, and changes nothing, without a pattern, for a
    hyperparameter outside its domain, when a selected layer has aliases or is
    read directly by its parent, for a name in ``modules_to_save`` that is no
    module, and with ``freeze_base`` when nothing matches.
    """
    options: dict[str, Any] = {"r": r, "alpha": alpha, "dropout": dropout, "rslora": rslora}
    return adapt(
        "apply_lora_to",
        module,
        name_patterns,
        kinds=kinds,
        build=lambda base: lora_wrapper(base)(base, **options),
        freeze_base=freeze_base,
        modules_to_save=modules_to_save,
    )


def save_lora_weights(
    module: nn.Module, path: str | os.PathLike[str], *, include_trainable: bool = False
) -> str:
    """Write the ``lora_A`` / ``lora_B`` of every LoRA layer; return ``path``.

    The modules that ``modules_to_save`` named are written too, and with
    ``include_trainable`` everything else that trains. Without it a trainable
    tensor that the file would not hold is refused with a ``ValueError``; one
    that another adapter owns (IA3's factors, DoRA's magnitude) is warned about.
    A module without LoRA layers writes an empty file.
    """
    return save_adapter(
        module, path, owned_keys(module, LORA_TENSORS),
        what="LoRA layer", include_trainable=include_trainable,
    )  # fmt: skip


def load_lora_weights(module: nn.Module, source: Source, *, include_trainable: bool = False) -> int:
    """Load LoRA tensors into an already wrapped ``module``; return how many were taken.

    ``source`` is a path or a state dict; only keys that a LoRA layer or a module
    of ``modules_to_save`` owns are read, with ``include_trainable`` all that is
    not frozen here. What is left out on either side is warned about, except the
    base of a full checkpoint. A tensor of another shape raises torch's
    size-mismatch ``RuntimeError``, and nothing is changed.
    """
    owned = owned_keys(module, LORA_TENSORS)
    return load_adapter(module, source, owned, include_trainable=include_trainable)
