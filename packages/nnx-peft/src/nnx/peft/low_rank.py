"""The low-rank update: two small matrices, their scale, and a layer that adds them."""

from __future__ import annotations

import math

import torch
from nnx.peft.base import AdaptedLayer, floating_weight
from nnx.precision import full_precision
from nnx.utils import validation as check
from torch import nn

DEFAULT = "default"  # the adapter that a wrapper is built with


def check_hyperparameters(r: int, alpha: float, dropout: float) -> tuple[int, float, float]:
    """Rank, scale and dropout as plain numbers; refuses one outside its domain."""
    return (
        check.count("LoRA", "r", r),
        float(check.real("LoRA", "alpha", alpha, above=0)),
        float(check.real("LoRA", "dropout", dropout, at_least=0, below=1)),
    )


class LowRank(nn.Module):
    """``lora_A``, ``lora_B`` and how they are scaled.

    The update is ``scaling * (B @ A)``, with ``scaling = alpha / r``, or
    ``alpha / sqrt(r)`` when ``rslora`` (Kalajdzievski 2023), which keeps the
    update's size independent of the rank.
    """

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_dropout: nn.Module

    def _set_low_rank(
        self, *, r: int, alpha: float, dropout: float, rslora: bool, training: bool
    ) -> None:
        self.r = r
        self.alpha = alpha
        self.rslora = rslora
        self.lora_dropout = nn.Dropout(dropout) if dropout > 0.0 else nn.Identity()
        self.lora_dropout.train(training)

    @property
    def scaling(self) -> float:
        return self.alpha / (math.sqrt(self.r) if self.rslora else self.r)

    @property
    def dropout(self) -> float:
        return float(getattr(self.lora_dropout, "p", 0.0))


class NamedAdapter(LowRank):
    """A further adapter of a wrapper, beside the one it was built with."""

    def __init__(
        self,
        layer: LoRALayer,
        *,
        r: int,
        alpha: float,
        dropout: float,
        rslora: bool,
        reset: bool = True,
    ) -> None:
        super().__init__()
        self._set_low_rank(
            r=r, alpha=alpha, dropout=dropout, rslora=rslora, training=layer.training
        )
        self.lora_A, self.lora_B = layer.new_matrices(r, reset=reset)
        self.training = layer.training


class LoRALayer(AdaptedLayer, LowRank):
    """A frozen layer with low-rank updates (Hu et al. 2021).

    A subclass says what the matrices look like (:meth:`matrix_shapes`,
    :meth:`reset_matrices`), how an update is added to an output
    (:meth:`add_update`) and which weight change it amounts to (:meth:`delta`).
    """

    adapters: nn.ModuleDict | None

    def __init__(
        self, base: nn.Module, *, r: int, alpha: float, dropout: float, rslora: bool
    ) -> None:
        r, alpha, dropout = check_hyperparameters(r, alpha, dropout)
        floating_weight(base)
        super().__init__(base)
        self._set_low_rank(r=r, alpha=alpha, dropout=dropout, rslora=rslora, training=base.training)
        self.adapters = None
        self.active: tuple[str, ...] = (DEFAULT,)
        self.lora_A, self.lora_B = self.new_matrices(r)
        self.freeze_base()

    def new_matrices(self, r: int, *, reset: bool = True) -> tuple[nn.Parameter, nn.Parameter]:
        """Matrices of rank ``r`` beside the base's weight; fresh ones have product zero."""
        weight = floating_weight(self.base)
        a, b = (
            nn.Parameter(torch.empty(shape, dtype=weight.dtype, device=weight.device))
            for shape in self.matrix_shapes(r)
        )
        if reset:
            self.reset_matrices(a, b)
        return a, b

    def matrix_shapes(self, r: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        raise NotImplementedError

    def reset_matrices(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """A Kaiming-uniform, B zero: the product is zero and A can learn from step two."""
        nn.init.kaiming_uniform_(a, a=math.sqrt(5))
        nn.init.zeros_(b)

    def add_update(self, y: torch.Tensor, x: torch.Tensor, adapter: LowRank) -> torch.Tensor:
        raise NotImplementedError

    def delta(self, adapter: LowRank) -> torch.Tensor:
        """``scaling * B @ A`` in the weight's shape, computed in at least FP32."""
        raise NotImplementedError

    def adapter_names(self) -> tuple[str, ...]:
        return (DEFAULT, *(self.adapters or ()))

    def adapter(self, name: str) -> LowRank:
        """The adapter called ``name``; ``KeyError`` when this layer has none."""
        if name == DEFAULT:
            return self
        if self.adapters is None or name not in self.adapters:
            raise KeyError(name)
        return self.adapters[name]  # type: ignore[return-value]

    def owned_parameters(self, name: str) -> tuple[nn.Parameter, ...]:
        """What trains when the adapter called ``name`` does."""
        adapter = self.adapter(name)
        return adapter.lora_A, adapter.lora_B

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        if not self.merged:
            for name in self.active:
                y = self.add_update(y, x, self.adapter(name))
        return y

    def merged_tensors(self) -> dict[str, torch.Tensor]:
        weight = self.base.get_parameter("weight")
        updates = [self.delta(self.adapter(name)) for name in self.active]
        total = sum(updates, start=full_precision(weight))
        return {"weight": total.to(weight.dtype)}

    def extra_repr(self) -> str:
        parts = [f"r={self.r}", f"alpha={self.alpha}", f"dropout={self.dropout}"]
        if self.rslora:
            parts.append("rslora=True")
        if self.active != (DEFAULT,):
            parts.append(f"active={list(self.active)}")
        return ", ".join(parts)


def as_input(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """``x`` in the dtype of an adapter that is kept in another precision than its base.

    FP32 adapters over a BF16 base are common; autocast chooses dtypes itself.
    """
    if x.dtype == matrix.dtype or torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(matrix.dtype)
