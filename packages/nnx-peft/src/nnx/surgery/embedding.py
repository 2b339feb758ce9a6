"""A larger vocabulary for a trained embedding."""

from __future__ import annotations

from typing import Literal

import torch
from nnx.utils import validation as check
from torch import nn

InitStrategy = Literal["zeros", "copy_mean"]


@torch.no_grad()
def expand_embedding(
    emb: nn.Embedding, *, new_num_embeddings: int, init: InitStrategy = "zeros"
) -> tuple[nn.Embedding, torch.Tensor]:
    """A larger embedding whose first rows are ``emb``'s, and which rows those are.

    New rows are zeros, or with ``init="copy_mean"`` the mean of the old rows.
    Padding index, norm options, sparsity, dtype, device, mode and
    ``requires_grad`` carry over; ``emb`` is only read.

    Returns the embedding and a bool mask of shape (new_num_embeddings,), true
    for the original rows.

    Raises ``TypeError`` for another kind of module and ``ValueError`` when the
    size does not grow or ``init`` is unknown.
    """
    if not isinstance(emb, nn.Embedding):
        raise TypeError(f"expand_embedding takes an nn.Embedding, not a {type(emb).__name__}")
    old = emb.num_embeddings
    size = check.count(
        "expand_embedding", "new_num_embeddings", new_num_embeddings, at_least=old + 1
    )
    if init not in ("zeros", "copy_mean"):
        raise ValueError(f"init must be 'zeros' or 'copy_mean', not {init!r}")

    weight = torch.zeros(size, emb.embedding_dim, dtype=emb.weight.dtype, device=emb.weight.device)
    weight[:old] = emb.weight
    if init == "copy_mean":
        exact = emb.weight if emb.weight.dtype == torch.float64 else emb.weight.float()
        weight[old:] = exact.mean(dim=0).to(weight.dtype)
    larger = nn.Embedding(
        size,
        emb.embedding_dim,
        padding_idx=emb.padding_idx,
        max_norm=emb.max_norm,
        norm_type=emb.norm_type,
        scale_grad_by_freq=emb.scale_grad_by_freq,
        sparse=emb.sparse,
        _weight=weight,
    ).train(emb.training)
    larger.weight.requires_grad_(emb.weight.requires_grad)
    return larger, torch.arange(size, device=weight.device) < old
