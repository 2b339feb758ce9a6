"""Declared metrics: what is registered, what it reads, what it gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from nnx import (
    MetricSpec,
    StreamingMetrics,
    TaskSpec,
    register_metric,
    registered_metrics,
    unregister_metric,
)
from nnx.monitors import METRIC_INPUTS, check_metrics
from nnx.monitors.declared import MetricSet
from nnx.plugins.registry import RegistryConflictError, UnknownIdError
from nnx.tasks.semantics import Semantics
from sklearn.metrics import brier_score_loss, f1_score, log_loss, mean_absolute_error
from torch import nn


class Range:
    """Custom: the largest minus the smallest prediction, as numpy arrays are given."""

    def __init__(self, config):
        self.scale = config.get("scale", 1)
        self.low, self.high = np.inf, -np.inf

    def update(self, target, prediction):
        assert isinstance(target, np.ndarray)
        assert isinstance(prediction, np.ndarray)
        self.low, self.high = min(self.low, prediction.min()), max(self.high, prediction.max())

    def result(self):
        return None if self.low > self.high else float(self.high - self.low) * self.scale


@pytest.fixture
def custom():
    def check(config):
        if set(config) - {"scale"}:
            raise ValueError("test.range takes only 'scale'")

    register_metric("test.range", 2, Range, input="continuous", mode="min", check_config=check)
    yield MetricSpec("test.range", 2)
    unregister_metric("test.range", 2)


def test_the_built_ins_are_registered_with_their_inputs_and_directions():
    assert METRIC_INPUTS == ("labels", "probabilities", "continuous")
    declared = {
        id: (MetricSpec(id).input, MetricSpec(id).mode)
        for id in ("accuracy", "f1", "nll", "brier", "mae", "mse")
    }
    assert declared == {
        "accuracy": ("labels", "max"), "f1": ("labels", "max"), "nll": ("probabilities", "min"),
        "brier": ("probabilities", "min"), "mae": ("continuous", "min"),
        "mse": ("continuous", "min"),
    }  # fmt: skip
    assert {(id, 1) for id in declared} <= set(registered_metrics())


def test_a_custom_metric_registers_and_unregisters(custom):
    assert ("test.range", 2) in registered_metrics()
    assert custom.definition.factory is Range
    with pytest.raises(RegistryConflictError, match=r"test\.range@v2 is already registered"):
        register_metric("test.range", 2, Range, input="labels", mode="max")
    assert custom.mode == "min"
    register_metric("test.range", 2, Range, input="labels", mode="max", replace=True)
    assert custom.mode == "max"
    assert unregister_metric("test.range", 2)
    assert not unregister_metric("test.range", 2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"input": "scores", "mode": "min"}, ValueError, "labels, probabilities, continuous"),
        ({"input": "labels", "mode": "up"}, ValueError, "'min' or 'max', not 'up'"),
        ({"input": "labels", "mode": "min", "check_config": 3}, TypeError, "check_config must be"),
    ],
)
def test_a_wrong_registration_is_refused_and_leaves_nothing(arguments, error, message):
    with pytest.raises(error, match=message):
        register_metric("test.wrong", 1, Range, **arguments)
    with pytest.raises(TypeError, match="factory must be callable"):
        register_metric("test.wrong", 1, "not code", input="labels", mode="min")
    assert ("test.wrong", 1) not in registered_metrics()


def test_the_custom_metric_gets_valid_samples_as_arrays(make_model, custom):
    spec = MetricSpec("test.range", 2, {"scale": 10}, name="spread")
    model = make_model(nn.MSELoss(), TaskSpec.regression(1))
    check_metrics(model, [spec])
    metrics = MetricSet([spec], Semantics.of(model))
    assert metrics.values() == {}
    output = torch.tensor([[1.0], [3.0], [100.0]])
    prepared = model.task_adapter.prepare(output, torch.tensor([[0.0], [0.0], [float("nan")]]))
    metrics.update(*prepared)
    assert metrics.values() == {"spread": 20.0}


CE, NLL, BCE, MSE = nn.CrossEntropyLoss(), nn.NLLLoss(), nn.BCEWithLogitsLoss(), nn.MSELoss()


@pytest.mark.parametrize(
    ("loss_fn", "task", "spec", "message"),
    [
        (CE, None, MetricSpec("mae"), "reads continuous, which categorical outputs do not have"),
        (BCE, None, MetricSpec("mse"), "continuous outputs need a regression loss or task"),
        (MSE, TaskSpec.regression(1), MetricSpec("nll"), "probabilities need a categorical"),
        (MSE, None, MetricSpec("brier"), "probabilities need a categorical"),
        (MSE, None, MetricSpec("accuracy"), "decoded labels need a classification model"),
        (CE, None, MetricSpec("f1", config={"average": "samples"}), "macro, micro, weighted, bin"),
        (CE, None, MetricSpec("f1", config={"beta": 2}), "f1 takes only 'average', not 'beta'"),
        (CE, None, MetricSpec("nll", config={"x": 1}), "takes no config"),
        (BCE, None, MetricSpec("f1"), r'needs config=\{"average": "binary"\}'),
        (BCE, TaskSpec.multilabel(2), MetricSpec("f1", config={"average": "weighted"}), "binary"),
    ],
)
def test_a_metric_the_model_cannot_feed_is_refused(make_model, loss_fn, task, spec, message):
    with pytest.raises(ValueError, match=message):
        check_metrics(make_model(loss_fn, task), [MetricSpec(spec.id, spec.version, spec.config)])


def test_an_unknown_metric_names_what_is_registered(make_model):
    with pytest.raises(UnknownIdError, match="registered versions of 'nll': 1"):
        check_metrics(make_model(), [MetricSpec("nll", 7)])
    with pytest.raises(UnknownIdError, match="did you mean 'accuracy'"):
        check_metrics(make_model(), [MetricSpec("acuracy")])


def test_two_metrics_of_one_name_are_refused(make_model):
    with pytest.raises(ValueError, match="the name 'f1' is taken; pass name="):
        check_metrics(
            make_model(), [MetricSpec("f1"), MetricSpec("f1", config={"average": "micro"})]
        )
    check_metrics(make_model(), [MetricSpec("f1"), MetricSpec("f1", name="micro")])


def values(model, *specs, output, target):
    metrics = MetricSet(specs, Semantics.of(model))
    terms = (output, target, None)
    if model.task_adapter is not None:
        terms = model.task_adapter.prepare(output, target)
    metrics.update(*terms)
    return metrics.values()


@pytest.mark.parametrize("loss_fn", [CE, NLL])
def test_categorical_metrics_equal_scikit_learn(make_model, loss_fn):
    output = torch.randn(200, 4, generator=torch.Generator().manual_seed(0)).double()
    target = torch.arange(200) % 4
    found = values(
        make_model(loss_fn), MetricSpec("nll"), MetricSpec("brier"),
        MetricSpec("f1", config={"average": "weighted"}), output=output, target=target,
    )  # fmt: skip
    probabilities = output.softmax(1).numpy()
    assert found["nll"] == pytest.approx(log_loss(target, probabilities), rel=1e-12)
    assert found["brier"] == pytest.approx(
        brier_score_loss(target, probabilities, labels=[0, 1, 2, 3], scale_by_half=False)
    )
    assert found["f1"] == pytest.approx(f1_score(target, output.argmax(1), average="weighted"))


def test_multilabel_metrics_count_each_valid_output(make_model):
    model = make_model(BCE, TaskSpec.multilabel(3, threshold=0.7))
    output = torch.randn(60, 3, generator=torch.Generator().manual_seed(0)).double()
    target = (torch.rand(60, 3, generator=torch.Generator().manual_seed(1)) < 0.4).double()
    target[::5, 1] = float("nan")
    found = values(
        model, MetricSpec("accuracy"), MetricSpec("nll"), MetricSpec("brier"),
        MetricSpec("f1", config={"average": "binary"}), output=output, target=target,
    )  # fmt: skip
    kept = ~target.isnan()
    truth, probabilities = target[kept].numpy(), output.sigmoid()[kept].numpy()
    decided = probabilities >= 0.7
    assert found["accuracy"] == pytest.approx((decided == truth).mean())
    assert found["nll"] == pytest.approx(log_loss(truth, probabilities), rel=1e-12)
    assert found["brier"] == pytest.approx(((probabilities - truth) ** 2).mean())
    assert found["f1"] == pytest.approx(f1_score(truth, decided))


def test_continuous_metrics_equal_scikit_learn(make_model):
    output, target = torch.randn(50, 2), torch.randn(50, 2)
    found = values(
        make_model(MSE), MetricSpec("mae"), MetricSpec("mse", name="square"),
        output=output, target=target,
    )  # fmt: skip
    assert found["mae"] == pytest.approx(mean_absolute_error(target, output), rel=1e-6)
    assert found["square"] == pytest.approx(((target - output) ** 2).mean().item())


def test_the_nll_of_a_certain_and_wrong_model_is_its_logit_gap(make_model):
    output = torch.tensor([[0.0, 2000.0]])
    found = values(make_model(), MetricSpec("nll"), output=output, target=torch.tensor([0]))
    assert found == {"nll": 2000.0}


def test_an_ignore_index_of_the_loss_is_left_out(make_model):
    output, target = torch.eye(3) * 9, torch.tensor([0, 1, 2])
    model = make_model(nn.CrossEntropyLoss(ignore_index=2))
    found = values(model, MetricSpec("accuracy"), output=-output, target=target)
    assert found == {"accuracy": 0.0}
    nothing = values(model, MetricSpec("accuracy"), output=output, target=torch.tensor([2, 2, 2]))
    assert nothing == {}


def test_a_metric_of_a_plugin_is_declared_like_a_built_in(make_model):
    from nnx.monitors import MetricDefinition
    from nnx.plugins.manager import registry

    definition = MetricDefinition(id="acme.k", version=1, input="labels", mode="max",
                                  factory=lambda config: Range(config))  # fmt: skip
    registry("metric").register("acme.k", 1, definition, owner="plugin 'acme'")
    try:
        found = values(
            make_model(), MetricSpec("acme.k"), output=torch.eye(3), target=torch.arange(3)
        )
        assert found == {"acme.k": 2.0}
    finally:
        unregister_metric("acme.k", 1)


def test_the_f1_of_class_1_is_refused_where_there_are_more_than_two_classes(make_model):
    spec = MetricSpec("f1", config={"average": "binary"})
    with pytest.raises(ValueError, match="is no score of 3 classes"):
        check_metrics(make_model(task=TaskSpec.categorical(3)), [spec])
    with pytest.raises(ValueError, match="is no score of 4 classes"):
        StreamingMetrics([spec], "categorical", num_outputs=4)
    check_metrics(make_model(task=TaskSpec.categorical(2)), [spec])
    # Where the model does not say, the first batch does.
    stream = StreamingMetrics([spec], "categorical")
    with pytest.raises(ValueError, match="there are 3 classes"):
        stream.update_logits(torch.tensor([0]), torch.zeros(1, 3))
    assert stream.count == 0
