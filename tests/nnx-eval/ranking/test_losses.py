"""Ranking losses against plain loops over pairs and lists, values and gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from nnx import ranking as R
from nnx.ranking import losses
from torch.nn import functional as F


def batch(seed: int, rows: int = 40, queries: int = 7):
    draw = np.random.default_rng(seed)
    scores = torch.from_numpy(draw.normal(size=rows)).requires_grad_()
    relevance = torch.from_numpy(draw.integers(0, 4, rows))
    return scores, relevance, [f"q{i}" for i in draw.integers(0, queries, rows)]


def by_query(ids):
    return [[i for i, q in enumerate(ids) if q == query] for query in dict.fromkeys(ids)]


def pairs(rows, relevance):
    return [(i, j) for i in rows for j in rows if relevance[i] > relevance[j]]


def plain_pairwise(scores, relevance, ids, weighting):
    total, count = 0.0, 0
    for rows in by_query(ids):
        found = [F.softplus(scores[j] - scores[i]) for i, j in pairs(rows, relevance)]
        if found:
            mean = weighting == "query"
            total = total + sum(found) / (len(found) if mean else 1)
            count += 1 if mean else len(found)
    return total, count


def plain_lambdarank(scores, relevance, ids):
    total, count = 0.0, 0
    for rows in by_query(ids):
        order = sorted(rows, key=lambda i: -float(scores[i].detach()))
        place = {i: 1 / math.log2(r + 2) for r, i in enumerate(order)}
        gain = {i: 2.0 ** int(relevance[i]) - 1 for i in rows}
        ideal = sum(g / math.log2(r + 2) for r, g in enumerate(sorted(gain.values())[::-1]))
        found = pairs(rows, relevance)
        count += bool(found)
        for i, j in found:
            moved = abs(gain[i] - gain[j]) * abs(place[i] - place[j]) / ideal
            total = total + moved * F.softplus(scores[j] - scores[i])
    return total, count


def plain_listwise(scores, relevance, ids):
    total, count = 0.0, 0
    for rows in by_query(ids):
        grades = relevance[rows].double()
        if grades.sum() > 0:
            total = total - (grades / grades.sum() * F.log_softmax(scores[rows], 0)).sum()
            count += 1
    return total, count


@pytest.mark.parametrize("block", [1, 9, 1 << 20])
@pytest.mark.parametrize("name", ["query", "pair", "lambdarank", "listwise"])
def test_values_and_gradients_are_those_of_a_loop(name, block, monkeypatch) -> None:
    monkeypatch.setattr(losses, "_BLOCK", block)
    for seed in range(3):
        scores, relevance, ids = batch(seed)
        if name in ("query", "pair"):
            found = R.pairwise_logistic_loss(scores, relevance, ids, weighting=name)
            wanted = plain_pairwise(scores, relevance, ids, name)
        else:
            ours = {"lambdarank": R.lambdarank_loss, "listwise": R.listwise_softmax_loss}[name]
            plain = {"lambdarank": plain_lambdarank, "listwise": plain_listwise}[name]
            found, wanted = ours(scores, relevance, ids), plain(scores, relevance, ids)
        assert found[1] == wanted[1]
        torch.testing.assert_close(found[0], wanted[0])
        ((ours_gradient,), (gradient,)) = (
            torch.autograd.grad(loss[0] / loss[1], scores) for loss in (found, wanted)
        )
        torch.testing.assert_close(ours_gradient, gradient)


def test_the_worked_example() -> None:
    loss, queries = R.pairwise_logistic_loss(torch.tensor([2.0, 0.0]), torch.tensor([1, 0]), [1, 1])
    assert float(loss) == pytest.approx(math.log(1 + math.exp(-2)))
    assert queries == 1


@pytest.mark.parametrize("loss", [R.pairwise_logistic_loss, R.lambdarank_loss])
def test_equal_grades_make_no_pair(loss) -> None:
    scores = torch.tensor([2.0, 0.0, 1.0], requires_grad=True)
    value, count = loss(scores, torch.tensor([1, 1, 0]), ["a", "a", "b"])
    assert (float(value), count) == (0.0, 0)
    value.backward()  # still a part of the graph
    assert scores.grad.tolist() == [0, 0, 0]
    empty, count = loss(torch.zeros(0), torch.zeros(0, dtype=torch.long), [])
    assert (float(empty), count) == (0.0, 0)


def test_memory_of_pairs_is_linear() -> None:
    """20,000 candidates have 10^8 pairs, which would be 400 MB at once."""
    scores = torch.linspace(-1, 1, 20_000, requires_grad=True)
    relevance = (torch.arange(20_000) >= 19_990).long()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: sizes.append(t.numel()) or t, lambda t: t
    ):
        sizes: list[int] = []
        loss, _ = R.pairwise_logistic_loss(scores, relevance, [0] * 20_000)
    assert sum(sizes) <= 20_000
    wanted = F.softplus(scores[None, :19_990] - scores[19_990:, None]).mean()
    torch.testing.assert_close(loss, wanted.float(), rtol=1e-4, atol=1e-5)


def test_in_batch_softmax_leaves_out_accidental_hits_and_corrects_frequency() -> None:
    torch.manual_seed(0)
    queries, items = torch.randn(4, 3), torch.randn(4, 3)
    frequency = torch.tensor([0.5, 0.1, 0.5, 0.2]).log()
    loss, count = R.sampled_softmax_loss(
        queries, items, ["x", "y", "x", "z"], log_frequency=frequency, temperature=0.5
    )
    wanted = 0.0
    for i, negatives in enumerate([[1, 3], [0, 2, 3], [1, 3], [0, 1, 2]]):
        logits = queries[i] @ items.T / 0.5 - frequency
        wanted = wanted - logits[i] + torch.logsumexp(logits[[i, *negatives]], 0)
    assert count == 4
    torch.testing.assert_close(loss, wanted)
    with pytest.raises(R.RankingError, match="temperature"):
        R.sampled_softmax_loss(queries, items, [1, 2, 3, 4], temperature=0.0)


def test_what_is_no_batch_of_scores_is_refused() -> None:
    grades = torch.tensor([1, 0])
    with pytest.raises(R.RankingError, match="weighting"):
        R.pairwise_logistic_loss(torch.zeros(2), grades, [1, 1], weighting="row")
    with pytest.raises(R.RankingError, match="2 scores but 1 query_ids"):
        R.pairwise_logistic_loss(torch.zeros(2), grades, [1])
    with pytest.raises(R.RankingError, match=r"tensor \(N,\)"):
        R.pairwise_logistic_loss(torch.zeros(2, 1), grades, [1, 1])
