"""How experts are used over a whole validation set."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nnx.paradigms import monitored
from nnx.paradigms.experts import MoELinear
from nnx.paradigms.gathering import sum_over_ranks
from nnx.paradigms.moe import routing_metrics
from nnx.prediction.inference import evaluate

if TYPE_CHECKING:
    import torch
    from nnx.engine.contexts import EvalStepContext
    from nnx.params import MetricSpec
    from nnx.records import NNEvaluationDataPoint
    from torch import nn


class RoutingProbe:
    """An ``eval_step_fn``: the built-in evaluation, and the experts' loads over all its rows.

    The record also has ``moe_dead_experts``, ``moe_max_load``, ``moe_entropy`` and
    ``moe_dropped`` of the whole validation set (of all processes), as :class:`MoEObjective`
    has them of a batch. Raises ``ValueError`` for a net without :class:`MoELinear`.
    """

    def metric_specs(self) -> list[MetricSpec]:
        """The figures, for ``NNTrainParams(metrics=...)`` and monitors."""
        return monitored.specs(monitored.ROUTING)

    def __call__(self, ctx: EvalStepContext) -> NNEvaluationDataPoint:
        layers = [m for m in ctx.model.net.modules() if isinstance(m, MoELinear)]
        if not layers:
            raise ValueError("RoutingProbe: the net has no MoELinear")
        tallies = [_Tally() for _ in layers]
        own = [m for m in ctx.metrics if not m.id.startswith("paradigms.moe_")]
        with ExitStack() as hooks:
            for layer, tally in zip(layers, tallies):
                hooks.callback(layer.register_forward_hook(tally).remove)
            record = evaluate(ctx.model, ctx.val_loader, ctx.extra_metrics, own)
        totals = [
            (sum_over_ranks(tally.counts), sum_over_ranks(tally.dropped)) for tally in tallies
        ]
        entropies = [sum_over_ranks(t.entropy) / sum_over_ranks(t.rows) for t in tallies]
        metrics = routing_metrics(totals, entropies)
        return replace(record, metrics={**record.metrics, **metrics})


class _Tally:
    """A forward hook that adds up a layer's routings."""

    counts: torch.Tensor
    dropped: torch.Tensor
    entropy: torch.Tensor
    rows: torch.Tensor

    def __init__(self) -> None:
        self._empty = True

    def __call__(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        routing: Any = layer.last_routing
        new = {
            "counts": routing.counts,
            "dropped": routing.dropped,
            "entropy": routing.entropy.double() * routing.rows,
            "rows": routing.entropy.new_tensor(routing.rows).double(),
        }
        for name, value in new.items():
            setattr(self, name, value if self._empty else getattr(self, name) + value)
        self._empty = False
