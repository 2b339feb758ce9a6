"""LoRA on embedding tables."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from nnx.peft.low_rank import LoRALayer, LowRank
from nnx.precision import full_precision
from torch import nn


class LoRAEmbedding(LoRALayer):
    """A frozen ``nn.Embedding`` plus a low-rank table.

    ``lora_A`` is (r, num_embeddings), zero; ``lora_B`` is (embedding_dim, r),
    normal. A row of the table then starts as the base's row and only rows
    that are looked up train. An embedding with ``max_norm`` is refused: its
    forward pass rewrites the weight that adapters keep frozen.
    """

    base: nn.Embedding

    def __init__(
        self,
        base: nn.Embedding,
        *,
        r: int = 8,
        alpha: float = 16.0,
        dropout: float = 0.0,
        rslora: bool = False,
    ) -> None:
        if not isinstance(base, nn.Embedding):
            raise TypeError(f"LoRAEmbedding adapts nn.Embedding, not {type(base).__name__}")
        if base.max_norm is not None:
            raise ValueError(
                "LoRA cannot adapt an embedding with max_norm: its forward pass rewrites the "
                "frozen weight. Set max_norm=None first"
            )
        if dropout:
            raise ValueError(
                "LoRA dropout acts on the input, and token ids cannot be dropped; use dropout=0.0 "
                "for embeddings"
            )
        super().__init__(base, r=r, alpha=alpha, dropout=dropout, rslora=rslora)

    @property
    def num_embeddings(self) -> int:
        return self.base.num_embeddings

    @property
    def embedding_dim(self) -> int:
        return self.base.embedding_dim

    def matrix_shapes(self, r: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (r, self.num_embeddings), (self.embedding_dim, r)

    def reset_matrices(self, a: torch.Tensor, b: torch.Tensor) -> None:
        nn.init.zeros_(a)
        nn.init.normal_(b)

    def add_update(self, y: torch.Tensor, x: torch.Tensor, adapter: LowRank) -> torch.Tensor:
        low = F.embedding(x, adapter.lora_A.t(), padding_idx=self.base.padding_idx)
        return y + (adapter.scaling * F.linear(low, adapter.lora_B)).to(y.dtype)

    def delta(self, adapter: LowRank) -> torch.Tensor:
        product = full_precision(adapter.lora_B) @ full_precision(adapter.lora_A)
        return adapter.scaling * product.t()
