"""Validation by query: rows are gathered, joined by query and ranked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from nnx.prediction.batches import inference_context
from nnx.ranking.declaration import KIND, Declaration
from nnx.ranking.losses import pairwise_logistic_loss
from nnx.ranking.metrics import (
    METRICS,
    Id,
    RankedQueries,
    RankingError,
    check_grades,
    checked_ids,
    id_ranks,
    numbered,
)
from nnx.records import NNEvaluationDataPoint
from nnx.utils.modes import eval_mode


@dataclass(slots=True)
class Figures:
    """Sums over queries, so that parts of a stream add up."""

    sums: dict[str, list[float]] = field(default_factory=dict)
    loss: list[float] = field(default_factory=list)
    pairs: int = 0  # the loss's denominator
    queries: int = 0
    excluded: int = 0
    candidates: int = 0

    def values(self) -> dict[str, float]:
        """Means over the scored queries; empty when there is none."""
        if not self.queries:
            return {}
        return {name: math.fsum(parts) / self.queries for name, parts in self.sums.items()}

    def mean_loss(self) -> float | None:
        return math.fsum(self.loss) / self.pairs if self.pairs else None

    def tuple(self) -> tuple[dict[str, float], int, int, int]:
        return self.values(), self.queries, self.excluded, self.candidates


class Rows:
    """The rows of a stream, until they are ranked."""

    def __init__(self, task: Declaration, *, with_loss: bool = False) -> None:
        self.task = task
        self.figures = Figures()
        self._with_loss = with_loss
        self._queries: list[Id] = []
        self._candidates: list[Id] = []
        self._scores: list[np.ndarray] = []
        self._grades: list[np.ndarray] = []
        self._finished: set[Id] = set()  # of a grouped stream
        self._kinds: dict[str, type] = {}

    def add(
        self, queries: Sequence[Id], candidates: Sequence[Id], scores: np.ndarray, grades: Any
    ) -> None:
        """Add rows; a grouped stream ranks the queries that have ended."""
        task = self.task
        for name, ids in (("query_ids", queries), ("candidate_ids", candidates)):
            for value in checked_ids(ids, name)[:1]:
                if self._kinds.setdefault(name, type(value)) is not type(value):
                    raise RankingError(
                        f"{name} must all be integers or all be strings, in all batches"
                    )
        scores = np.asarray(scores, dtype=np.float64)
        if not bool(np.isfinite(scores).all()):
            raise RankingError("the scorer gave scores that are not finite")
        self._grades.append(check_grades(grades, len(queries), at_most=task.max_relevance))
        self._scores.append(scores)
        self._queries += queries
        self._candidates += candidates
        if task.grouped:
            self._rank_ended()
        if len(self._queries) > task.max_buffered:
            raise RankingError(
                f"there are more than max_buffered={task.max_buffered} rows to hold; raise it in "
                "the RankingTask, or declare grouped=True for a loader that gives a query's rows "
                "together"
            )

    def finish(self) -> Figures:
        """Rank what is left."""
        self._rank(len(self._queries))
        return self.figures

    def _rank_ended(self) -> None:
        queries = self._queries
        end = len(queries)
        while end and queries[end - 1] == queries[-1]:
            end -= 1
        if end:
            self._rank(end)

    def _rank(self, count: int) -> None:
        """Score the first ``count`` rows and let go of them."""
        if not count:
            return
        task, figures = self.task, self.figures
        scores, grades = np.concatenate(self._scores), np.concatenate(self._grades)
        queries, candidates = self._queries[:count], self._candidates[:count]
        self._queries, self._candidates = self._queries[count:], self._candidates[count:]
        self._scores, self._grades = [scores[count:]], [grades[count:]]
        if task.grouped:
            self._note_finished(queries)
        group, tie = numbered(queries), id_ranks(candidates)
        self._check_repeats(group, tie, queries, candidates)
        scores, grades = scores[:count], grades[:count]
        sizes = np.bincount(group)
        self._check_sizes(sizes, group, queries)
        scored = np.bincount(group, grades >= task.relevance_threshold) > 0
        rows = scored[group]
        figures.queries += int(scored.sum())
        figures.excluded += int((~scored).sum())
        figures.candidates += int(rows.sum())
        if not rows.any():
            return
        ranked = RankedQueries.of(
            group[rows], grades[rows], scores[rows], tie[rows],
            threshold=task.relevance_threshold, max_relevance=task.max_relevance,
        )  # fmt: skip
        for k in task.k:
            for name in task.metrics:
                values = METRICS[name](ranked, k)
                figures.sums.setdefault(f"{name}_at_{k}", []).append(math.fsum(values))
        if self._with_loss:
            loss, pairs = pairwise_logistic_loss(
                torch.from_numpy(scores[rows]), torch.from_numpy(grades[rows]), group[rows],
                weighting=task.weighting,
            )  # fmt: skip
            figures.loss.append(float(loss))
            figures.pairs += pairs

    def _note_finished(self, queries: Sequence[Id]) -> None:
        before = None
        for query in queries:
            if query == before:
                continue
            if query in self._finished:
                raise RankingError(
                    f"the rows of query {query!r} do not come together, though the task says "
                    "grouped=True"
                )
            self._finished.add(query)
            before = query

    def _check_repeats(
        self, group: np.ndarray, tie: np.ndarray, queries: Sequence[Id], candidates: Sequence[Id]
    ) -> None:
        order = np.lexsort((tie, group))
        same = (np.diff(group[order]) == 0) & (np.diff(tie[order]) == 0)
        if same.any():
            row = int(order[np.flatnonzero(same)[0]])
            raise RankingError(
                f"query {queries[row]!r} has the candidate {candidates[row]!r} twice"
            )

    def _check_sizes(self, sizes: np.ndarray, group: np.ndarray, queries: Sequence[Id]) -> None:
        task = self.task
        largest = max(task.k)
        wrong = sizes != task.group_size if task.group_size is not None else sizes < largest
        if not wrong.any():
            return
        which = int(np.flatnonzero(wrong)[0])
        query = queries[int(np.flatnonzero(group == which)[0])]
        if task.group_size is not None:
            raise RankingError(
                f"query {query!r} has {sizes[which]} candidates, not group_size={task.group_size}"
            )
        raise RankingError(
            f"k={largest} is more than the {sizes[which]} candidates of query {query!r}"
        )


class RankingEval:
    """The validation of a run: every query scored once, over the whole loader."""

    def __init__(self, task: Declaration) -> None:
        self.task = task

    def __call__(self, ctx: Any) -> Any:
        figures = self._read(ctx.model, ctx.val_loader)
        task = self.task
        metrics: dict[str, float] = {"excluded_queries": float(figures.excluded)}
        if not figures.queries:
            return NNEvaluationDataPoint(kind=KIND, count=0, status="empty", metrics=metrics)
        metrics = {
            **figures.values(),
            "queries": float(figures.queries),
            **metrics,
            "candidates": float(figures.candidates),
            "candidates_per_query": figures.candidates / figures.queries,
            "exhaustive_candidates": float(task.candidate_sets == "exhaustive"),
        }
        return NNEvaluationDataPoint(
            kind=KIND, count=figures.queries, status="ok", loss=figures.mean_loss(), metrics=metrics
        )

    def _read(self, model: Any, loader: Iterable[Any]) -> Figures:
        task = self.task
        rows = Rows(task, with_loss=True)
        with eval_mode(model.net), inference_context(model):
            for batch in loader:
                features, queries, candidates, relevance, mask = task.split(batch)
                scores = task.scores(model, features, len(queries)).double().cpu()
                if mask is not None:
                    kept = mask.nonzero()[:, 0]
                    scores, relevance = scores[kept], relevance[kept]
                    queries = [queries[i] for i in kept.tolist()]
                    candidates = [candidates[i] for i in kept.tolist()]
                rows.add(queries, candidates, scores.numpy(), relevance)
        return rows.finish()
