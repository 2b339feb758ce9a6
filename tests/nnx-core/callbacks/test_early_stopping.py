from __future__ import annotations

import math
import warnings
from types import SimpleNamespace

import pytest
from nnx.callbacks import EarlyStopping
from nnx.components import ComponentRegistry, ComponentRestoreError
from nnx.monitors import MetricSpec, MonitorSpec, MonitorUnavailableError
from nnx.records import NNEvaluationDataPoint as Edp
from nnx.records import NNIterationDataPoint as Idp


def idp(epoch, *, val=None, train=None, summary=None):
    return Idp(
        lr=0.1, iter_idx=epoch, epoch_idx=epoch, batch_idx=0, train_edp=train or Edp(loss=1.0),
        val_edp=val, train_summary=summary,
    )  # fmt: skip


class Fit:
    """Enough of a fit to drive a callback epoch by epoch."""

    def __init__(self, callback):
        self.callback = callback
        self.ctx = SimpleNamespace(should_stop=False, epoch=0, idp=None)
        callback.on_train_begin(self.ctx)

    def epoch(self, record):
        self.ctx.epoch, self.ctx.idp = record.epoch_idx, record
        self.callback.on_epoch_end(self.ctx)
        return self.ctx.should_stop

    def losses(self, values, *, start=0):
        """The epoch at which a sequence of validation losses stops; ``None``: never."""
        for epoch, value in enumerate(values, start):
            if self.epoch(idp(epoch, val=Edp(loss=value))):
                return epoch
        return None


def test_it_stops_after_patience_epochs_without_improvement():
    stopper = EarlyStopping(monitor="val_edp.loss", mode="min", patience=2)
    assert Fit(stopper).losses([1.0, 0.9, 0.95, 0.8, 0.8, 0.81, 0.1]) == 5
    assert stopper.best == 0.8
    assert stopper.stopped_epoch == 5


def test_patience_0_stops_at_the_first_epoch_without_improvement():
    assert Fit(EarlyStopping("val_edp.loss", patience=0)).losses([1.0, 0.5, 0.5]) == 2


def test_improvement_must_exceed_min_delta_and_ties_never_improve():
    losses = [0.8, 0.7, 0.695, 0.71]
    stopper = EarlyStopping("val_edp.loss", patience=10, min_delta=0.01)
    fit = Fit(stopper)
    waits = []
    for epoch, value in enumerate(losses):
        fit.epoch(idp(epoch, val=Edp(loss=value)))
        waits.append(stopper.wait)
    assert waits == [0, 0, 1, 2]  # two improvements


def test_mode_max_reverses_the_direction():
    assert Fit(EarlyStopping("val_edp.loss", patience=1, mode="max")).losses([1.0, 2.0, 1.5]) == 2


def test_the_default_takes_the_first_finite_of_error_then_loss_and_keeps_it():
    stopper = EarlyStopping(patience=5)
    fit = Fit(stopper)
    assert stopper.selected_monitor is None
    fit.epoch(idp(0, val=Edp(error=math.nan, loss=2.0)))
    assert stopper.selected_monitor == "val_edp.loss"
    fit.epoch(idp(1, val=Edp(error=0.1, loss=3.0)))
    assert stopper.selected_monitor == "val_edp.loss"
    assert (stopper.best, stopper.wait) == (2.0, 1)

    fit = Fit(stopper)  # a new fit chooses afresh
    assert (stopper.selected_monitor, stopper.best, stopper.wait) == (None, None, 0)
    fit.epoch(idp(0, val=Edp(error=0.5, loss=2.0)))
    assert stopper.selected_monitor == "val_edp.error"


def test_it_never_falls_back_to_training_and_warns_once_about_a_missing_validation():
    stopper = EarlyStopping(patience=0)
    fit = Fit(stopper)
    with pytest.warns(
        RuntimeWarning, match=r"val_edp\.error or val_edp\.loss, but there is no val"
    ):
        fit.epoch(idp(0, train=Edp(loss=1.0, error=0.5)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for epoch in range(1, 5):
            assert not fit.epoch(idp(epoch, train=Edp(loss=1.0 + epoch)))
    assert stopper.wait == 0
    with pytest.warns(RuntimeWarning):  # once per run, not per callback
        Fit(stopper).epoch(idp(0))


def test_a_field_the_evaluator_never_sets_is_named():
    with pytest.warns(
        RuntimeWarning, match=r"watches val_edp\.error, but val_edp has no such value"
    ):
        Fit(EarlyStopping("val_edp.error")).epoch(idp(0, val=Edp(loss=1.0)))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_diverged_run_still_stops(bad):
    for monitor in ("val_edp.loss", None):
        stopper = EarlyStopping(monitor, patience=2)
        assert Fit(stopper).losses([bad, bad, bad]) == 1
        assert stopper.best is None
    assert Fit(EarlyStopping("val_edp.loss", patience=2)).losses([1.0, bad, bad]) == 2


def test_an_explicit_training_monitor_reads_exactly_that_field():
    fit = Fit(EarlyStopping("train_edp.error", patience=1))
    assert not fit.epoch(idp(0, val=Edp(loss=9.0), train=Edp(error=0.2)))
    assert fit.epoch(idp(1, val=Edp(loss=0.0), train=Edp(error=0.3)))


# -- named monitors --------------------------------------------------------------------------


def test_a_named_monitor_follows_a_declared_metric_in_its_direction():
    stopper = EarlyStopping(MonitorSpec("accuracy"), patience=1)
    stopper.bind_monitor([MetricSpec("accuracy")])
    assert stopper.selected_monitor == "val.accuracy"
    fit = Fit(stopper)
    assert not fit.epoch(idp(0, val=Edp(metrics={"accuracy": 0.5})))
    assert not fit.epoch(idp(1, val=Edp(metrics={"accuracy": 0.6})))
    assert fit.epoch(idp(2, val=Edp(metrics={"accuracy": 0.6})))
    assert stopper.best == 0.6


def test_a_named_training_monitor_reads_the_whole_epoch_summary():
    fit = Fit(EarlyStopping(MonitorSpec("loss", split="train"), patience=1))
    assert not fit.epoch(idp(0, train=Edp(loss=5.0), summary=Edp(loss=1.0)))
    assert fit.epoch(idp(1, train=Edp(loss=0.1), summary=Edp(loss=2.0)))


def test_a_named_monitor_without_a_value_does_not_count_toward_patience():
    stopper = EarlyStopping(MonitorSpec("loss"), patience=1)
    fit = Fit(stopper)
    with pytest.warns(RuntimeWarning, match=r"val\.loss has no value"):
        assert not fit.epoch(idp(0))
    assert not fit.epoch(idp(1))
    assert not fit.epoch(idp(2, val=Edp(loss=1.0)))
    assert fit.epoch(idp(3, val=Edp(loss=math.nan)))


def test_a_named_monitor_with_error_policies_raises():
    fit = Fit(EarlyStopping(MonitorSpec("loss", on_missing="error")))
    with pytest.raises(MonitorUnavailableError):
        fit.epoch(idp(0))


def test_an_undeclared_metric_is_refused_when_the_run_binds_it():
    with pytest.raises(ValueError, match=r"EarlyStopping\.monitor watches 'nll'.*not declared"):
        EarlyStopping(MonitorSpec("nll")).bind_monitor([])


# -- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"monitor": "val_edp.accuracy"}, r"MonitorSpec\(metric\)"),
        ({"monitor": 3}, r"EarlyStopping\.monitor must be one of val_edp\.error"),
        ({"patience": -1}, r"EarlyStopping\.patience"),
        ({"patience": True}, r"EarlyStopping\.patience"),
        ({"min_delta": math.inf}, r"EarlyStopping\.min_delta"),
        ({"min_delta": -0.1}, r"EarlyStopping\.min_delta"),
        ({"mode": "up"}, r"EarlyStopping\.mode"),
        ({"mode": "max"}, "needs an explicit monitor"),
        ({"name": ""}, r"EarlyStopping\.name"),
        ({"monitor": MonitorSpec("loss"), "min_delta": 0.1}, "from its MonitorSpec"),
        ({"monitor": MonitorSpec("loss"), "mode": "max"}, "from its MonitorSpec"),
    ],
)
def test_construction_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        EarlyStopping(**arguments)


# -- a component -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: EarlyStopping("val_edp.loss", patience=3),
        lambda: EarlyStopping(patience=3),
        lambda: EarlyStopping(MonitorSpec("loss"), patience=3),
    ],
)
def test_a_split_run_stops_where_the_uninterrupted_one_does(make):
    losses = [1.0, 0.8, 0.9, 0.85, 0.7, 0.75, 0.72, 0.71, 0.1]
    straight = Fit(make()).losses(losses)
    assert straight == 7
    for split in range(1, 7):
        first = make()
        Fit(first).losses(losses[:split])
        saved = ComponentRegistry([first]).collect()
        second = make()
        registry = ComponentRegistry([second])
        plan = registry.plan(saved)
        fit = Fit(second)  # on_train_begin resets, then the state is restored
        assert registry.restore(plan) == ("early_stopping",)
        assert fit.losses(losses[split:], start=split) == straight
        assert second.selected_monitor == first.selected_monitor


def test_several_are_numbered_and_may_be_named():
    stoppers = [EarlyStopping(), EarlyStopping(), EarlyStopping(name="slow")]
    assert ComponentRegistry(stoppers).names == ("early_stopping", "early_stopping.2", "slow")


def test_the_component_is_optional():
    registry = ComponentRegistry([EarlyStopping()])
    assert registry.plan({}).fresh == ("early_stopping",)


@pytest.mark.parametrize(
    ("saved", "other", "message"),
    [
        (
            EarlyStopping("val_edp.loss"),
            EarlyStopping("val_edp.error"),
            "saved with metric='val_edp.loss', this EarlyStopping has metric='val_edp.error'",
        ),
        (
            EarlyStopping("val_edp.loss"),
            EarlyStopping("val_edp.loss", mode="max"),
            "saved with mode='min', this EarlyStopping has mode='max'",
        ),
        (
            EarlyStopping(MonitorSpec("loss")),
            EarlyStopping(MonitorSpec("loss", split="train")),
            "saved with split='val'",
        ),
        (EarlyStopping(), EarlyStopping(MonitorSpec("loss")), "saved with metric=None"),
    ],
)
def test_another_monitor_is_reported_before_anything_is_restored(saved, other, message):
    state = ComponentRegistry([saved]).collect()
    with pytest.raises(ComponentRestoreError) as error:
        ComponentRegistry([other]).plan(state)
    assert message in str(error.value)
