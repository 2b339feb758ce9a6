"""Losses over the candidates of queries, as sums and what they are means over.

Each returns ``(numerator, denominator)``: a differentiable scalar and a number, of which
the quotient is the loss. Pairs are formed in bounded blocks whose gradient is computed on
the way, so memory is linear in the number of candidates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from nnx.precision import full_precision
from nnx.ranking.metrics import Id, RankingError, check_grades, checked_ids, numbered
from torch.nn import functional as F

WEIGHTINGS = ("query", "pair")
_BLOCK = 1 << 20  # pairs that are in memory at once


def pairwise_logistic_loss(
    scores: torch.Tensor,
    relevance: torch.Tensor,
    query_ids: Sequence[Id],
    *,
    weighting: str = "query",
) -> tuple[torch.Tensor, int]:
    """``Σ log(1 + exp(-(s_hi - s_lo)))`` over the pairs of a query with unequal grades.

    ``scores`` and ``relevance`` are ``(N,)``. With ``weighting="query"`` each query with
    such a pair counts 1, its pairs equally; with ``"pair"`` each pair counts 1. Equal
    grades make no pair. The second value is the number of queries, or of pairs.
    RankNet (Burges et al., 2005).
    """
    if weighting not in WEIGHTINGS:
        raise RankingError(f"weighting must be 'query' or 'pair', not {weighting!r}")
    batch = _Queries(scores, relevance, query_ids)
    pairs = batch.pairs
    if weighting == "query":
        weights = 1.0 / np.maximum(pairs, 1)
        count = int((pairs > 0).sum())
    else:
        weights = np.ones(len(pairs))
        count = int(pairs.sum())
    return batch.pair_sum(weights), count


def lambdarank_loss(
    scores: torch.Tensor, relevance: torch.Tensor, query_ids: Sequence[Id]
) -> tuple[torch.Tensor, int]:
    """The pairwise logistic loss, each pair weighted by the NDCG that swapping it would move.

    The ranks are those of the current scores and take no gradient. A mean over the queries
    with a pair of unequal grades. LambdaRank (Burges, 2010).
    """
    batch = _Queries(scores, relevance, query_ids)
    gains, discounts = batch.gains(), batch.discounts()
    weights = (batch.pairs > 0).astype(np.float64)
    return batch.pair_sum(weights, gains, discounts), int(weights.sum())


def listwise_softmax_loss(
    scores: torch.Tensor, relevance: torch.Tensor, query_ids: Sequence[Id]
) -> tuple[torch.Tensor, int]:
    """The cross-entropy between each query's grades (as shares) and the softmax of its scores.

    A mean over the queries with a grade above 0. ListNet's top-one loss (Cao et al., 2007).
    """
    batch = _Queries(scores, relevance, query_ids)
    group = torch.from_numpy(batch.group).to(scores.device)
    values = batch.scores
    top = torch.full((batch.count,), -math.inf, dtype=values.dtype, device=values.device)
    top = top.scatter_reduce(0, group, values.detach(), "amax")
    powers = torch.exp(values - top[group])
    totals = torch.zeros_like(top).scatter_add(0, group, powers)
    log_share = values - top[group] - totals.log()[group]
    sums = np.bincount(batch.group, batch.grades, minlength=batch.count)
    shares = batch.grades / np.maximum(sums, 1.0)[batch.group]
    target = torch.from_numpy(shares).to(values)
    return -(target * log_share).sum(), int((sums > 0).sum())


def sampled_softmax_loss(
    queries: torch.Tensor,
    candidates: torch.Tensor,
    candidate_ids: Sequence[Id],
    *,
    log_frequency: torch.Tensor | None = None,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, int]:
    """In-batch softmax: candidate ``i`` is the answer to query ``i``, the others are negatives.

    ``queries`` and ``candidates`` are ``(B, D)`` embeddings. A candidate that is the same
    item as the answer is no negative. ``log_frequency`` ``(B,)`` is subtracted from the
    logits, which corrects for popular items being drawn often (Yi et al., 2019).
    """
    ids = checked_ids(candidate_ids, "candidate_ids")
    if queries.ndim != 2 or queries.shape != candidates.shape or len(ids) != len(queries):
        raise RankingError(
            f"queries {tuple(queries.shape)}, candidates {tuple(candidates.shape)} and "
            f"{len(ids)} candidate_ids must be (B, D), (B, D) and B"
        )
    if not temperature > 0:
        raise RankingError(f"temperature must be above 0, not {temperature!r}")
    logits = queries @ candidates.T / temperature
    if log_frequency is not None:
        if log_frequency.shape != (len(ids),):
            raise RankingError(
                f"log_frequency must be ({len(ids)},), not {tuple(log_frequency.shape)}"
            )
        logits = logits - log_frequency.to(logits)
    item = torch.from_numpy(numbered(ids)).to(logits.device)
    same = (item[:, None] == item[None, :]) & ~torch.eye(
        len(ids), dtype=torch.bool, device=logits.device
    )
    answers = torch.arange(len(ids), device=logits.device)
    loss = F.cross_entropy(logits.masked_fill(same, -math.inf), answers, reduction="sum")
    return loss, len(ids)


class _Queries:
    """A batch's rows by query; all that is known without the scores is kept on the host."""

    def __init__(self, scores: torch.Tensor, relevance: Any, query_ids: Sequence[Id]) -> None:
        if not isinstance(scores, torch.Tensor) or scores.ndim != 1:
            raise RankingError(
                f"scores must be a tensor (N,), not {getattr(scores, 'shape', scores)!r}"
            )
        if not scores.is_floating_point():
            raise RankingError(f"scores must be floating, not {scores.dtype}")
        ids = checked_ids(query_ids, "query_ids")
        if len(ids) != len(scores):
            raise RankingError(f"there are {len(scores)} scores but {len(ids)} query_ids")
        self.scores = full_precision(scores)
        self.grades = check_grades(relevance, len(ids)).astype(np.float64)
        self.group = numbered(ids)
        self.count = int(self.group.max(initial=-1)) + 1
        self.sizes = np.bincount(self.group, minlength=self.count)

    @property
    def pairs(self) -> np.ndarray:
        """How many pairs of unequal grades each query has, ``(Q,)``."""
        keys = np.stack([self.group, self.grades.astype(np.int64)])
        found, counts = np.unique(keys, axis=1, return_counts=True)
        equal = np.bincount(found[0], counts.astype(np.float64) ** 2, minlength=self.count)
        return np.rint((self.sizes.astype(np.float64) ** 2 - equal) / 2)

    def gains(self) -> np.ndarray:
        """``2^grade - 1`` over the ideal discounted gain of the query, ``(N,)``."""
        gains = np.exp2(self.grades) - 1.0
        order = np.lexsort((-gains, self.group))
        ranks = np.arange(len(order)) - np.repeat(np.cumsum(self.sizes) - self.sizes, self.sizes)
        ideal = np.bincount(self.group[order], gains[order] / np.log2(ranks + 2.0), self.count)
        return gains / np.where(ideal > 0, ideal, 1.0)[self.group]

    def discounts(self) -> np.ndarray:
        """``1 / log2(rank + 1)`` of each row under the current scores, ``(N,)``."""
        values = self.scores.detach().cpu().double().numpy()
        order = np.lexsort((np.arange(len(values)), -values, self.group))
        ranks = np.arange(len(order)) - np.repeat(np.cumsum(self.sizes) - self.sizes, self.sizes)
        discounts = np.empty(len(values))
        discounts[order] = 1.0 / np.log2(ranks + 2.0)
        return discounts

    def blocks(self, chosen: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Rows above the lowest grade, ``(q, r)``, beside all rows ``(q, L)`` of their queries.

        They are numbers of rows; -1 fills up.
        """
        order = np.lexsort((-self.grades, self.group))
        lowest = np.full(self.count, np.inf)
        np.minimum.at(lowest, self.group, self.grades)
        above = np.bincount(self.group, self.grades > lowest[self.group], minlength=self.count)
        starts = np.cumsum(self.sizes) - self.sizes
        queries = np.flatnonzero(chosen)
        queries = queries[np.argsort(self.sizes[queries], kind="stable")]
        place = 0
        while place < len(queries):
            many = 1  # queries of about one size, as many as fit
            while place + many < len(queries):
                longest = int(self.sizes[queries[place + many]])
                if (many + 1) * longest**2 > _BLOCK:
                    break
                many += 1
            block = queries[place : place + many]
            longest = int(self.sizes[block].max())
            columns = np.arange(longest)
            inside = columns < self.sizes[block][:, None]
            rows = np.where(inside, starts[block][:, None] + columns, 0)
            rows = np.where(inside, order[rows], -1)
            step = max(1, _BLOCK // (many * longest))
            last = int(above[block].max())
            for begin in range(0, last, step):
                yield rows[:, begin : min(begin + step, last)], rows
            place += many

    def pair_sum(
        self,
        weights: np.ndarray,
        gains: np.ndarray | None = None,
        discounts: np.ndarray | None = None,
    ) -> torch.Tensor:
        """The weighted sum over pairs: ``weights`` by query, and |Δgain · Δdiscount| if given."""
        chosen = (self.pairs > 0) & (weights > 0)
        if not chosen.any():
            return self.scores.sum() * 0.0
        total: torch.Tensor = _PairSum.apply(  # type: ignore[no-untyped-call]
            self.scores, self, chosen, weights, gains, discounts
        )
        return total


class _PairSum(torch.autograd.Function):
    """Σ w softplus(-(s_hi - s_lo)), and its gradient from the same pass."""

    @staticmethod
    def forward(
        ctx: Any,
        scores: torch.Tensor,
        batch: _Queries,
        chosen: np.ndarray,
        weights: np.ndarray,
        gains: np.ndarray | None,
        discounts: np.ndarray | None,
    ) -> torch.Tensor:
        device = scores.device
        grades = torch.from_numpy(batch.grades).to(device)
        weight = torch.from_numpy(weights[batch.group]).to(scores)
        gain = None if gains is None else torch.from_numpy(gains).to(scores)
        discount = None if discounts is None else torch.from_numpy(discounts).to(scores)
        wants_gradient = ctx.needs_input_grad[0]
        gradient = torch.zeros_like(scores) if wants_gradient else None
        total = torch.zeros((), dtype=torch.float64, device=device)
        for high_rows, low_rows in batch.blocks(chosen):
            high = torch.from_numpy(np.ascontiguousarray(high_rows)).to(device)
            low = torch.from_numpy(low_rows).to(device)
            is_pair = (high >= 0)[:, :, None] & (low >= 0)[:, None, :]
            high, low = high.clamp_min(0), low.clamp_min(0)
            is_pair &= grades[high][:, :, None] > grades[low][:, None, :]
            factor = weight[high][:, :, None] * is_pair
            if gain is not None and discount is not None:
                factor = factor * (gain[high][:, :, None] - gain[low][:, None, :]).abs()
                factor = factor * (discount[high][:, :, None] - discount[low][:, None, :]).abs()
            margin = scores[high][:, :, None] - scores[low][:, None, :]
            total += (F.softplus(-margin) * factor).sum(dtype=torch.float64)
            if gradient is not None:
                slope = torch.sigmoid(-margin) * factor
                gradient.index_add_(0, high.flatten(), -slope.sum(2).flatten())
                gradient.index_add_(0, low.flatten(), slope.sum(1).flatten())
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return total.to(scores.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return grad * gradient, None, None, None, None, None
