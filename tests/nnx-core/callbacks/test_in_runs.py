"""The built-in callbacks in real runs."""

from __future__ import annotations

import warnings

import pytest
import torch
from nnx import (
    Checkpoints,
    EarlyStopping,
    Losses,
    LRMonitor,
    MetricSpec,
    MonitorSpec,
    Nets,
    NNCheckpoint,
    NNEvaluationDataPoint,
    NNModel,
    NNModelParams,
    NNOptimParams,
    NNParamGroupSpec,
    NNParams,
    NNSchedulerParams,
    NNTrainerParams,
    NNTrainParams,
    Optims,
    Schedulers,
    TensorBoardCallback,
    Trainer,
    supervised_objective,
)
from nnx.history import HistoryJournal


@pytest.fixture(autouse=True)
def runs_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def model(seed=0):
    torch.manual_seed(seed)
    return NNModel(
        net_params=NNParams(input_dim=4, output_dim=3, hidden_dims=[8], dropout_prob=0.0),
        params=NNModelParams(net=Nets.FEED_FWD, loss=Losses.CROSS_ENTROPY),
    )


def batches(n=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(8, 4, generator=generator), torch.randint(0, 3, (8,), generator=generator))
        for _ in range(n)
    ]


def sgd(**fields):
    return NNOptimParams(
        **{"name": Optims.SGD, "max_lr": 0.1, "weight_decay": 0.0, "momentum": 0.0, **fields}
    )


def train_params(**fields):
    return NNTrainParams(
        **{"n_epochs": 4, "train_loader": batches(), "val_loader": batches(2, seed=2), "seed": 0,
           "optim": sgd(), **fields}
    )  # fmt: skip


NLL = [0.8, 0.7, 0.695, 0.71]


def scripted(values):
    """An evaluator whose validation NLL follows a script."""

    def evaluate(ctx):
        value = values[ctx.epoch_idx]
        metrics = {} if value is None else {"nll": value}
        return NNEvaluationDataPoint(loss=1.0, metrics=metrics)

    return evaluate


def test_best_plateau_and_early_stopping_share_one_decision():
    monitor = MonitorSpec("nll", min_delta=0.01)
    stopper = EarlyStopping(monitor=monitor, patience=2)
    plateau = NNSchedulerParams(min_lr=0.0, factor=0.5, patience=0, cooldown=0, threshold=0.9)
    run = model().train(
        train_params(
            n_epochs=10, metrics=[MetricSpec("nll")], monitor=monitor, scheduler=plateau
        ),
        callbacks=[stopper], eval_step_fn=scripted([*NLL, 0.5, 0.4]),
    )  # fmt: skip
    last = [idp for idp in run.idps if idp.selection is not None]
    assert [idp.selection.improved for idp in last] == [True, True, False, False]
    assert stopper.stopped_epoch == 3
    assert stopper.selected_monitor == "val.nll"
    assert NNCheckpoint.load(run.id, Checkpoints.BEST).idp.epoch_idx == 1
    assert [round(idp.lr, 6) for idp in last] == [0.1, 0.1, 0.1, 0.05]


def test_an_epoch_without_the_watched_metric_decides_nothing():
    monitor = MonitorSpec("nll")
    stopper = EarlyStopping(monitor=monitor, patience=1)
    with pytest.warns(RuntimeWarning, match=r"val\.nll has no value in epoch 1"):
        model().train(
            train_params(n_epochs=5, metrics=[MetricSpec("nll")]),
            callbacks=[stopper], eval_step_fn=scripted([0.8, None, 0.7, 0.9, 0.1]),
        )  # fmt: skip
    assert stopper.stopped_epoch == 3


@pytest.mark.parametrize(
    ("monitor", "fields", "message"),
    [
        (MonitorSpec("nll"), {}, "watches 'nll', which is not declared"),
        (MonitorSpec("loss"), {"val_loader": None}, "val_loader is None"),
    ],
)
def test_a_monitor_that_cannot_be_watched_is_refused_before_a_run_exists(
    tmp_path, monitor, fields, message
):
    with pytest.raises(ValueError, match=message):
        model().train(train_params(**fields), callbacks=[EarlyStopping(monitor=monitor)])
    assert not list(tmp_path.iterdir())


def test_numbered_patience_is_restored_by_name():
    def stoppers():
        return [
            EarlyStopping("val_edp.loss", patience=9), EarlyStopping("train_edp.loss", patience=9),
        ]  # fmt: skip

    first = stoppers()
    run = model().train(train_params(n_epochs=2), callbacks=first)
    second = stoppers()
    resumed = model().train(
        train_params(n_epochs=1, resume_from_run_id=run.id, resume_mode="stateful"),
        callbacks=second,
    )
    assert resumed.resume_status.restored_components == ("early_stopping", "early_stopping.2")
    straight = stoppers()
    model().train(train_params(n_epochs=3), callbacks=straight)
    assert [(s.best, s.wait) for s in second] == [(s.best, s.wait) for s in straight]


def test_the_rates_of_an_update_clock_and_of_a_journaled_run():
    schedule = NNSchedulerParams(
        min_lr=0.0, factor=0.5, patience=0, cooldown=0, threshold=0.0, kind=Schedulers.STEP,
        step_size=2, clock="optimizer_update",
    )  # fmt: skip
    bounded, everything = LRMonitor(), LRMonitor(bounded=False)
    model().train(
        train_params(scheduler=schedule), callbacks=[bounded, everything],
        history=HistoryJournal(retention=2, chunk_size=1),
    )  # fmt: skip
    rates = [0.1 * 0.5 ** ((update + 1) // 2) for update in range(12)]
    assert everything.update_history == [(i, pytest.approx(r)) for i, r in enumerate(rates, 1)]
    assert everything.history == pytest.approx([rates[i] for i in (2, 5, 8, 11)])
    assert bounded.history == everything.history[-2:]
    assert bounded.update_history == everything.update_history[-2:]


def test_tensorboard_shows_the_run(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monitor = MonitorSpec("loss", split="train")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        run = model().train(
            train_params(metrics=[MetricSpec("brier")], monitor=monitor),
            callbacks=[TensorBoardCallback(str(tmp_path / "board"))],
        )
        read = EventAccumulator(str(tmp_path / "board")).Reload()
    last = [idp for idp in run.idps if idp.selection is not None]

    def series(tag):
        return [event.value for event in read.Scalars(tag)]

    for tag, values in {
        "train/loss": [idp.train_edp.loss for idp in last],
        "train_epoch/loss": [idp.train_summary.loss for idp in last],
        "train_epoch/brier": [idp.train_summary.metrics["brier"] for idp in last],
        "val/f1": [idp.val_edp.f1 for idp in last],
        "val/brier": [idp.val_edp.metrics["brier"] for idp in last],
        "monitor/train.loss": [idp.selection.value for idp in last],
        "monitor/improved": [float(idp.selection.improved) for idp in last],
    }.items():
        assert series(tag) == pytest.approx(values, rel=1e-5), tag


def test_a_trainer_logs_the_rate_of_every_optimizer(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    optims = {
        name: sgd(max_lr=lr, param_groups=[NNParamGroupSpec(name_pattern=pattern)])
        for name, lr, pattern in (("body", 0.1, "layers.0.*"), ("head", 0.2, "layers.1.*"))
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        Trainer(model()).train(
            NNTrainerParams(n_epochs=1, train_loader=batches(), optims=optims, seed=0),
            objective=supervised_objective(),
            callbacks=[TensorBoardCallback(str(tmp_path / "board"))],
        )
        read = EventAccumulator(str(tmp_path / "board")).Reload()
    rates = {tag: read.Scalars(tag)[0].value for tag in ("lr", "lr/body", "lr/head")}
    assert rates == pytest.approx({"lr": 0.1, "lr/body": 0.1, "lr/head": 0.2})
