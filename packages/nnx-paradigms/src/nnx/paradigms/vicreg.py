"""VICReg: views that agree, dimensions that vary and say different things."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from nnx.distributed.process import rank_and_world
from nnx.objectives import LossTerm, Objective, ObjectiveContext, ObjectiveResult
from nnx.paradigms.collapse import embedding_metrics
from nnx.paradigms.contrastive import two_views
from nnx.paradigms.gathering import gather_rows
from nnx.records import NNEvaluationDataPoint
from nnx.utils import validation as check


class VICRegObjective(Objective):
    """VICReg of two views of every sample (Bardes et al. 2021, arXiv:2105.04906).

    ``invariance`` times the mean squared difference of the views, ``variance`` times the
    hinge of each dimension's deviation at 1, and ``covariance`` times the squared
    covariances between dimensions over their number: one term, ``"vicreg"``. Statistics
    are those of the rows of all processes. The record has :func:`embedding_metrics`.

    Raises ``ValueError`` for negative weights and, when it runs, for fewer than 2 samples.
    """

    def __init__(
        self,
        *,
        invariance: float = 25.0,
        variance: float = 25.0,
        covariance: float = 1.0,
        nonfinite: str = "fail",
    ) -> None:
        super().__init__(nonfinite=nonfinite)
        self.invariance, self.variance, self.covariance = (
            float(check.real("VICRegObjective", name, value, at_least=0))
            for name, value in (
                ("invariance", invariance),
                ("variance", variance),
                ("covariance", covariance),
            )
        )

    def __call__(self, ctx: ObjectiveContext) -> ObjectiveResult:
        views = two_views(ctx.batch, ctx.model.device)
        own = [ctx.full_precision(ctx.model.net(view)) for view in views]
        first, second = (gather_rows(z)[0] for z in own)
        if first.dim() != 2 or len(first) < 2:
            raise ValueError(
                f"VICReg compares at least 2 embeddings (B, D), not {tuple(first.shape)}"
            )
        loss = (
            self.invariance * F.mse_loss(first, second)
            + self.variance * sum(_hinge(z) for z in (first, second)) / 2
            + self.covariance * sum(_off_diagonal(z) for z in (first, second))
        )
        # Every process computes the whole loss, and gradients cross between them: one
        # denominator for all.
        rows = len(first) / rank_and_world()[1]
        record = NNEvaluationDataPoint(metrics=embedding_metrics(first))
        return ObjectiveResult((LossTerm("vicreg", loss * rows, rows),), record)


def vicreg_objective(**options: Any) -> VICRegObjective:
    """VICReg as an objective; ``options`` are those of :class:`VICRegObjective`."""
    return VICRegObjective(**options)


def of_config(config: Mapping[str, Any]) -> VICRegObjective:
    """The factory of ``"paradigms.vicreg"``: the arguments of :class:`VICRegObjective`."""
    return VICRegObjective(**config)


def _hinge(z: torch.Tensor) -> torch.Tensor:
    return F.relu(1.0 - (z.var(dim=0) + 1e-4).sqrt()).mean()


def _off_diagonal(z: torch.Tensor) -> torch.Tensor:
    centred = z - z.mean(dim=0)
    covariance = centred.T @ centred / (len(z) - 1)
    return (covariance.square().sum() - covariance.diagonal().square().sum()) / z.shape[1]
