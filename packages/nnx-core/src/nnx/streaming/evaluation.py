"""Validation steps: the bounded one, and how a custom one is run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from nnx.data.loading import fast_batches
from nnx.monitors.declared import check_metrics
from nnx.params.registered import MetricSpec
from nnx.prediction import batches
from nnx.prediction.inference import EvaluationTotals
from nnx.records import NNEvaluationDataPoint
from nnx.streaming.metrics import is_bounded
from nnx.utils.modes import eval_mode


def streaming_eval_step(ctx: Any) -> NNEvaluationDataPoint:
    """An ``eval_step_fn``: the record of ``evaluate()``, in memory that never grows.

    ``ctx`` is an ``EvalStepContext``. Refuses ``extra_metrics``, which need
    every prediction at once, and declared metrics that store their scores;
    both are refused before a run starts.
    """
    check_eval_step(streaming_eval_step, extra_metrics=ctx.extra_metrics, metrics=ctx.metrics)
    check_metrics(ctx.model, ctx.metrics)
    totals = EvaluationTotals(ctx.model, ctx.metrics)
    for batch in fast_batches(ctx.val_loader):
        with batches.inference_context(ctx.model):
            totals.add(*batches.forward_batch(ctx.model, batch))
    if not totals.batches:
        raise ValueError("the validation loader yielded no batches: there is nothing to evaluate")
    return totals.record()


def check_eval_step(
    step: Callable[..., Any] | None,
    *,
    extra_metrics: Mapping[str, Callable[..., float]] | None,
    metrics: Sequence[MetricSpec] = (),
) -> None:
    """Refuse a run whose :func:`streaming_eval_step` could not serve it.

    Looks at the step itself or a ``functools.partial`` of it; a step that wraps
    it is a step of its own and meets the same refusals at its first call.
    """
    for _, problem in eval_step_problems(step, extra_metrics=extra_metrics, metrics=metrics):
        raise ValueError(problem)


def eval_step_problems(
    step: Callable[..., Any] | None,
    *,
    extra_metrics: Mapping[str, Callable[..., float]] | None,
    metrics: Sequence[MetricSpec] = (),
) -> Iterator[tuple[str, str]]:
    """What :func:`check_eval_step` refuses, as (field, message): "extra_metrics", "metrics[0]"."""
    if not is_streaming(step):
        return
    if extra_metrics:
        yield (
            "extra_metrics",
            f"streaming_eval_step cannot compute extra_metrics ({', '.join(extra_metrics)}): they "
            "are called on all predictions at once. Declare metrics=[MetricSpec(...)], or use the "
            "default validation step.",
        )
    for index, spec in enumerate(metrics):
        if not is_bounded(spec):
            yield (
                f"metrics[{index}]",
                f"metrics[{index}] ({spec.id}@v{spec.version}) stores every score, which "
                "streaming_eval_step does not; use the default validation step for it",
            )


def is_streaming(step: Any) -> bool:
    """Whether ``step`` is :func:`streaming_eval_step` or a ``functools.partial`` of it."""
    while isinstance(step, functools.partial):
        step = step.func
    return step is streaming_eval_step


def run_eval_step(step: Callable[[Any], Any], ctx: Any) -> NNEvaluationDataPoint:
    """Call a custom ``eval_step_fn`` once: no gradients, eval mode, every mode restored."""
    with eval_mode(ctx.model.net), torch.no_grad():
        record = step(ctx)
    if not isinstance(record, NNEvaluationDataPoint):
        raise TypeError(
            f"eval_step_fn must return an NNEvaluationDataPoint, not {type(record).__name__}"
        )
    return record
