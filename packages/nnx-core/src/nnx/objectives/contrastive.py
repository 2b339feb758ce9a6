"""The contrastive loss of two views of every sample."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nnx.precision import full_precision
from nnx.utils import validation as check


def nt_xent(z1: torch.Tensor, z2: torch.Tensor, temperature: float = 0.5) -> torch.Tensor:
    """NT-Xent (Chen et al. 2020, arXiv:2002.05709), a scalar.

    ``z1`` and ``z2`` (B, D) embed two views of the same B >= 2 samples. Each of the
    2B rows must pick its partner among the other 2B - 1 by cosine similarity over
    ``temperature`` > 0; the mean cross-entropy is returned. A reduced precision is
    computed in float32.
    """
    temperature = check.real("nt_xent", "temperature", temperature, above=0)
    if z1.dim() != 2 or z1.shape != z2.shape:
        raise ValueError(
            f"NT-Xent compares two views of shape (B, D), not {tuple(z1.shape)} and "
            f"{tuple(z2.shape)}"
        )
    if len(z1) < 2:
        raise ValueError(
            "NT-Xent needs at least 2 samples in a batch: with one there is nothing to tell it from"
        )
    rows = F.normalize(full_precision(torch.cat((z1, z2))), dim=1)
    similar = rows @ rows.t() / temperature
    similar = similar.masked_fill(
        torch.eye(len(rows), dtype=torch.bool, device=rows.device), float("-inf")
    )
    partners = torch.arange(len(rows), device=rows.device).roll(len(z1))
    return F.cross_entropy(similar, partners)
