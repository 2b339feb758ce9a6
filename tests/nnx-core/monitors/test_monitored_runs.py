"""One decision in a fit: BEST, the plateau schedule and early stopping agree."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from nnx import (
    Checkpoints,
    EarlyStopping,
    Losses,
    MetricSpec,
    MonitorSpec,
    MonitorUnavailableError,
    Nets,
    NNCheckpoint,
    NNEvaluationDataPoint,
    NNModel,
    NNModelParams,
    NNOptimParams,
    NNParams,
    NNRun,
    NNSchedulerParams,
    NNTrainParams,
    Optims,
    register_metric,
    unregister_metric,
)
from nnx.store.pointer import best_run_id
from torch.utils.data import DataLoader, TensorDataset

NAN = math.nan


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NNX_TQDM_DISABLE", "1")


def built(seed=0):
    torch.manual_seed(seed)
    return NNModel(
        NNParams(input_dim=4, output_dim=3, hidden_dims=[8], dropout_prob=0.0),
        NNModelParams(net=Nets.FEED_FWD, loss=Losses.CROSS_ENTROPY),
    )


def loader(n=40, batch_size=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, 4, generator=generator)
    y = torch.randint(0, 3, (n,), generator=generator)
    return DataLoader(TensorDataset(X, y), batch_size=batch_size)


def params(**options):
    options.setdefault("n_epochs", 4)
    options.setdefault("train_loader", loader())
    options.setdefault("val_loader", loader(20, seed=1))
    options.setdefault(
        "optim",
        NNOptimParams(name=Optims.SGD, max_lr=0.1, weight_decay=0.0, momentum=0.0),
    )
    return NNTrainParams(seed=3, **options)


NLL = MonitorSpec(metric="nll", min_delta=0.01)


def scripted(values, **fields):
    """An evaluator whose declared nll takes the given values, epoch by epoch."""

    def step(ctx):
        value = values[ctx.epoch_idx]
        return NNEvaluationDataPoint(
            loss=1.0, metrics={} if value is None else {"nll": value}, **fields
        )

    return step


def selections(run):
    return [r.selection for r in run.idps if r.selection is not None]


def test_best_plateau_and_early_stopping_see_the_same_improvements():
    values = [0.8, 0.7, 0.695, 0.71]
    lrs = []
    stopping = EarlyStopping(monitor=NLL, patience=2)
    run = built().train(
        params(
            metrics=[MetricSpec("nll")], monitor=NLL,
            scheduler=NNSchedulerParams(min_lr=1e-9, factor=0.5, patience=0, cooldown=0, threshold=0.9),
        ),
        callbacks=[stopping, lambda idps: lrs.append(idps[-1].lr)],
        eval_step_fn=scripted(values),
    )  # fmt: skip
    assert [s.improved for s in selections(run)] == [True, True, False, False]
    assert [s.value for s in selections(run)] == values
    assert NNCheckpoint.load(run.id, Checkpoints.BEST).idp.epoch_idx == 1
    # patience 0: the plateau cuts after epochs 2 and 3; the threshold of 0.9 is unused
    assert lrs == [0.1, 0.1, 0.1, 0.05]

    assert len(selections(run)) == 4


def test_early_stopping_given_the_spec_stops_by_it():
    values = [0.8, 0.7, 0.695, 0.71, 0.1, 0.1]
    run = built().train(
        params(n_epochs=6, metrics=[MetricSpec("nll")], monitor=NLL),
        callbacks=[EarlyStopping(monitor=NLL, patience=2)],
        eval_step_fn=scripted(values),
    )
    assert len(selections(run)) == 4


def test_a_missing_value_decides_nothing_and_a_nonfinite_one_is_no_improvement():
    values = [None, 0.8, NAN, None, math.inf, 0.5]
    lrs = []
    run = built().train(
        params(
            n_epochs=6, metrics=[MetricSpec("nll")], monitor=NLL,
            scheduler=NNSchedulerParams(min_lr=1e-9, factor=0.5, patience=0, cooldown=0, threshold=0),
        ),
        callbacks=[lambda idps: lrs.append(idps[-1].lr)],
        eval_step_fn=scripted(values),
    )  # fmt: skip
    found = selections(run)
    assert [s.status for s in found] == ["missing", "ok", "nonfinite", "missing", "nonfinite", "ok"]
    assert [s.improved for s in found] == [False, True, False, False, False, True]
    assert lrs == [0.1, 0.1, 0.1, 0.05, 0.05, 0.025]
    assert NNCheckpoint.load(run.id, Checkpoints.BEST).idp.epoch_idx == 5


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ([0.5, None], {"on_missing": "error"}, "val.nll has no value in epoch 1"),
        ([0.5, NAN], {"on_nonfinite": "error"}, "val.nll is nan in epoch 1"),
    ],
)
def test_the_error_policy_ends_the_run(values, options, message):
    monitor = MonitorSpec(metric="nll", **options)
    with pytest.raises(MonitorUnavailableError, match=message):
        built().train(
            params(n_epochs=2, metrics=[MetricSpec("nll")], monitor=monitor),
            eval_step_fn=scripted(values),
        )


def test_the_summary_is_of_the_whole_epoch_and_only_on_its_last_record():
    model = built()
    metrics = [MetricSpec("nll"), MetricSpec("accuracy"), MetricSpec("f1")]
    run = model.train(params(metrics=metrics, n_epochs=1))
    records = run.idps
    assert [r.train_summary is None for r in records] == [True, True, False]
    summary, sizes = records[-1].train_summary, [16, 16, 8]
    weighted = sum(r.train_edp.loss * n for r, n in zip(records, sizes)) / 40
    assert summary.loss == pytest.approx(weighted)
    assert summary.error == pytest.approx(
        sum(r.train_edp.error * n for r, n in zip(records, sizes)) / 40
    )
    assert summary.metrics["accuracy"] == pytest.approx(1 - summary.error)
    # The unsmoothed NLL of the training outputs is their cross-entropy.
    assert summary.metrics["nll"] == pytest.approx(summary.loss, rel=1e-6)
    assert all(r.selection is None for r in records)


def test_validation_metrics_are_evaluates_own():
    model = built()
    metrics = (
        MetricSpec("nll"),
        MetricSpec("brier"),
        MetricSpec("f1", config={"average": "micro"}),
    )
    val = loader(20, batch_size=7, seed=1)
    run = model.train(params(metrics=metrics, val_loader=val, n_epochs=2))
    assert run.idps[-1].val_edp == model.evaluate(val, metrics=metrics)


def test_summary_and_selection_come_back_from_csv_and_checkpoints():
    monitor = MonitorSpec(metric="nll", split="train")
    run = built().train(params(metrics=[MetricSpec("nll")], monitor=monitor))
    loaded = NNRun.load(run.id)
    assert loaded.idps[-1].train_summary == run.idps[-1].train_summary
    assert loaded.idps[-1].selection == run.idps[-1].selection
    assert loaded.idps[-1].selection.monitor.mode == "min"
    assert loaded.train.monitor == monitor
    last = NNCheckpoint.load(run.id, Checkpoints.LAST)
    assert last.idp.selection == run.idps[-1].selection
    assert last.idp.train_summary == run.idps[-1].train_summary


def test_a_run_without_metrics_or_monitor_records_neither():
    run = built().train(params(n_epochs=1))
    assert all(r.train_summary is None and r.selection is None for r in run.idps)
    columns = (open(f"runs/{run.id}/idps.csv").readline()).strip().split(",")  # noqa: SIM115
    assert not any("summary" in c or "selection" in c for c in columns)


def test_a_run_with_metrics_loads_without_their_registration():
    class Half:
        def __init__(self, config):
            pass

        def update(self, target, prediction):
            pass

        def result(self):
            return 0.5

    register_metric("test.half", 1, Half, input="labels", mode="max")
    try:
        run = built().train(params(metrics=[MetricSpec("test.half")], n_epochs=1))
        assert run.idps[-1].val_edp.metrics == {"test.half": 0.5}
    finally:
        unregister_metric("test.half", 1)
    loaded = NNRun.load(run.id)
    assert loaded.train.metrics == (MetricSpec("test.half"),)
    assert loaded.idps[-1].val_edp.metrics == {"test.half": 0.5}
    with pytest.raises(LookupError, match=r"no metric is registered as test\.half@v1"):
        built().train(params(metrics=[MetricSpec("test.half")], n_epochs=2))


def test_monitored_runs_are_compared_with_each_other_alone(tmp_path):
    def judged(salt, values, **kwargs):
        return built().train(
            params(n_epochs=len(values), metrics=[MetricSpec("nll")], **kwargs),
            eval_step_fn=scripted(values), salt=salt,
        )  # fmt: skip

    first = judged("a", [0.6], monitor=NLL)
    assert best_run_id() == first.id
    judged("b", [0.7], monitor=NLL)
    other = MonitorSpec("nll", mode="max")
    judged("c", [0.1], monitor=other)  # another direction: another measure
    assert best_run_id() == first.id
    better = judged("d", [0.5], monitor=NLL)
    assert best_run_id() == better.id
    plain = judged("e", [0.9])  # validated without a monitor: it stands before them
    assert best_run_id() == plain.id
    judged("f", [0.1], monitor=NLL)
    assert best_run_id() == plain.id


def resumed(run, n_epochs, values, mode="stateful"):
    return built().train(
        params(
            n_epochs=n_epochs, metrics=[MetricSpec("nll")], monitor=NLL,
            resume_from_run_id=run.id, resume_mode=mode,
        ),
        eval_step_fn=scripted(values),
    )  # fmt: skip


def test_a_resumed_run_continues_the_decision():
    values = [0.8, 0.7, 0.695, 0.69, 0.6]
    whole = built().train(
        params(n_epochs=5, metrics=[MetricSpec("nll")], monitor=NLL), eval_step_fn=scripted(values)
    )
    first = built().train(
        params(n_epochs=2, metrics=[MetricSpec("nll")], monitor=NLL), eval_step_fn=scripted(values)
    )
    second = resumed(first, 3, values)
    decisions = [s.improved for s in selections(first)] + [s.improved for s in selections(second)]
    assert decisions == [s.improved for s in selections(whole)] == [True, True, False, False, True]
    assert "nnx.monitor" in second.resume_status.restored_components
    assert NNCheckpoint.load(second.id, Checkpoints.BEST).idp.epoch_idx == 4


def test_without_an_improvement_the_best_is_the_source_runs():
    values = [0.5, 0.8, 0.7, 0.6]
    first = built().train(
        params(n_epochs=1, metrics=[MetricSpec("nll")], monitor=NLL), eval_step_fn=scripted(values)
    )
    second = resumed(first, 3, values)
    assert not any(s.improved for s in selections(second))
    best = NNCheckpoint.load(second.id, Checkpoints.BEST)
    assert best.idp.state() == NNCheckpoint.load(first.id, Checkpoints.BEST).idp.state()
    assert (second.resume_status.best_run_id, second.resume_status.best_epoch) == (first.id, 0)
    fresh = resumed(first, 2, values, mode="weights_only")
    assert [s.improved for s in selections(fresh)] == [True, True]


def test_a_run_of_another_monitor_cannot_continue():
    first = built().train(
        params(n_epochs=1, metrics=[MetricSpec("nll")], monitor=NLL), eval_step_fn=scripted([0.5])
    )
    with pytest.raises(ValueError, match="monitor"):
        built().train(
            params(
                n_epochs=1, monitor=MonitorSpec(metric="error"), resume_from_run_id=first.id,
                resume_mode="stateful",
            )
        )  # fmt: skip


class Last:
    """A metric without state, over labels."""

    def __init__(self, config):
        self.value = None

    def update(self, target, prediction):
        self.value = float(prediction[-1])

    def result(self):
        return self.value


@pytest.fixture
def last_metric():
    register_metric("test.last", 1, Last, input="labels", mode="max")
    yield MetricSpec("test.last")
    unregister_metric("test.last", 1)


def test_points_inside_an_epoch_need_metrics_that_can_be_continued(last_metric, tmp_path):
    with pytest.raises(ValueError, match=r"'test\.last' cannot be continued in the middle"):
        built().train(params(metrics=[last_metric], checkpoint_every=1))
    assert not (tmp_path / "runs").exists()
    run = built().train(params(metrics=[last_metric], n_epochs=1))
    assert "test.last" in run.idps[-1].train_summary.metrics


def test_steps_of_the_callers_own_may_report_a_metric_the_model_could_not_feed():
    def step(ctx):
        X, y = ctx.batch
        loss = ctx.model.loss_fn(ctx.model.net(X), y)
        ctx.optimizer.zero_grad()
        loss.backward()
        ctx.optimizer.step()
        return NNEvaluationDataPoint(loss=float(loss.detach()))

    def evaluator(ctx):
        return NNEvaluationDataPoint(loss=1.0, metrics={"mae": 0.5})

    monitor = MonitorSpec(metric="mae")
    run = built().train(
        params(metrics=[MetricSpec("mae")], monitor=monitor, n_epochs=1),
        train_step_fn=step, eval_step_fn=evaluator,
    )  # fmt: skip
    assert selections(run)[-1].value == 0.5
    with pytest.raises(ValueError, match="reads continuous, which categorical outputs do not have"):
        built().train(params(metrics=[MetricSpec("mae")], n_epochs=1), train_step_fn=step)


def test_an_empty_validation_loader_is_refused_before_a_run_exists(tmp_path):
    with pytest.raises(ValueError, match="val_loader is empty: it has no batch to evaluate"):
        built().train(params(val_loader=[]))
    assert not (tmp_path / "runs").exists()


# -- monitors without a value, and a stopper for several runs ---------------------------------


def silent(ctx):
    """Validation that never says what is watched."""
    return NNEvaluationDataPoint(loss=1.0)


@pytest.mark.parametrize("stoppers", [0, 1, 2])
def test_a_monitor_that_is_never_fed_warns_once_in_each_run(stoppers):
    callbacks = [EarlyStopping(NLL, patience=1, name=f"s{i}") for i in range(stoppers)]
    for salt in ("first", "second"):
        asked = params(n_epochs=3, metrics=[MetricSpec("nll")], monitor=NLL)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run = built().train(asked, eval_step_fn=silent, salt=salt, callbacks=callbacks)
        told = [str(w.message) for w in caught if "has no value" in str(w.message)]
        assert {w.filename for w in caught} == {__file__}  # warnings point at who asked
        assert told == [
            "the monitor val.nll has no value in epoch 0; epochs without one decide nothing"
        ]
        assert [i.selection.status for i in run.idps if i.selection] == ["missing"] * 3
        assert run.idps[-1].epoch_idx == 2  # nothing to be patient with


def test_a_stopper_of_another_monitor_warns_for_itself():
    stopper = EarlyStopping(MonitorSpec("error"), patience=1)
    asked = params(n_epochs=2, metrics=[MetricSpec("nll")], monitor=MonitorSpec("loss"))
    with pytest.warns(RuntimeWarning, match=r"val\.error has no value") as caught:
        built().train(asked, eval_step_fn=silent, callbacks=[stopper])
    assert len([w for w in caught if "has no value" in str(w.message)]) == 1


def test_a_stopper_in_another_run_reads_that_runs_direction():
    stopper = EarlyStopping(MonitorSpec("score"), patience=1)

    def growing(ctx):
        return NNEvaluationDataPoint(metrics={"score": float(ctx.epoch_idx)})

    def epochs(declared):
        asked = params(n_epochs=4, metrics=[MetricSpec(declared, name="score")])
        run = built().train(asked, eval_step_fn=growing, callbacks=[stopper])
        return run.idps[-1].epoch_idx + 1

    assert epochs("accuracy") == 4  # a growing accuracy improves
    assert stopper.monitor_spec.mode == "max"
    assert epochs("nll") == 2  # a growing likelihood loss does not
    assert stopper.monitor_spec.mode == "min"
