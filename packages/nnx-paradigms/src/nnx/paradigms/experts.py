"""Layers whose rows are routed to some of several experts.

Shapes in names: N rows, E experts, K experts per row.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from nnx.nets.layers import BuiltinNet
from nnx.params import NNMoEParams
from nnx.precision import full_precision
from nnx.utils import validation as check
from torch import nn


class MoELinear(nn.Module):
    """``nn.Linear`` as a mixture: each row goes through ``top_k`` of ``num_experts``.

    A router without bias scores the experts; a softmax over the ``top_k`` best scores
    weighs their outputs (Shazeer et al. 2017, arXiv:1701.06538). An expert computes only
    the rows that were sent to it. After a forward, ``last_aux_loss`` is the balance loss
    of its rows (see :meth:`Routing.balance_sum`), ``None`` before the first.

    With ``capacity_factor`` an expert takes at most ``ceil(capacity_factor · N · top_k /
    num_experts)`` of N rows in training; what comes after that is dropped and counted, all
    first choices before any second one (Fedus et al. 2021, arXiv:2101.03961). In eval mode
    nothing is dropped, so that no output depends on the other rows.

    Raises ``ValueError`` for widths below 1, fewer than 2 experts, a ``top_k`` outside of
    1 to ``num_experts`` and a ``capacity_factor`` that is not above 0.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        num_experts: int,
        top_k: int = 2,
        capacity_factor: float | None = None,
    ) -> None:
        super().__init__()
        self.in_features = check.count("MoELinear", "in_features", in_features)
        self.out_features = check.count("MoELinear", "out_features", out_features)
        self.num_experts = check.count("MoELinear", "num_experts", num_experts, at_least=2)
        self.top_k = check.count("MoELinear", "top_k", top_k, at_most=num_experts)
        if capacity_factor is not None:
            capacity_factor = float(
                check.real("MoELinear", "capacity_factor", capacity_factor, above=0)
            )
        self.capacity_factor = capacity_factor
        self.router = nn.Linear(in_features, num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Linear(in_features, out_features) for _ in range(num_experts)
        )
        self.row_mask: torch.Tensor | None = None
        self.last_aux_loss: torch.Tensor | None = None
        self.last_routing: Routing | None = None

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """``x`` (..., in_features) to (..., out_features).

        ``mask`` (...), booleans, is true where a row is no padding (that of
        :func:`masked_rows` by default). Padding goes to no expert, counts nowhere and
        comes out as zeros.
        """
        rows = x.reshape(-1, self.in_features)
        mask = self.row_mask if mask is None else mask
        if mask is None:
            mixed = self._mix(rows)
        else:
            kept = self._kept(mask, x).flatten().nonzero()[:, 0]
            part = self._mix(rows[kept])
            mixed = part.new_zeros(len(rows), self.out_features).index_copy(0, kept, part)
        return mixed.view(*x.shape[:-1], self.out_features)

    def _mix(self, rows: torch.Tensor) -> torch.Tensor:
        scores_NE = self.router(rows)
        top_NK, chosen_NK = scores_NE.topk(self.top_k, dim=-1)
        # All first choices in the order of their rows, then all second ones.
        weights, chosen = top_NK.softmax(dim=-1).T.flatten(), chosen_NK.T.flatten()
        asked = chosen.bincount(minlength=self.num_experts)
        taken = asked
        # In the order of their experts, so that every expert reads one slice. One
        # without rows is not called: it has no gradient then, and no optimizer moves it.
        order = chosen.argsort(stable=True)
        if self.capacity_factor is not None and self.training:
            capacity = math.ceil(self.capacity_factor * len(chosen) / self.num_experts)
            place = torch.arange(len(order), device=order.device) - (
                asked.cumsum(0) - asked
            ).repeat_interleave(asked)
            order, taken = order[place < capacity], asked.clamp(max=capacity)
        self.last_routing = Routing.of(scores_NE, asked, (asked - taken).sum())
        self.last_aux_loss = self.last_routing.balance()
        row = order % max(len(rows), 1)
        parts = rows[row].split(taken.tolist())
        outputs = [expert(part) for expert, part in zip(self.experts, parts) if len(part)]
        if not outputs:
            return self.experts[0](rows)
        weighted = torch.cat(outputs) * weights[order, None]
        return weighted.new_zeros(len(rows), self.out_features).index_add(0, row, weighted)

    def _kept(self, mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if mask.dtype != torch.bool or mask.shape != x.shape[:-1]:
            raise ValueError(
                f"MoELinear: the mask must hold one boolean for each of {tuple(x.shape[:-1])} "
                f"rows, not {mask.dtype} of shape {tuple(mask.shape)}"
            )
        return mask.to(x.device)

    def extra_repr(self) -> str:
        limit = "" if self.capacity_factor is None else f", capacity_factor={self.capacity_factor}"
        return (
            f"{self.in_features}, {self.out_features}, num_experts={self.num_experts}, "
            f"top_k={self.top_k}{limit}"
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
            MoELinear(
                m,
                n,
                num_experts=params.num_experts,
                top_k=params.top_k,
                capacity_factor=params.capacity_factor,
            )
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

    ``counts`` (E,) are the assignments asked of each expert, ``probabilities`` (E,) the
    router's probabilities summed over ``rows`` rows (differentiable), ``z`` the squared
    log-normalizers of the scores, summed likewise (differentiable), ``entropy`` the
    mean entropy of a row's probabilities in nats, detached, and ``dropped`` the number of
    assignments that found their expert full.
    """

    counts: torch.Tensor
    probabilities: torch.Tensor
    z: torch.Tensor
    entropy: torch.Tensor
    dropped: torch.Tensor
    rows: int

    @staticmethod
    def of(scores_NE: torch.Tensor, counts: torch.Tensor, dropped: torch.Tensor) -> Routing:
        """The routing of router scores and what the experts got by them."""
        wide = full_precision(scores_NE)
        logarithms = wide.log_softmax(dim=-1)
        shares = logarithms.exp()
        return Routing(
            counts,
            shares.sum(dim=0),
            wide.logsumexp(dim=-1).square().sum(),
            -(shares * logarithms).detach().sum(dim=-1).sum() / max(len(scores_NE), 1),
            dropped,
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


@contextmanager
def masked_rows(net: nn.Module, mask: torch.Tensor | None) -> Iterator[None]:
    """Every :class:`MoELinear` of ``net`` leaves out the rows where ``mask`` is false.

    For nets that pass no mask to their layers: ``mask`` (B, T) for hidden states (B, T, D).
    """
    layers = [m for m in net.modules() if isinstance(m, MoELinear)]
    before = [layer.row_mask for layer in layers]
    try:
        for layer in layers:
            layer.row_mask = mask
        yield
    finally:
        for layer, earlier in zip(layers, before):
            layer.row_mask = earlier


def expert_loads(net: nn.Module) -> dict[str, list[float]]:
    """The load of every expert in the last forward, by the name of its layer.

    A load is the expert's share of the layer's assignments times the number of experts:
    1 everywhere when even, 0 for an expert that got no row.
    """
    found = {}
    for name, layer in net.named_modules():
        if isinstance(layer, MoELinear) and layer.last_routing is not None:
            counts = layer.last_routing.counts
            shares = counts * len(counts) / counts.sum().clamp(min=1)
            found[name] = [float(share) for share in shares.tolist()]
    return found
