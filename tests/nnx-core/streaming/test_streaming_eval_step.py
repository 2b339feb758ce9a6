"""The bounded validation step writes the record that evaluate() writes."""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace

import pytest
import torch
from nnx import (
    MetricSpec,
    NNEvaluationDataPoint,
    TaskSpec,
    register_metric,
    streaming_eval_step,
    unregister_metric,
)
from nnx.prediction.inference import evaluate
from nnx.streaming import check_eval_step, run_eval_step
from torch import nn

NAN = math.nan


def context(model, loader, metrics=(), extra_metrics=None):
    return SimpleNamespace(
        model=model, val_loader=loader, metrics=tuple(metrics), extra_metrics=extra_metrics,
        epoch_idx=0,
    )  # fmt: skip


def loader(kind, masked=0.3):
    generator = torch.Generator().manual_seed(0)
    for n in (8, 8, 3):
        X = torch.randn(n, 4, generator=generator)
        if kind == "classes":
            target = torch.randint(0, 3, (n,), generator=generator)
            target[torch.rand(n, generator=generator) < masked] = -100
        else:
            target = torch.randn(n, 3, generator=generator)
            target = (target > 0).float() if kind == "labels" else target
            if masked:
                target[torch.rand(n, 3, generator=generator) < masked] = NAN
        yield X, target


@pytest.mark.parametrize(
    ("loss_fn", "task", "kind", "masked", "metrics"),
    [
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 9.0])), None, "classes", 0.3, ["nll", "f1"]),
        (nn.CrossEntropyLoss(reduction="sum"), None, "classes", 0.3, []),
        (nn.BCEWithLogitsLoss(), None, "labels", 0, ["accuracy"]),
        (nn.CrossEntropyLoss(), TaskSpec.categorical(3, ignore_index=-100), "classes", 0.3, ["brier"]),
        (nn.BCEWithLogitsLoss(), TaskSpec.multilabel(3), "labels", 0.3, ["nll"]),
        (nn.MSELoss(), TaskSpec.regression(3), "values", 0.3, ["mae"]),
        (nn.MSELoss(), TaskSpec.regression(3), "values", 1.0, ["mae"]),
    ],
)  # fmt: skip
def test_the_record_is_evaluates(make_model, loss_fn, task, kind, masked, metrics):
    model = make_model(loss_fn, task, nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)))
    specs = [MetricSpec(id) for id in metrics]
    before = [m.training for m in model.net.modules()]
    made = run_eval_step(streaming_eval_step, context(model, list(loader(kind, masked)), specs))
    assert made == evaluate(model, loader(kind, masked), metrics=specs)
    assert [m.training for m in model.net.modules()] == before


class Scores:
    def update(self, target, prediction):
        pass

    def result(self):
        return 1.0


@pytest.fixture
def rank():
    register_metric("test.rank", 1, lambda config: Scores(), input="labels", mode="max")
    yield MetricSpec("test.rank")
    unregister_metric("test.rank", 1)


def test_what_needs_every_prediction_is_refused_before_a_run(rank):
    for step in (streaming_eval_step, functools.partial(functools.partial(streaming_eval_step))):
        with pytest.raises(ValueError, match=r"cannot compute extra_metrics \(auc\)"):
            check_eval_step(step, extra_metrics={"auc": max})
        with pytest.raises(ValueError, match=r"test\.rank@v1\) stores every score"):
            check_eval_step(step, extra_metrics=None, metrics=[rank])
        check_eval_step(step, extra_metrics={}, metrics=[MetricSpec("f1")])
    for step in (None, lambda ctx: streaming_eval_step(ctx)):
        check_eval_step(step, extra_metrics={"auc": max}, metrics=[rank])


def test_a_wrapped_step_refuses_at_its_first_call_before_reading(make_model, rank):
    class Untouched:
        def __iter__(self):
            raise AssertionError("the loader was read")

    model = make_model(net=nn.Linear(4, 3))
    with pytest.raises(ValueError, match="extra_metrics"):
        streaming_eval_step(context(model, Untouched(), extra_metrics={"a": max}))
    with pytest.raises(ValueError, match="stores every score"):
        streaming_eval_step(context(model, Untouched(), [rank]))
    with pytest.raises(ValueError, match="reads continuous"):
        streaming_eval_step(context(model, Untouched(), [MetricSpec("mae")]))


def test_an_empty_validation_loader_is_refused(make_model):
    with pytest.raises(ValueError, match="validation loader yielded no batches"):
        streaming_eval_step(context(make_model(net=nn.Linear(4, 3)), []))


def test_a_custom_step_runs_once_in_eval_mode_without_gradients(make_model):
    net = nn.Sequential(nn.Linear(4, 3), nn.Dropout())
    net[1].eval()
    model = make_model(net=net)
    seen = []

    def step(ctx):
        seen.append(([m.training for m in net.modules()], torch.is_grad_enabled()))
        if ctx.epoch_idx:
            raise RuntimeError("mine")
        return NNEvaluationDataPoint(loss=1.0, extra={"psnr": 30.0})

    record = run_eval_step(step, context(model, []))
    assert record.extra == {"psnr": 30.0}
    assert seen == [([False, False, False], False)]
    failing = context(model, [])
    failing.epoch_idx = 1
    with pytest.raises(RuntimeError, match="mine"):
        run_eval_step(step, failing)
    assert [m.training for m in net.modules()] == [True, True, False]
    with pytest.raises(TypeError, match="must return an NNEvaluationDataPoint, not float"):
        run_eval_step(lambda ctx: 1.0, context(model, []))
