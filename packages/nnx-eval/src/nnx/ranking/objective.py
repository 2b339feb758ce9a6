"""Training a scorer on the candidates of queries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnx.components import ComponentSpec
from nnx.objectives import LossTerm, Objective, ObjectiveContext, ObjectiveResult
from nnx.ranking.declaration import KIND, Declaration
from nnx.ranking.losses import lambdarank_loss, listwise_softmax_loss, pairwise_logistic_loss
from nnx.ranking.metrics import RankingError
from nnx.records import NNEvaluationDataPoint
from nnx.utils import validation as check

LOSSES = ("pairwise_logistic", "lambdarank", "listwise_softmax")


class RankingObjective(Objective):
    """A ranking loss over each microbatch; a query's candidates must be in one batch.

    A component named ``"ranking.task"``: a resume with another task or loss is refused
    before any update.
    """

    def __init__(
        self, task: Declaration, *, nonfinite: str = "fail", loss: str = "pairwise_logistic"
    ) -> None:
        super().__init__(nonfinite=nonfinite)
        if not isinstance(task, Declaration):
            raise RankingError(f"task must be a RankingTask, not {type(task).__name__}")
        self.task = task
        self.loss = check.choice("RankingObjective", "loss", loss, LOSSES)

    def __call__(self, ctx: ObjectiveContext) -> ObjectiveResult:
        task = self.task
        features, queries, _, relevance, mask = task.split(ctx.batch)
        scores = ctx.full_precision(task.scores(ctx.model, features, len(queries)))
        if mask is not None:
            rows = mask.nonzero()[:, 0]
            scores = scores[rows.to(scores.device)]
            queries = [queries[i] for i in rows.tolist()]
            relevance = relevance[rows]
        if self.loss == "pairwise_logistic":
            found = pairwise_logistic_loss(scores, relevance, queries, weighting=task.weighting)
        else:
            function = lambdarank_loss if self.loss == "lambdarank" else listwise_softmax_loss
            found = function(scores, relevance, queries)
        record = NNEvaluationDataPoint(kind=KIND, count=len(set(queries)))
        return ObjectiveResult([LossTerm(self.loss, *found)], record=record)

    def component_spec(self) -> ComponentSpec:
        return ComponentSpec("ranking.task", 1)

    def component_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"task": self.task.state()}
        if self.loss != LOSSES[0]:
            state["loss"] = self.loss
        return state

    def check_component_state(self, state: Mapping[str, Any], *, version: int) -> list[str]:
        saved = dict(state.get("task") or {})
        mine = self.task.state()
        problems = [
            f"the run was trained with {name}={saved.get(name)!r}, but this task has "
            f"{mine.get(name)!r}"
            for name in sorted({*saved, *mine})
            if saved.get(name) != mine.get(name)
        ]
        loss = state.get("loss", LOSSES[0])
        if loss != self.loss:
            problems.append(f"the run was trained with loss={loss!r}, not {self.loss!r}")
        return problems

    def load_component_state(self, state: Mapping[str, Any], *, version: int) -> None:
        if problems := self.check_component_state(state, version=version):
            raise RankingError(problems[0])
