"""The predictor of I-JEPA."""

from __future__ import annotations

import torch
from nnx.paradigms.vit import ViTBlock
from nnx.utils import validation as check
from torch import nn


class JEPAPredictor(nn.Module):
    """Predicts the embeddings of hidden patches from those of the visible ones.

    The context is projected to ``predictor_dim`` (half of ``embed_dim`` by default); a
    mask token with the position of each hidden patch joins it; ``n_layers`` blocks and a
    projection back follow.
    """

    def __init__(
        self,
        *,
        embed_dim: int,
        n_patches: int,
        predictor_dim: int | None = None,
        n_layers: int = 2,
        n_heads: int = 2,
        ffn_mult: int = 4,
    ) -> None:
        super().__init__()
        self.embed_dim = check.count("JEPAPredictor", "embed_dim", embed_dim)
        self.n_patches = check.count("JEPAPredictor", "n_patches", n_patches)
        width = max(embed_dim // 2, 1) if predictor_dim is None else predictor_dim
        self.predictor_dim = width = check.count("JEPAPredictor", "predictor_dim", width)
        layers = check.count("JEPAPredictor", "n_layers", n_layers)
        self.in_proj = nn.Linear(embed_dim, width, bias=False)
        self.out_proj = nn.Linear(width, embed_dim, bias=False)
        self.pos_embed = nn.Parameter(torch.zeros(1, n_patches + 1, width))
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        nn.init.normal_(self.pos_embed, std=0.02)
        nn.init.normal_(self.mask_token, std=0.02)
        self.blocks = nn.ModuleList(ViTBlock(width, n_heads, ffn_mult) for _ in range(layers))

    def forward(
        self,
        context_embeds: torch.Tensor,
        context_positions: torch.Tensor,
        target_positions: torch.Tensor,
    ) -> torch.Tensor:
        """(B, targets, embed_dim) from ``context_embeds`` (B, context, embed_dim).

        Positions are integers of shape (context,) and (targets,), shared by the batch: 0
        is the class token, patches are 1 to ``n_patches``.
        """
        context = self.in_proj(context_embeds) + self.pos_embed[:, context_positions]
        hidden = (self.mask_token + self.pos_embed[:, target_positions]).expand(
            len(context_embeds), -1, -1
        )
        tokens = torch.cat((context, hidden.to(context.dtype)), dim=1)
        for block in self.blocks:
            tokens = block(tokens)
        return self.out_proj(tokens[:, context.shape[1] :])
