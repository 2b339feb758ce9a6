"""Training nets with mixtures of experts: the supervised loss and the balance of the experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from nnx.objectives import LossTerm, Objective, ObjectiveContext, ObjectiveResult
from nnx.objectives.supervised import score, single_input, supervised_terms_of
from nnx.paradigms.experts import MoELinear, Routing
from nnx.paradigms.gathering import sum_over_ranks
from nnx.paradigms.imperative import ImperativeStep
from nnx.prediction.batches import forward_batch
from nnx.tasks.recorder import score_batch
from nnx.utils import validation as check

if TYPE_CHECKING:
    from nnx.engine.contexts import TrainStepFn
    from torch import nn


def moe_train_step_factory(*, aux_loss_weight: float = 0.01) -> TrainStepFn:
    """:class:`MoEObjective` as a ``train_step_fn`` in full precision.

    Raises ``ValueError`` for a negative ``aux_loss_weight``.
    """
    return ImperativeStep(MoEObjective(aux_loss_weight=aux_loss_weight))


def moe_objective(
    *, aux_loss_weight: float = 0.01, z_loss_weight: float = 0.0, nonfinite: str = "fail"
) -> MoEObjective:
    """Train a mixture of experts; see :class:`MoEObjective`."""
    return MoEObjective(
        aux_loss_weight=aux_loss_weight, z_loss_weight=z_loss_weight, nonfinite=nonfinite
    )


class MoEObjective(Objective):
    """The model's own loss and, weighted by ``aux_loss_weight``, the balance of its experts.

    The terms are ``"supervised"`` and ``"balance"``, the sum over the net's
    :class:`MoELinear` layers of Switch's balance loss, over the rows of all processes. A
    net without such layers trains as by the supervised objective. Balance is a matter of
    a microbatch: an accumulated window averages it, it is not that of the joined rows.
    With ``z_loss_weight`` the term ``"router_z"`` keeps the routers' scores small: the mean
    squared log-normalizer, summed over the layers (Zoph et al. 2022, arXiv:2202.08906).

    Records carry ``moe_dead_experts`` (without a row in this batch, over all layers),
    ``moe_max_load`` (the largest share of a layer's assignments times its experts, 1 when
    even) and ``moe_entropy`` (the mean entropy of the routers, in nats).
    """

    def __init__(
        self,
        *,
        aux_loss_weight: float = 0.01,
        z_loss_weight: float = 0.0,
        nonfinite: str = "fail",
    ) -> None:
        super().__init__(nonfinite=nonfinite)
        self.z_loss_weight = float(
            check.real("MoEObjective", "z_loss_weight", z_loss_weight, at_least=0)
        )
        self.aux_loss_weight = float(
            check.real("MoEObjective", "aux_loss_weight", aux_loss_weight, at_least=0)
        )

    def __call__(self, ctx: ObjectiveContext) -> ObjectiveResult:
        single_input(ctx.model, ctx.batch, owner="the mixture of experts")
        output, target = forward_batch(ctx.model, ctx.batch)
        supervised = score(ctx, output, target)
        terms = supervised_terms_of(supervised)
        routings = routings_of(ctx.model.net)
        record = score_batch(ctx.model, supervised, loss=None, extra_metrics=ctx.extra_metrics)
        if routings:
            terms = (*terms, self._balance(routings))
            if self.z_loss_weight:
                terms = (*terms, self._router_z(routings))
            metrics = {**record.metrics, **_metrics(routings)}
            record = replace(record, metrics=metrics)
        return ObjectiveResult(terms, record)

    def _balance(self, routings: Sequence[Routing]) -> LossTerm:
        sums = [r.balance_sum(sum_over_ranks(r.counts)) for r in routings]
        return _over_rows("balance", sums, routings, self.aux_loss_weight)

    def _router_z(self, routings: Sequence[Routing]) -> LossTerm:
        return _over_rows("router_z", [r.z for r in routings], routings, self.z_loss_weight)


def _over_rows(
    name: str, sums: Sequence[torch.Tensor], routings: Sequence[Routing], weight: float
) -> LossTerm:
    """The layers' means added up; one of other rows (pooled, say) is scaled to the first's."""
    rows = routings[0].rows
    scaled = [total * (rows / max(r.rows, 1)) for total, r in zip(sums, routings)]
    return LossTerm(name, torch.stack(scaled).sum(), rows, weight=weight)


def routings_of(net: nn.Module) -> list[Routing]:
    """The routing of every mixture layer in its last forward."""
    layers = [m for m in net.modules() if isinstance(m, MoELinear)]
    return [layer.last_routing for layer in layers if layer.last_routing is not None]


def _metrics(routings: Sequence[Routing]) -> dict[str, float]:
    dead = torch.stack([(r.counts == 0).sum() for r in routings]).sum()
    loads = [r.counts.max() * len(r.counts) / r.counts.sum().clamp(min=1) for r in routings]
    entropy = torch.stack([r.entropy for r in routings]).mean()
    values = torch.stack((dead.double(), torch.stack(loads).max().double(), entropy.double()))
    return dict(zip(("moe_dead_experts", "moe_max_load", "moe_entropy"), values.tolist()))


def of_config(config: Mapping[str, Any]) -> MoEObjective:
    """The factory of ``"paradigms.moe"``: the arguments of :class:`MoEObjective`."""
    return MoEObjective(**config)
