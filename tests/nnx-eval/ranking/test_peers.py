"""Figures of many queries beside pytrec_eval and ranx, which are installed by hand (``peers``)."""

from __future__ import annotations

import numpy as np
import pytest
from nnx.ranking import RankingTask

METRICS = ("mrr", "recall", "ndcg", "map", "precision", "hit_rate")


def made(queries: int = 200, candidates: int = 30):
    draw = np.random.default_rng(0)
    scores = draw.random((queries, candidates))
    grades = draw.integers(0, 4, (queries, candidates)) * (draw.random(scores.shape) < 0.3)
    grades[:, 0] = 2
    rows = [
        (f"q{q}", f"d{d}", float(scores[q, d]), int(grades[q, d]))
        for q in range(queries)
        for d in range(candidates)
    ]
    task = RankingTask(k=(5,), max_relevance=3, metrics=METRICS)
    qrels = {
        f"q{q}": {f"d{d}": int(grades[q, d]) for d in range(candidates) if grades[q, d]}
        for q in range(queries)
    }
    run = {
        f"q{q}": {f"d{d}": float(scores[q, d]) for d in range(candidates)} for q in range(queries)
    }
    return task.evaluate_rows(rows)[0], qrels, run


def test_means_are_those_of_trec_eval() -> None:
    trec = pytest.importorskip("pytrec_eval")
    found, qrels, run = made()
    evaluator = trec.RelevanceEvaluator(qrels, {"map_cut.5", "P.5", "recall.5", "success.5"})
    names = {"map": "map_cut_5", "precision": "P_5", "recall": "recall_5", "hit_rate": "success_5"}
    theirs = evaluator.evaluate(run)
    for ours, name in names.items():
        wanted = np.mean([figures[name] for figures in theirs.values()])
        assert found[f"{ours}_at_5"] == pytest.approx(wanted), ours


def test_means_are_those_of_ranx() -> None:
    ranx = pytest.importorskip("ranx")
    found, qrels, run = made()
    names = {
        "mrr": "mrr@5", "recall": "recall@5", "precision": "precision@5", "map": "map@5",
        "ndcg": "ndcg_burges@5", "hit_rate": "hit_rate@5",
    }  # fmt: skip
    theirs = ranx.evaluate(ranx.Qrels(qrels), ranx.Run(run), list(names.values()))
    for ours, name in names.items():
        assert found[f"{ours}_at_5"] == pytest.approx(theirs[name]), ours
