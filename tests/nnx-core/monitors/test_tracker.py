"""One decision per epoch."""

from __future__ import annotations

import math
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nnx import ComponentRegistry, MetricSpec, MonitorRecord, MonitorSpec, MonitorUnavailableError
from nnx import NNEvaluationDataPoint as Record
from nnx.monitors import MonitorTracker


def improvements(spec, values):
    tracker = MonitorTracker(spec)
    return [tracker.observe(value, epoch=i).improved for i, value in enumerate(values)]


def test_improvement_must_exceed_min_delta():
    spec = MonitorSpec(metric="nll", mode="min", min_delta=0.01)
    assert improvements(spec, [0.8, 0.7, 0.695, 0.71]) == [True, True, False, False]


def test_ties_and_nonfinite_values_never_improve():
    spec = MonitorSpec(metric="accuracy", mode="max")
    assert improvements(spec, [math.nan, 0.5, 0.5, math.inf, -math.inf, 0.6]) == [
        False, True, False, False, False, True,
    ]  # fmt: skip


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True) | st.none()), st.floats(0, 10))
def test_the_best_is_always_the_last_improving_value(values, min_delta):
    tracker = MonitorTracker(MonitorSpec(min_delta=min_delta))
    best = None
    for epoch, value in enumerate(values):
        record = tracker.observe(value, epoch=epoch)
        finite = value is not None and math.isfinite(value)
        assert record.improved == (finite and (best is None or value < best - min_delta))
        best = value if record.improved else best
        assert tracker.best == best
        expected = "missing" if value is None else "ok" if finite else "nonfinite"
        assert record.status == expected
        assert MonitorRecord.from_state(record.state()).state().keys() == record.state().keys()


def test_policies_raise_and_name_the_monitor_and_epoch():
    tracker = MonitorTracker(MonitorSpec(on_missing="error", on_nonfinite="error"))
    with pytest.raises(MonitorUnavailableError, match=r"val\.loss has no value in epoch 3"):
        tracker.observe(None, epoch=3)
    with pytest.raises(MonitorUnavailableError, match=r"val\.loss is nan in epoch 4"):
        tracker.observe(math.nan, epoch=4)
    assert tracker.best is None


def test_a_missing_value_warns_once_when_asked_to():
    tracker = MonitorTracker(MonitorSpec(), warn_missing=True)
    with pytest.warns(RuntimeWarning, match=r"val\.loss has no value in epoch 0"):
        tracker.observe(None, epoch=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tracker.observe(None, epoch=1)
        MonitorTracker(MonitorSpec()).observe(None, epoch=0)


def test_an_unresolved_direction_is_refused():
    spec = MonitorSpec(metric="nll")
    with pytest.raises(ValueError, match=r"no direction yet; pass spec\.resolve"):
        MonitorTracker(spec)
    assert MonitorTracker(spec.resolve([MetricSpec("nll")])).spec.mode == "min"
    assert MonitorTracker(MonitorSpec(metric="a").resolve([MetricSpec("accuracy", name="a")]))


def test_the_value_comes_from_the_named_split_and_field():
    train, val = Record(loss=1.0, metrics={"nll": 3.0}), Record(error=0.25)
    assert MonitorSpec(metric="error").value(train=train, val=val) == 0.25
    assert MonitorSpec().value(train=train, val=val) is None
    assert MonitorSpec(split="train").value(train=train, val=None) == 1.0
    nll = MonitorSpec(metric="nll", split="train")
    assert nll.value(train=train, val=val) == 3.0
    assert nll.value(train=None, val=val) is None


def test_a_resumed_tracker_improves_exactly_where_the_uninterrupted_one_would():
    spec = MonitorSpec(metric="accuracy", mode="max", min_delta=0.05)
    values = [0.1, 0.3, 0.2, 0.34, 0.36, 0.9]
    whole = improvements(spec, values)
    first = MonitorTracker(spec)
    registry = ComponentRegistry([first])
    before = [first.observe(v, epoch=i).improved for i, v in enumerate(values[:3])]
    saved = registry.collect()
    assert list(saved) == ["nnx.monitor"]
    second = MonitorTracker(spec)
    other = ComponentRegistry([second])
    other.restore(other.plan(saved))
    after = [second.observe(v, epoch=3 + i).improved for i, v in enumerate(values[3:])]
    assert before + after == whole


def test_another_monitor_cannot_continue_a_decision():
    state = MonitorTracker(MonitorSpec(metric="accuracy", mode="max")).component_state()
    tracker = MonitorTracker(MonitorSpec())
    assert tracker.check_component_state(state, version=1) == [
        "the checkpoint monitored metric='accuracy', this run monitors metric='loss'",
        "the checkpoint monitored mode='max', this run monitors mode='min'",
    ]
    with pytest.raises(ValueError, match="monitored metric='accuracy'"):
        tracker.load_component_state(state, version=1)
    assert tracker.check_component_state({}, version=1) == [
        "the saved monitor state has no 'monitor' and 'best'"
    ]
    assert tracker.component_spec().required is False
