"""Figures of ranked candidates against their definitions, written out, and scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nnx import ranking as R
from sklearn.metrics import average_precision_score, ndcg_score


def plain(relevance, scores, ids, k, *, threshold=1, top=1):
    """Every figure by its definition, one loop each."""
    order = sorted(range(len(ids)), key=lambda i: (-scores[i], ids[i]))
    grades = [relevance[i] for i in order]
    hits = [g >= threshold for g in grades]
    dcg = sum((2**g - 1) / math.log2(r + 2) for r, g in enumerate(grades[:k]))
    best = sum((2**g - 1) / math.log2(r + 2) for r, g in enumerate(sorted(grades)[::-1][:k]))
    err, going_on = 0.0, 1.0
    for r, g in enumerate(grades[:k]):
        stop = (2**g - 1) / 2**top
        err += going_on * stop / (r + 1)
        going_on *= 1 - stop
    return {
        "mrr": next((1 / (r + 1) for r, h in enumerate(hits[:k]) if h), 0.0),
        "recall": sum(hits[:k]) / sum(hits),
        "precision": sum(hits[:k]) / k,
        "hit_rate": float(any(hits[:k])),
        "map": sum(sum(hits[: r + 1]) / (r + 1) for r in range(k) if hits[r]) / sum(hits),
        "ndcg": dcg / best,
        "err": err,
    }


@st.composite
def queries(draw):
    size = draw(st.integers(2, 9))
    grades = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    grades[draw(st.integers(0, size - 1))] = 2
    scores = draw(st.lists(st.integers(-3, 3).map(float), min_size=size, max_size=size))
    ids = draw(st.permutations(range(size)))
    return grades, scores, list(ids), draw(st.integers(1, size))


@given(queries(), st.integers(1, 2))
def test_every_figure_is_that_of_its_definition(query, threshold) -> None:
    grades, scores, ids, k = query
    wanted = plain(grades, scores, ids, k, threshold=threshold, top=3)
    found = {
        "mrr": R.mrr_at_k(grades, scores, ids, k, threshold=threshold),
        "recall": R.recall_at_k(grades, scores, ids, k, threshold=threshold),
        "precision": R.precision_at_k(grades, scores, ids, k, threshold=threshold),
        "hit_rate": R.hit_rate_at_k(grades, scores, ids, k, threshold=threshold),
        "map": R.average_precision_at_k(grades, scores, ids, k, threshold=threshold),
        "ndcg": R.ndcg_at_k(grades, scores, ids, k),
        "err": R.err_at_k(grades, scores, ids, k, max_relevance=3),
    }
    assert found == pytest.approx(wanted)


@given(st.lists(queries(), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_many_queries_in_any_order_give_the_mean_of_each(drawn, random) -> None:
    smallest = min(len(grades) for grades, *_ in drawn)
    task = R.RankingTask(
        k=(1, smallest), max_relevance=3, metrics=tuple(plain([1], [0.0], [0], 1)), grouped=False
    )
    rows = [
        (f"q{q}", c, s, g)
        for q, (grades, scores, ids, _) in enumerate(drawn)
        for g, s, c in zip(grades, scores, ids)
    ]
    random.shuffle(rows)
    values, scored, excluded, candidates = task.evaluate_rows(rows)
    assert (scored, excluded, candidates) == (len(drawn), 0, len(rows))
    for k in task.k:
        each = [plain(g, s, i, k, top=3) for g, s, i, _ in drawn]
        for name in each[0]:
            assert values[f"{name}_at_{k}"] == pytest.approx(np.mean([e[name] for e in each]))


def test_scikit_learn_agrees_where_it_has_the_figure() -> None:
    draw = np.random.default_rng(0)
    for _ in range(20):
        grades, scores = draw.integers(0, 4, 12), draw.normal(size=12)
        grades[0] = 1
        wanted = ndcg_score([2.0**grades - 1], [scores], k=5)
        assert R.ndcg_at_k(grades, scores, range(12), 5) == pytest.approx(wanted)
        wanted = average_precision_score(grades > 0, scores)
        assert R.average_precision_at_k(grades, scores, range(12), 12) == pytest.approx(wanted)


def test_equal_scores_are_ranked_by_candidate_id() -> None:
    assert R.rank([1.0, 1.0, 2.0], ["b", "a", "c"]) == [2, 1, 0]
    assert R.rank([1.0, 1.0, 1.0], [10, 9, 100]) == [1, 0, 2]
    assert R.rank([0.0, 0.0], ["10", "9"]) == [0, 1]  # strings are compared as strings
    assert R.rank([0.0, 0.0], [2**80, 2**70]) == [1, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1, 0], [1.0, 2.0], [1, 2], 3), "k=3 is more than the 2 candidates"),
        (([1, 0], [1.0, 2.0], [1, 2], 0), "k must be an integer >= 1"),
        (([1, 0], [1.0, 2.0], [1, 1], 1), "names 1 twice"),
        (([1, 0], [1.0, 2.0], [1, "a"], 1), "all be integers or all be strings"),
        (([1, 0], [1.0, float("nan")], [1, 2], 1), "finite"),
        (([1, -1], [1.0, 2.0], [1, 2], 1), "grade -1"),
        (([0.5, 1], [1.0, 2.0], [1, 2], 1), "integer grades"),
        (([1], [1.0, 2.0], [1, 2], 1), r"shape \(2,\)"),
        (([0, 0], [1.0, 2.0], [1, 2], 1), "no relevant candidate"),
    ],
)
def test_what_has_no_value_is_refused(arguments, message) -> None:
    with pytest.raises(R.RankingError, match=message):
        R.mrr_at_k(*arguments)


def test_a_query_without_a_relevant_candidate_is_excluded_and_counted() -> None:
    rows = [("a", 1, 2.0, 1), ("a", 2, 1.0, 0), ("b", 1, 2.0, 0), ("b", 2, 1.0, 0)]
    values, scored, excluded, candidates = R.RankingTask(k=(1,)).evaluate_rows(rows)
    assert (values["mrr_at_1"], scored, excluded, candidates) == (1.0, 1, 1, 2)
    assert R.RankingTask(k=(1,)).evaluate_rows(rows[2:]) == ({}, 0, 1, 0)
    assert R.RankingTask(k=(1,)).evaluate_rows([]) == ({}, 0, 0, 0)
