"""The task of ranking: a declaration, and the objective and evaluation that agree on it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from nnx.ranking.declaration import KIND, Declaration
from nnx.ranking.evaluation import RankingEval, Rows
from nnx.ranking.metrics import Id, RankingError
from nnx.ranking.objective import RankingObjective

_PART = 8192  # rows that are taken at once


@dataclass(frozen=True, slots=True)
class RankingTask(Declaration):
    """Candidates with integer grades ``0..max_relevance``, ranked within their query.

    A batch is ``(features, query_ids, candidate_ids, relevance[, mask])`` or a mapping
    with those keys. A candidate of grade ``relevance_threshold`` or above is relevant.
    ``weighting`` is the objective's: every query counts the same, or every pair does.
    ``candidate_sets`` says whether the candidates are all there are. Evaluation holds at
    most ``max_buffered`` rows; with ``grouped=True`` a query's rows come together and only
    those of one query (and of a batch) are held. ``group_size`` is the number of candidates that
    every query must have. ``metrics`` are what is reported at each of ``k``: of "mrr",
    "recall", "ndcg", "map", "err", "precision" and "hit_rate".
    """

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> RankingTask:
        """Rebuild from :meth:`state`."""
        if state.get("kind") != KIND:
            raise RankingError(f"the kind is {state.get('kind')!r}, not {KIND!r}")
        names = {field.name for field in fields(RankingTask)}
        if unknown := sorted(set(state) - names - {"kind"}):
            raise RankingError(f"a RankingTask has no {', '.join(unknown)}")
        values = {name: state[name] for name in names if name in state}
        for name in ("k", "metrics"):
            if name in values:
                values[name] = tuple(values[name])
        return RankingTask(**values)

    def objective(
        self, *, nonfinite: str = "fail", loss: str = "pairwise_logistic"
    ) -> RankingObjective:
        """The loss over each microbatch: "pairwise_logistic", "lambdarank" or "listwise_softmax"."""
        return RankingObjective(self, nonfinite=nonfinite, loss=loss)

    def eval_step(self) -> RankingEval:
        """The validation of a run: exact figures over all queries."""
        return RankingEval(self)

    def evaluate_rows(
        self, rows: Iterable[tuple[Id, Id, float, int]]
    ) -> tuple[dict[str, float], int, int, int]:
        """Figures of ``(query, candidate, score, grade)`` rows in any order.

        Returns the figures by name, and the numbers of scored queries, of excluded queries
        (without a relevant candidate) and of the scored queries' candidates. Without a
        scored query there are no figures.
        """
        buffer, stream = Rows(self), iter(rows)
        while part := list(itertools.islice(stream, _PART)):
            queries, candidates, scores, grades = map(list, zip(*part))
            buffer.add(queries, candidates, np.array(scores), grades)
        return buffer.finish().tuple()
