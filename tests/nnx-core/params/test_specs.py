"""The specs that a configuration is made of: tasks, metrics, monitors, models, compilation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from nnx import (
    CompileSpec,
    MetricSpec,
    ModelSpec,
    MonitorRecord,
    MonitorSpec,
    NNCheckpointTransform,
    OptimizerFactorySpec,
    ProbabilitySpec,
    RuntimeModule,
    TaskSpec,
)
from nnx.plugins import manager
from torch import nn

# -- tasks ---------------------------------------------------------------------------


def test_task_factories_write_their_kind():
    assert TaskSpec.categorical(3, ignore_index=-100).state() == {
        "version": 1, "kind": "categorical", "num_outputs": 3, "ignore_index": -100,
    }  # fmt: skip
    assert TaskSpec.multilabel(5, threshold=0.4).state() == {
        "version": 1, "kind": "multilabel", "num_outputs": 5, "threshold": 0.4,
    }  # fmt: skip
    assert TaskSpec.regression(2, labels=["a", "b"]).labels == ("a", "b")
    assert TaskSpec.regression().state() == {"version": 1, "kind": "regression"}
    for spec in (TaskSpec.categorical(3, labels=list("abc")), TaskSpec.multilabel(threshold=0.1)):
        assert TaskSpec.from_state(spec.state()) == spec


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "ranking"}, "kind must be one of categorical, multilabel, regression"),
        ({"kind": "categorical", "num_outputs": 0}, "num_outputs must be an integer >= 1, not 0"),
        ({"kind": "categorical", "num_outputs": True}, "num_outputs must be an integer >= 1"),
        ({"kind": "regression", "ignore_index": 1}, "ignore_index must be None for regression"),
        ({"kind": "categorical", "ignore_index": 1.0}, "ignore_index must be an integer, not 1.0"),
        ({"kind": "multilabel", "threshold": 1.5}, "threshold must be a finite real number >= 0"),
        ({"kind": "regression", "threshold": 0.4}, "threshold must be left at 0.5 for regression"),
        ({"kind": "regression", "labels": "ab"}, "labels must be a sequence of names"),
        ({"kind": "regression", "labels": ["a", "a"]}, "labels must be without duplicates"),
        ({"kind": "regression", "labels": [1]}, r"labels\[0\] must be a non-empty string"),
        ({"kind": "regression", "labels": ["a"], "num_outputs": 2}, "labels must be 2 names"),
    ],
)
def test_a_task_refuses_what_its_kind_does_not_have(values, message):
    with pytest.raises(ValueError, match=f"TaskSpec.{message}"):
        TaskSpec(**values)


def test_a_task_of_another_version_or_with_unknown_keys_is_refused():
    with pytest.raises(ValueError, match=r"TaskSpec\.version must be 1, not 2"):
        TaskSpec.from_state({"version": 2, "kind": "regression"})
    with pytest.raises(ValueError, match="no key 'treshold'; did you mean 'threshold'"):
        TaskSpec.from_state({"kind": "multilabel", "treshold": 0.1})
    with pytest.raises(ValueError, match="lacks 'kind'"):
        TaskSpec.from_state({})


def test_a_task_names_how_its_outputs_become_probabilities():
    assert TaskSpec.categorical(3, labels=list("abc")).probability_spec() == ProbabilitySpec(
        "categorical", class_axis=1, labels=("a", "b", "c")
    )
    assert TaskSpec.multilabel(2).probability_spec().kind == "bernoulli"
    assert TaskSpec.regression(2).probability_spec() is None


# -- monitors ------------------------------------------------------------------------


def test_a_monitor_sees_the_documented_improvements():
    monitor = MonitorSpec(metric="loss", min_delta=0.01)
    best, improved = None, []
    for epoch, value in enumerate([0.8, 0.7, 0.695, 0.71]):
        if monitor.improved(value, best):
            best = value
            improved.append(epoch)
    assert improved == [0, 1]


def test_ties_and_non_finite_values_never_improve():
    down, up = MonitorSpec("loss"), MonitorSpec("acc", mode="max")
    assert not down.improved(0.5, 0.5)
    assert not up.improved(0.5, 0.5)
    assert up.improved(0.6, 0.5)
    assert down.improved(0.4, 0.5)
    for value in (math.nan, math.inf, -math.inf):
        for monitor in (down, up):
            assert not monitor.improved(value, None)
            assert not monitor.improved(value, 0.5)


def test_an_open_direction_must_be_resolved_before_values_are_compared():
    monitor = MonitorSpec("nll")
    assert monitor.improved(1.0, None)
    with pytest.raises(ValueError, match=r"val\.nll has no direction yet"):
        monitor.improved(1.0, 2.0)


class Definition:
    input, mode = "labels", "max"

    @staticmethod
    def check_config(config):
        if "average" not in config:
            raise ValueError("average is needed")

    @staticmethod
    def factory(config):
        return ("accumulator", config["average"])


@pytest.fixture
def kappa():
    registry = manager.registry("metric")
    registry.register("test.kappa", 1, Definition, owner="this test")
    yield MetricSpec("test.kappa", config={"average": "macro"}, name="kappa")
    registry.unregister("test.kappa", 1)


def test_a_metric_looks_its_definition_up(kappa):
    assert (kappa.label, kappa.input, kappa.mode) == ("kappa", "labels", "max")
    assert kappa.accumulator() == ("accumulator", "macro")
    kappa.check()
    with pytest.raises(ValueError, match="average is needed"):
        MetricSpec("test.kappa").check()
    with pytest.raises(ValueError, match=r"test\.kappa@v2; registered versions .*: 1"):
        MetricSpec("test.kappa", 2).check()


def test_a_monitor_takes_the_direction_of_its_metric(kappa):
    open_ = MonitorSpec(metric="kappa", min_delta=0.1)
    resolved = open_.resolve([kappa])
    assert resolved == MonitorSpec(metric="kappa", mode="max", min_delta=0.1)
    assert open_.mode is None
    assert MonitorSpec(metric="kappa", mode="min").resolve([kappa]).mode == "min"
    with pytest.raises(ValueError, match=r"EarlyStopping watches 'kapa'.*did you mean 'kappa'"):
        MonitorSpec(metric="kapa").resolve([kappa], owner="EarlyStopping")


def test_a_monitor_reads_the_record_of_its_split():
    class Record:
        loss, error, metrics = 0.25, None, {"nll": 0.5}

    both = {"train": Record(), "val": None}
    assert MonitorSpec("loss", "train").value(**both) == 0.25
    assert MonitorSpec("error", "train").value(**both) is None
    assert MonitorSpec("nll", "train").value(**both) == 0.5
    assert MonitorSpec("brier", "train").value(**both) is None
    assert MonitorSpec("loss", "val").value(**both) is None
    assert MonitorSpec("nll", "train").key == "train.nll"


def test_a_monitor_record_round_trips():
    record = MonitorRecord(MonitorSpec("nll", mode="min"), 0.5, "ok", True)
    assert MonitorRecord.from_state(record.state()) == record
    assert record.state()["monitor"]["mode"] == "min"
    with pytest.raises(ValueError, match="status must be one of ok, missing, nonfinite"):
        MonitorRecord(MonitorSpec(), None, "fine", False)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"metric": ""}, "metric must be a non-empty string"),
        ({"split": "test"}, "split must be one of val, train, not 'test'"),
        ({"mode": "up"}, "mode must be one of min, max"),
        ({"min_delta": -0.1}, "min_delta must be a finite real number >= 0"),
        ({"min_delta": math.nan}, "min_delta must be a finite real number >= 0"),
        ({"on_missing": "warn"}, "on_missing must be one of skip, error"),
        ({"on_nonfinite": None}, "on_nonfinite must be one of skip, error"),
    ],
)
def test_a_monitor_refuses_words_it_does_not_know(values, message):
    with pytest.raises(ValueError, match=f"MonitorSpec.{message}"):
        MonitorSpec(**values)


# -- registered things ---------------------------------------------------------------

REGISTERED = [ModelSpec, OptimizerFactorySpec, MetricSpec]


@pytest.mark.parametrize("cls", REGISTERED)
def test_a_config_is_a_read_only_copy(cls):
    config = {"b": [1, {"c": np.float64(0.5)}], "a": np.int64(3), "flag": np.bool_(True)}
    spec = cls("acme.x", 1, config)
    config["b"].append(2)
    assert spec.config == {"b": (1, {"c": 0.5}), "a": 3, "flag": True}
    assert type(spec.config["a"]) is int
    assert spec.state()["config"] == {"a": 3, "b": [1, {"c": 0.5}], "flag": True}
    assert list(spec.state()["config"]) == ["a", "b", "flag"]
    with pytest.raises(TypeError):
        spec.config["a"] = 1
    assert cls.from_state(spec.state()) == spec


@pytest.mark.parametrize("cls", REGISTERED)
def test_specs_are_equal_when_their_json_is(cls):
    assert cls("a", 1, {"x": [1]}) == cls("a", 1, {"x": (1,)})
    assert hash(cls("a", 1, {"x": [1]})) == hash(cls("a", 1, {"x": (1,)}))
    assert cls("a", 1, {"x": 1}) != cls("a", 1, {"x": True})
    assert cls("a", 1, {"x": 1}) != cls("a", 1, {"x": 1.0})
    assert cls("a", 1) != cls("a", 2)
    assert cls("a", 1) != "a"
    assert cls("a", 1).config == {}
    assert cls("a", 1, None) == cls("a", 1, {})
    assert cls("a", 2).versioned_id == "a@v2"


@pytest.mark.parametrize("cls", REGISTERED)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", 1), "id must be a non-empty string"),
        ((len, 1), "id must be a non-empty string"),
        (("a", 0), "version must be an integer >= 1, not 0"),
        (("a", True), "version must be an integer >= 1, not True"),
        (("a", "1"), "version must be an integer >= 1, not '1'"),
        (("a", 1, len), "config must be a mapping"),
    ],
)
def test_a_spec_is_an_id_a_version_and_data(cls, arguments, message):
    with pytest.raises(ValueError, match=f"{cls.__name__}.{message}"):
        cls(*arguments)


def test_a_model_spec_carries_its_seed():
    spec = ModelSpec("acme.encoder", config={"w": 1}, seed=np.int64(3))
    assert spec.state() == {
        "kind": "registered", "id": "acme.encoder", "version": 1, "config": {"w": 1}, "seed": 3,
    }  # fmt: skip
    assert ModelSpec("a", seed=0) != ModelSpec("a", seed=1)
    with pytest.raises(ValueError, match=r"ModelSpec\.seed must be an integer >= 0"):
        ModelSpec("a", seed=-1)
    with pytest.raises(TypeError):
        ModelSpec("a", 1, {}, 3)


def test_a_runtime_module_is_told_by_its_topology():
    small, same, other = nn.Linear(2, 1), nn.Linear(2, 1), nn.Linear(2, 2)
    described = RuntimeModule.of(small)
    assert described == RuntimeModule.of(same) != RuntimeModule.of(other)
    assert described.module == "torch.nn.modules.linear.Linear"
    assert RuntimeModule.of(nn.Sequential(nn.Dropout(0.1))) != RuntimeModule.of(
        nn.Sequential(nn.Dropout(0.2))
    )
    assert RuntimeModule.from_state(described.state()) == described
    assert described.state()["kind"] == "runtime"
    with pytest.raises(ValueError, match=r"ModelSpec\.kind must be 'registered', not 'runtime'"):
        ModelSpec.from_state({"kind": "runtime", "id": "a"})


def test_a_transform_round_trips():
    transform = NNCheckpointTransform("lora", options={"targets": ["a"], "r": 4})
    assert NNCheckpointTransform.from_state(transform.state()) == transform
    assert transform.version == 1
    assert transform != "lora"
    assert hash(transform) == hash(NNCheckpointTransform.from_state(transform.state()))
    with pytest.raises(ValueError, match="lacks 'name'"):
        NNCheckpointTransform.from_state({"options": {}})
    with pytest.raises(ValueError, match=r"options\.f is a callable"):
        NNCheckpointTransform("x", options={"f": len})


# -- compilation -----------------------------------------------------------------------


def test_a_compile_spec_holds_the_options_of_torch():
    spec = CompileSpec(mode="max-autotune", fullgraph=True)
    assert spec.options() == {
        "backend": "inductor", "mode": "max-autotune", "fullgraph": True, "dynamic": None,
    }  # fmt: skip
    assert CompileSpec.from_state(spec.state()) == spec


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"backend": ""}, "backend must be a non-empty string"),
        ({"mode": "fast"}, "mode must be one of default, reduce-overhead, max-autotune"),
        ({"fullgraph": 1}, "fullgraph must be True or False"),
        ({"dynamic": "yes"}, "dynamic must be True or False"),
        ({"on_failure": "warn"}, "on_failure must be one of error, eager"),
    ],
)
def test_a_compile_spec_refuses_unknown_words(values, message):
    with pytest.raises(ValueError, match=f"CompileSpec.{message}"):
        CompileSpec(**values)
