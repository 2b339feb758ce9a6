"""DoRA: weight-decomposed low-rank adaptation (Liu et al. 2024, arXiv:2402.09353)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from nnx.peft.lora import LoRALinear
from nnx.peft.placement import adapt
from nnx.precision import full_precision
from torch import nn


class DoRALinear(LoRALinear):
    """A frozen ``nn.Linear`` whose rows are recomposed from direction and size.

    With ``V = W + scaling * B A``, each row of the effective weight is
    ``magnitude * V / ||V||``. ``magnitude`` is (out_features,), starts as the
    row norms of ``W`` in the weight's dtype, and trains with ``lora_A`` and
    ``lora_B``. Gradients also flow through the norm.

    The norm is computed in FP32 for FP16/BF16 layers and in the layer's own
    dtype otherwise, then rounded to the magnitude's dtype like the magnitude,
    so that the two cancel exactly at insertion. A row of norm zero keeps its
    ``V`` as it is, which is finite, equals the base, and can learn.

    ``dropout`` drops entries of the composed update ``B A`` (DropConnect), not
    of the input.
    """

    magnitude: nn.Parameter

    def __init__(
        self, base: nn.Linear, *, r: int = 8, alpha: float = 16.0, dropout: float = 0.0
    ) -> None:
        if isinstance(base, nn.Linear) and not _computes_plainly(base):
            raise ValueError(
                f"DoRA recomposes the weight of a plain nn.Linear; this {type(base).__name__} "
                "computes in its own way. Use LoRA for it"
            )
        super().__init__(base, r=r, alpha=alpha, dropout=dropout)
        with torch.no_grad():
            norms = row_norms(full_precision(base.weight)).to(base.weight.dtype)
        self.magnitude = nn.Parameter(norms)

    def effective_weight(self) -> torch.Tensor:
        """The (out_features, in_features) weight that the forward pass uses."""
        weight = self.base.weight
        v = full_precision(weight) + self.lora_dropout(self.delta(self))
        norms = row_norms(v).to(self.magnitude.dtype).to(v.dtype)
        usable = (norms > 0) & norms.isfinite()
        scale = torch.where(usable, self.magnitude.to(v.dtype) / norms.where(usable, 1.0), 1.0)
        return (scale.unsqueeze(1) * v).to(weight.dtype)

    def owned_parameters(self, name: str) -> tuple[nn.Parameter, ...]:
        return (*super().owned_parameters(name), self.magnitude)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.merged or not self.active:
            return self.base(x)
        return F.linear(x, self.effective_weight(), self.base.bias)

    def merged_tensors(self) -> dict[str, torch.Tensor]:
        if not self.active:
            return {"weight": self.base.weight}
        training = self.lora_dropout.training
        self.lora_dropout.eval()
        try:
            return {"weight": self.effective_weight()}
        finally:
            self.lora_dropout.train(training)


def _computes_plainly(base: nn.Linear) -> bool:
    weight = type(base.weight)
    return type(base).forward is nn.Linear.forward and weight in (
        nn.Parameter,
        torch.Tensor,
        nn.parameter.UninitializedParameter,
    )


def row_norms(v: torch.Tensor) -> torch.Tensor:
    """The L2 norm of each row, exact for rows whose squares would under- or overflow."""
    size = v.detach().abs().amax(dim=1, keepdim=True)
    size = size.where(size > 0, 1.0)
    return torch.linalg.vector_norm(v.contiguous() / size, dim=1) * size.squeeze(1)


def apply_dora_to(
    module: nn.Module,
    *name_patterns: str,
    r: int = 8,
    alpha: float = 16.0,
    dropout: float = 0.0,
    freeze_base: bool = False,
    modules_to_save: Sequence[str] = (),
) -> int:
    """Wrap every matching ``nn.Linear`` of ``module`` with DoRA; return how many.

    Selection, freezing, refusals and idempotence are those of
    :func:`nnx.peft.apply_lora_to`.
    """
    return adapt(
        "apply_dora_to",
        module,
        name_patterns,
        kinds=(nn.Linear,),
        build=lambda base: DoRALinear(base, r=r, alpha=alpha, dropout=dropout),  # type: ignore[arg-type]
        freeze_base=freeze_base,
        modules_to_save=modules_to_save,
    )
