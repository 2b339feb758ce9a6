"""Layers whose rows are routed to some of several experts.

Shapes in names: N rows, E experts, K experts per row.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from nnx.nets.layers import BuiltinNet
from nnx.params import NNMoEParams
from nnx.utils import validation as check
from torch import nn


class MoELinear(nn.Module):
    """``nn.Linear`` as a mixture: each row goes through ``top_k`` of ``num_experts``.

    A router without bias scores the experts; a softmax over the ``top_k`` best scores
    weighs their outputs (Shazeer et al. 2017, arXiv:1701.06538). An expert computes only
    the rows that were sent to it. After a forward, ``last_aux_loss`` is the balance loss
    of its rows (see :meth:`Routing.balance_sum`), ``None`` before the first.

    Raises ``ValueError`` for widths below 1, fewer than 2 experts and a ``top_k``
    outside of 1 to ``num_experts``.
    """

    def __init__(
        self, in_features: int, out_features: int, *, num_experts: int, top_k: int = 2
    ) -> None:
        super().__init__()
        self.in_features = check.count("MoELinear", "in_features", in_features)
        self.out_features = check.count("MoELinear", "out_features", out_features)
        self.num_experts = check.count("MoELinear", "num_experts", num_experts, at_least=2)
        self.top_k = check.count("MoELinear", "top_k", top_k, at_most=num_experts)
        self.router = nn.Linear(in_features, num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Linear(in_features, out_features) for _ in range(num_experts)
        )
        self.last_aux_loss: torch.Tensor | None = None
        self.last_routing: Routing | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` (..., in_features) to (..., out_features)."""
        rows = x.reshape(-1, self.in_features)
        scores_NE = self.router(rows)
        top_NK, chosen_NK = scores_NE.topk(self.top_k, dim=-1)
        weights_NK = top_NK.softmax(dim=-1)
        self.last_routing = Routing.of(scores_NE, chosen_NK)
        self.last_aux_loss = self.last_routing.balance()
        # Rows in the order of their experts, so that every expert reads one slice. One
        # without rows is not called: it has no gradient then, and no optimizer moves it.
        order = chosen_NK.flatten().argsort(stable=True)
        row = order // self.top_k
        parts = rows[row].split(self.last_routing.counts.tolist())
        outputs = [expert(part) for expert, part in zip(self.experts, parts) if len(part)]
        if not outputs:
            return self.experts[0](rows).view(*x.shape[:-1], self.out_features)
        weighted = torch.cat(outputs) * weights_NK.flatten()[order, None]
        mixed = weighted.new_zeros(len(rows), self.out_features).index_add(0, row, weighted)
        return mixed.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return (
            f"{self.in_features}, {self.out_features}, num_experts={self.num_experts}, "
            f"top_k={self.top_k}"
        )


class FeedFwdMoENN(BuiltinNet):
    """A feed-forward net whose hidden layers are mixtures of experts; the last is dense.

    Input ``(B, input_dim)``, or more dimensions that are flattened per row. Output: raw
    logits ``(B, output_dim)``.
    """

    params: NNMoEParams

    def __init__(self, params: NNMoEParams) -> None:
        super().__init__(params)
        dims = [params.input_dim, *(params.hidden_dims or ())]
        layers: list[nn.Module] = [
            MoELinear(m, n, num_experts=params.num_experts, top_k=params.top_k)
            for m, n in itertools.pairwise(dims)
        ]
        self.layers = nn.ModuleList([*layers, nn.Linear(dims[-1], params.output_dim)])

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        if X.dim() > 2 and X.shape[-1] != self.layers[0].in_features:
            X = X.flatten(1)
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            X = layer(X)
            if i < last:
                X = self._activate(i, X)
        return X

    def unpack_batch(self, batch: Any) -> tuple[tuple[Any], Any]:
        """``((X,), target)`` of a two-element batch."""
        return super().unpack_batch(batch)


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """What a forward sent where.

    ``counts`` (E,) are the assignments of each expert, ``probabilities`` (E,) the
    router's probabilities summed over ``rows`` rows (differentiable), ``z`` the squared
    log-normalizers of the scores, summed likewise (differentiable), and ``entropy`` the
    mean entropy of a row's probabilities in nats, detached.
    """

    counts: torch.Tensor
    probabilities: torch.Tensor
    z: torch.Tensor
    entropy: torch.Tensor
    rows: int

    @staticmethod
    def of(scores_NE: torch.Tensor, chosen_NK: torch.Tensor) -> Routing:
        """The routing of router scores and the experts chosen by them."""
        half = scores_NE.dtype in (torch.float16, torch.bfloat16)
        wide = scores_NE.float() if half else scores_NE
        logarithms = wide.log_softmax(dim=-1)
        shares = logarithms.exp()
        return Routing(
            chosen_NK.flatten().bincount(minlength=scores_NE.shape[-1]),
            shares.sum(dim=0),
            wide.logsumexp(dim=-1).square().sum(),
            -(shares * logarithms).detach().sum(dim=-1).mean(),
            len(scores_NE),
        )

    def balance_sum(self, counts: torch.Tensor | None = None) -> torch.Tensor:
        """``rows`` times Switch's load-balancing loss (Fedus et al. 2021, arXiv:2101.03961).

        The loss is ``E · Σ f_e · P_e``; ``f_e`` is the share of all assignments that went
        to expert ``e`` and ``P_e`` the mean router probability, so that a balanced router
        has the loss 1 for any number of experts per row. ``counts`` are the assignments
        that ``f`` is taken from, when they are more than these.
        """
        counts = self.counts if counts is None else counts
        share = counts.to(self.probabilities) / counts.sum().clamp(min=1)
        return len(share) * (share * self.probabilities).sum()

    def balance(self) -> torch.Tensor:
        """The load-balancing loss of these rows; 0 without rows."""
        return self.balance_sum() / max(self.rows, 1)
