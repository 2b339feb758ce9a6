"""What an embedding that collapses looks like."""

from __future__ import annotations

import torch


@torch.no_grad()
def embedding_metrics(embeddings: torch.Tensor) -> dict[str, float]:
    """How much of their space ``embeddings`` (B, D) use.

    ``effective_rank`` is the exponential of the entropy of the covariance's eigenvalues
    as shares (Roy and Vetterli 2007): 1 when all lie on one line, at most D.
    ``deviation_mean`` and ``deviation_min`` are over the dimensions' standard deviations,
    0 where a dimension has collapsed. An embedding without any variance has the rank 0.
    """
    wide = embeddings.double() - embeddings.double().mean(dim=0)
    deviations = wide.square().mean(dim=0).sqrt()
    # Both products have the same eigenvalues but for zeros; take the smaller one.
    product = wide.T @ wide if len(wide) >= wide.shape[1] else wide @ wide.T
    values = torch.linalg.eigvalsh(product).clamp(min=0)
    shares = values / values.sum().clamp(min=torch.finfo(torch.float64).tiny)
    rank = torch.exp(-torch.special.xlogy(shares, shares).sum()) * (values.sum() > 0)
    numbers = torch.stack((rank, deviations.mean(), deviations.min())).tolist()
    return dict(zip(("effective_rank", "deviation_mean", "deviation_min"), numbers))
