"""Exact figures of links, beside scikit-learn and by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nnx.link_tasks import LinkTaskError, MetricValue, link_metrics, link_ranking
from sklearn.metrics import average_precision_score, log_loss, roc_auc_score


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=40))
def test_auroc_ap_and_bce_are_scikit_learn_s_with_ties(rows):
    logits, targets = np.array([r[0] for r in rows], float), np.array([r[1] for r in rows])
    found = link_metrics(logits, targets, from_logits=True)
    chances = 1 / (1 + np.exp(-logits))
    assert found["bce"].value == pytest.approx(log_loss(targets, chances, labels=[0, 1]))
    if targets.all() or not targets.any():
        assert found["auroc"].value is None
        assert found["ap"].value is None
        missing = "negative" if targets.all() else "positive"
        assert found["auroc"].reason == f"there is no {missing} among the candidates"
        return
    assert found["auroc"].value == pytest.approx(roc_auc_score(targets, logits))
    assert found["ap"].value == pytest.approx(average_precision_score(targets, logits))
    assert link_metrics(chances, targets)["bce"].value == pytest.approx(found["bce"].value)


def test_confident_logits_are_told_apart_where_probabilities_are_not():
    logits = torch.tensor([40.0, 50.0, 60.0, 45.0])
    targets = torch.tensor([0, 1, 1, 0])
    exact = link_metrics(logits, targets, from_logits=True)
    assert exact["auroc"].value == 1
    assert exact["bce"].value == pytest.approx((40 + 45) / 4)
    rounded = link_metrics(logits.double().sigmoid(), targets)
    assert rounded["auroc"].value == 0.5
    assert rounded["bce"].value == np.inf


def test_categories_have_accuracy_and_nll():
    logits = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0], [1.0, 0.0, 0.0]])
    targets = torch.tensor([0, 1, 2])
    found = link_metrics(logits, targets, from_logits=True)
    assert found["accuracy"].value == pytest.approx(2 / 3)
    expected = torch.nn.functional.cross_entropy(logits.double(), targets).item()
    assert found["nll"].value == pytest.approx(expected)
    assert link_metrics(logits.softmax(1), targets)["nll"].value == pytest.approx(
        expected, rel=1e-6
    )


def test_the_rank_of_a_positive_follows_the_policy_of_ties():
    scores, targets = [5.0, 2.0, 4.0, 2.0, 1.0, 2.0], [1, 1, 0, 0, 0, 0]
    # The positive of 5 is first; that of 2 is behind 4 and tied with two others.
    for ties, rank in (("pessimistic", 4), ("average", 3), ("optimistic", 2)):
        found = link_ranking(scores, targets, k=(1, 3), ties=ties)
        assert found["mrr"].value == pytest.approx((1 + 1 / rank) / 2)
        assert found["hits@1"].value == 0.5
        assert found["hits@3"].value == (1.0 if rank <= 3 else 0.5)


def test_a_constant_scorer_earns_nothing():
    scores, targets = np.zeros(200), np.arange(200) < 100
    found = link_ranking(scores, targets)
    assert (found["hits@100"].value, found["mrr"].value) == (0, pytest.approx(1 / 101))
    assert link_metrics(scores, targets, from_logits=True)["auroc"].value == 0.5


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=2, max_size=30))
def test_ranks_are_those_of_a_count_over_all_negatives(rows):
    scores, targets = [float(r[0]) for r in rows], [int(r[1]) for r in rows]
    found = link_ranking(scores, targets, k=(2,))
    if len(set(targets)) < 2:
        assert found["mrr"].value is None
        return
    negatives = [s for s, t in zip(scores, targets) if not t]
    ranks = [1 + sum(n >= s for n in negatives) for s, t in zip(scores, targets) if t]
    assert found["mrr"].value == pytest.approx(np.mean([1 / r for r in ranks]))
    assert found["hits@2"].value == pytest.approx(np.mean([r <= 2 for r in ranks]))


@pytest.mark.parametrize(
    ("scores", "targets", "options", "message"),
    [
        ([0.2, 1.2], [0, 1], {}, "pass from_logits=True"),
        ([0.2, np.nan], [0, 1], {}, "must be finite"),
        ([0.2, 0.4], [0, 2], {}, "must be 0 or 1"),
        ([0.2, 0.4], [0], {}, "do not fit"),
        ([[0.2, 0.8]], [2], {}, "category indices below 2"),
        (["a"], [1], {}, "must be numbers"),
    ],
)
def test_what_cannot_be_scored_is_refused(scores, targets, options, message):
    with pytest.raises(LinkTaskError, match=message):
        link_metrics(scores, targets, **options)


def test_nothing_to_score_says_so():
    assert link_metrics([], []) == {
        name: MetricValue(None, "there is no candidate") for name in ("auroc", "ap", "bce")
    }
    with pytest.raises(ValueError, match="ties must be one of"):
        link_ranking([1.0], [1], ties="none")
