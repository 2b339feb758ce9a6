"""A vision transformer that can leave patches out (Dosovitskiy et al. 2020, arXiv:2010.11929).

Shapes in names: B images, N patches, T tokens (patches and the class token),
D ``d_model``, H heads, C channels of a head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from nnx.params import NNViTParams
from nnx.utils import validation as check
from torch import nn


class ViTNN(nn.Module):
    """An encoder of square images ``(B, in_channels, image_size, image_size)``.

    The image is cut into patches of ``patch_size``, in reading order; a learned class
    token comes first. Output: ``(B, N + 1, d_model)``, normalized.

    Raises ``ValueError`` for an ``image_size`` that ``patch_size`` does not divide and a
    ``d_model`` that ``n_heads`` does not divide.
    """

    def __init__(
        self,
        *,
        image_size: int = 32,
        patch_size: int = 4,
        in_channels: int = 3,
        d_model: int = 64,
        n_layers: int = 4,
        n_heads: int = 4,
        ffn_mult: int = 4,
        attn_dropout: float = 0.0,
        resid_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.image_size = check.count("ViTNN", "image_size", image_size)
        self.patch_size = check.count("ViTNN", "patch_size", patch_size)
        if image_size % patch_size:
            check.refuse("ViTNN", "image_size", image_size, f"a multiple of {patch_size}")
        self.in_channels = check.count("ViTNN", "in_channels", in_channels)
        self.d_model = check.count("ViTNN", "d_model", d_model)
        layers = check.count("ViTNN", "n_layers", n_layers)
        self.grid_size = image_size // patch_size
        self.n_patches = self.grid_size**2
        self.patch_embed = nn.Conv2d(in_channels, d_model, patch_size, stride=patch_size)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, d_model))
        self.pos_embed = nn.Parameter(torch.zeros(1, self.n_patches + 1, d_model))
        nn.init.normal_(self.pos_embed, std=0.02)
        nn.init.normal_(self.cls_token, std=0.02)
        self.blocks = nn.ModuleList(
            ViTBlock(d_model, n_heads, ffn_mult, attn_dropout, resid_dropout) for _ in range(layers)
        )
        self.norm_out = RMSNorm(d_model)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Encode ``x`` (B, C, H, W) to (B, T, D), the class token first.

        ``mask`` (B, N), booleans, keeps the patches where it is true; the others are
        dropped before any attention. Every image must keep equally many. ``None`` keeps
        all of them.
        """
        self._check_images(x)
        patches = self.patch_embed(x).flatten(2).transpose(1, 2) + self.pos_embed[:, 1:]
        if mask is not None:
            patches = self._kept(patches, mask)
        first = (self.cls_token + self.pos_embed[:, :1]).expand(len(x), -1, -1)
        tokens = torch.cat((first.to(patches.dtype), patches), dim=1)
        for block in self.blocks:
            tokens = block(tokens)
        return self.norm_out(tokens)

    def patch_positions(self) -> torch.Tensor:
        """The positions 1 to N of the patches among all tokens; the class token is at 0."""
        return torch.arange(1, self.n_patches + 1, device=self.pos_embed.device)

    def unpack_batch(self, batch: Any) -> tuple[tuple[Any, ...], Any]:
        """``((images,), target)`` of ``(images, target)``; images alone have the target ``None``."""
        if isinstance(batch, torch.Tensor):
            return (batch,), None
        images, *targets = batch
        return (images,), targets[0] if targets else None

    def _check_images(self, x: torch.Tensor) -> None:
        wanted = (self.in_channels, self.image_size, self.image_size)
        if x.shape[1:] != wanted:
            raise ValueError(
                f"ViTNN expects images (B, {', '.join(map(str, wanted))}), got {tuple(x.shape)}"
            )

    def _kept(self, patches: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if mask.dtype != torch.bool or mask.shape != patches.shape[:2]:
            raise ValueError(
                f"the mask must hold one boolean for each of {tuple(patches.shape[:2])} patches, "
                f"not {mask.dtype} of shape {tuple(mask.shape)}"
            )
        counts = mask.sum(dim=1)
        kept = int(counts[0])
        if bool((counts != kept).any()):
            raise ValueError(
                f"the mask keeps between {int(counts.min())} and {int(counts.max())} patches; "
                "every image of a batch must keep equally many"
            )
        return patches[mask].view(len(patches), kept, -1)


class ViTBlock(nn.Module):
    """Attention in both directions, then a feed-forward layer, each normalized first and added."""

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        ffn_mult: int = 4,
        attn_dropout: float = 0.0,
        resid_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        width = 2 * check.count("ViTBlock", "ffn_mult", ffn_mult) * d_model // 3
        self.norm1 = RMSNorm(d_model)
        self.attn = SelfAttention(d_model, n_heads, attn_dropout)
        self.norm2 = RMSNorm(d_model)
        self.ffn = SwiGLU(d_model, width)
        self.drop = nn.Dropout(
            check.real("ViTBlock", "resid_dropout", resid_dropout, at_least=0, at_most=1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` (B, T, D) to the same shape."""
        x = x + self.drop(self.attn(self.norm1(x)))
        return x + self.drop(self.ffn(self.norm2(x)))


class SelfAttention(nn.Module):
    """Every token attends to every token; queries, keys and values come from one matrix."""

    def __init__(self, d_model: int, n_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.n_heads = check.count("ViTBlock", "n_heads", n_heads)
        if d_model % n_heads:
            check.refuse("ViTBlock", "d_model", d_model, f"a multiple of n_heads ({n_heads})")
        self.dropout = check.real("ViTBlock", "attn_dropout", dropout, at_least=0, at_most=1)
        self.w_qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.w_o = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.w_qkv(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0.0
        )
        return self.w_o(mixed.transpose(1, 2).flatten(2))


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` over the last axis (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (self.dim,), self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}"


class SwiGLU(nn.Module):
    """``w2(silu(w1(x)) * w3(x))`` (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, d_model: int, width: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(d_model, width, bias=False)
        self.w2 = nn.Linear(width, d_model, bias=False)
        self.w3 = nn.Linear(d_model, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def build(params: NNViTParams) -> ViTNN:
    """The encoder of ``Nets.VIT(params=...)``."""
    assert params.n_heads is not None
    return ViTNN(
        image_size=params.image_size,
        patch_size=params.patch_size,
        in_channels=params.in_channels,
        d_model=params.d_model,
        n_layers=params.n_layers,
        n_heads=params.n_heads,
        ffn_mult=params.ffn_mult,
        attn_dropout=params.attn_dropout,
        resid_dropout=params.resid_dropout,
    )
