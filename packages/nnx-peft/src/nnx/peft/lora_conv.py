"""LoRA on 2-d convolutions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from nnx.peft.low_rank import LoRALayer, LowRank, as_input
from nnx.precision import full_precision
from torch import nn


class LoRAConv2d(LoRALayer):
    """A frozen ``nn.Conv2d`` plus a rank-r convolution followed by a 1x1 one.

    ``lora_A`` is (r, in_channels, kh, kw) and is applied with the base's own
    stride, padding, padding mode and dilation; ``lora_B`` is
    (out_channels, r, 1, 1), zero. Grouped convolutions are refused: a
    low-rank update would mix their groups.
    """

    base: nn.Conv2d

    def __init__(
        self,
        base: nn.Conv2d,
        *,
        r: int = 8,
        alpha: float = 16.0,
        dropout: float = 0.0,
        rslora: bool = False,
    ) -> None:
        if not isinstance(base, nn.Conv2d):
            raise TypeError(f"LoRAConv2d adapts nn.Conv2d, not {type(base).__name__}")
        if base.groups != 1:
            raise ValueError(
                f"LoRA cannot adapt a convolution of {base.groups} groups: the low-rank update "
                "would mix them. Select convolutions with groups=1"
            )
        super().__init__(base, r=r, alpha=alpha, dropout=dropout, rslora=rslora)

    def matrix_shapes(self, r: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        base = self.base
        return (r, base.in_channels, *base.kernel_size), (base.out_channels, r, 1, 1)

    def add_update(self, y: torch.Tensor, x: torch.Tensor, adapter: LowRank) -> torch.Tensor:
        x = as_input(adapter.lora_dropout(x), adapter.lora_A)
        low = self.base._conv_forward(x, adapter.lora_A, None)
        return y + (adapter.scaling * F.conv2d(low, adapter.lora_B)).to(y.dtype)

    def delta(self, adapter: LowRank) -> torch.Tensor:
        a, b = full_precision(adapter.lora_A), full_precision(adapter.lora_B)
        return adapter.scaling * (b.flatten(1) @ a.flatten(1)).view(self.base.weight.shape)
