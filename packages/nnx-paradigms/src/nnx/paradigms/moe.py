"""Training nets with mixtures of experts: the supervised loss and the balance of the experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from nnx.objectives import LossTerm, Objective, ObjectiveContext, ObjectiveResult
from nnx.objectives.supervised import score, single_input, supervised_terms_of
from nnx.paradigms.experts import MoELinear, Routing, masked_rows
from nnx.paradigms.gathering import sum_over_ranks
from nnx.paradigms.imperative import ImperativeStep
from nnx.prediction.batches import forward_batch
from nnx.tasks.recorder import score_batch
from nnx.utils import validation as check

if TYPE_CHECKING:
    from nnx.engine.contexts import TrainStepFn
    from torch import nn


METRICS = ("moe_dead_experts", "moe_max_load", "moe_entropy", "moe_dropped")

RowMask = Callable[[Any], torch.Tensor]
"""A batch to booleans (...): which rows of the layers' inputs are no padding."""


def moe_train_step_factory(*, aux_loss_weight: float = 0.01) -> TrainStepFn:
    """:class:`MoEObjective` as a ``train_step_fn`` in full precision.

    Raises ``ValueError`` for a negative ``aux_loss_weight``.
    """
    return ImperativeStep(MoEObjective(aux_loss_weight=aux_loss_weight))


def moe_objective(
    *,
    aux_loss_weight: float = 0.01,
    z_loss_weight: float = 0.0,
    row_mask: RowMask | None = None,
    nonfinite: str = "fail",
) -> MoEObjective:
    """Train a mixture of experts; see :class:`MoEObjective`."""
    return MoEObjective(
        aux_loss_weight=aux_loss_weight,
        z_loss_weight=z_loss_weight,
        row_mask=row_mask,
        nonfinite=nonfinite,
    )


class MoEObjective(Objective):
    """The model's own loss and, weighted by ``aux_loss_weight``, the balance of its experts.

    The terms are ``"supervised"`` and ``"balance"``, the sum over the net's
    :class:`MoELinear` layers of Switch's balance loss, over the rows of all processes. A
    net without such layers trains as by the supervised objective. Balance is a matter of
    a microbatch: an accumulated window averages it, it is not that of the joined rows.
    With ``z_loss_weight`` the term ``"router_z"`` keeps the routers' scores small: the mean
    squared log-normalizer, summed over the layers (Zoph et al. 2022, arXiv:2202.08906).

    ``row_mask(batch)`` says, as booleans, which positions of the layers' inputs are no
    padding; the others go to no expert and count nowhere (see :func:`masked_rows`).

    Records carry ``moe_dead_experts`` (without a row in this batch, over all layers),
    ``moe_max_load`` (the largest share of a layer's assignments times its experts, 1 when
    even), ``moe_entropy`` (the mean entropy of the routers, in nats) and ``moe_dropped``
    (the share of assignments beyond the experts' capacity).
    """

    def __init__(
        self,
        *,
        aux_loss_weight: float = 0.01,
        z_loss_weight: float = 0.0,
        row_mask: RowMask | None = None,
        nonfinite: str = "fail",
    ) -> None:
        super().__init__(nonfinite=nonfinite)
        if row_mask is not None and not callable(row_mask):
            check.refuse_type("MoEObjective", "row_mask", row_mask, "callable")
        self.row_mask = row_mask
        self.z_loss_weight = float(
            check.real("MoEObjective", "z_loss_weight", z_loss_weight, at_least=0)
        )
        self.aux_loss_weight = float(
            check.real("MoEObjective", "aux_loss_weight", aux_loss_weight, at_least=0)
        )

    def __call__(self, ctx: ObjectiveContext) -> ObjectiveResult:
        single_input(ctx.model, ctx.batch, owner="the mixture of experts")
        net = ctx.model.net
        mask = None if self.row_mask is None else self.row_mask(ctx.batch)
        with nullcontext() if mask is None else masked_rows(net, mask):
            output, target = forward_batch(ctx.model, ctx.batch)
        supervised = score(ctx, output, target)
        terms = supervised_terms_of(supervised)
        routings = routings_of(net)
        record = score_batch(ctx.model, supervised, loss=None, extra_metrics=ctx.extra_metrics)
        if routings:
            totals = totals_of(routings)
            sums = [r.balance_sum(counts) for r, (counts, _) in zip(routings, totals)]
            terms = (*terms, _over_rows("balance", sums, routings, self.aux_loss_weight))
            if self.z_loss_weight:
                z = [r.z for r in routings]
                terms = (*terms, _over_rows("router_z", z, routings, self.z_loss_weight))
            metrics = {**record.metrics, **routing_metrics(totals, [r.entropy for r in routings])}
            record = replace(record, metrics=metrics)
        return ObjectiveResult(terms, record)


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


def totals_of(routings: Sequence[Routing]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each layer's assignments (E,) and how many were dropped, over all processes."""
    parts = [torch.cat((r.counts, r.dropped[None])) for r in routings]
    whole = sum_over_ranks(torch.cat(parts)).split([len(part) for part in parts])
    return [(part[:-1], part[-1]) for part in whole]


def routing_metrics(
    totals: Sequence[tuple[torch.Tensor, torch.Tensor]], entropies: Sequence[torch.Tensor]
) -> dict[str, float]:
    """The named metrics of layers' assignments, in one read."""
    dead = torch.stack([(counts == 0).sum() for counts, _ in totals]).sum()
    asked = torch.stack([counts.sum() for counts, _ in totals])
    most = torch.stack([counts.max() * len(counts) for counts, _ in totals])
    dropped = torch.stack([lost for _, lost in totals]).sum()
    values = torch.stack(
        (
            dead.double(),
            (most / asked.clamp(min=1)).max().double(),
            torch.stack(list(entropies)).mean().double(),
            dropped.double() / asked.sum().clamp(min=1),
        )
    )
    return dict(zip(METRICS, values.tolist()))


def of_config(config: Mapping[str, Any]) -> MoEObjective:
    """The factory of ``"paradigms.moe"``: the arguments of :class:`MoEObjective`."""
    return MoEObjective(**config)
