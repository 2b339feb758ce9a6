from __future__ import annotations

import collections
import importlib.util
import os
import re
import sys
import time
import types
from types import SimpleNamespace

import pytest
import torch
from nnx.callbacks import (
    Callback,
    LRMonitor,
    MLflowCallback,
    ModelCheckpoint,
    TensorBoardCallback,
    WandbCallback,
    as_callback,
    history_access_of,
)
from nnx.monitors import MonitorRecord, MonitorSpec
from nnx.plugins.siblings import install_line
from nnx.records import NNEvaluationDataPoint as Edp
from nnx.records import NNIterationDataPoint as Idp


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def context(epoch=0, lr=0.1, *, optimizers=None, retention=None, **fields):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    idp = Idp(
        lr=lr, iter_idx=epoch, epoch_idx=epoch, batch_idx=0,
        **{"train_edp": Edp(loss=1.0, accuracy=0.5), **fields},
    )  # fmt: skip
    deferred = []
    return SimpleNamespace(
        epoch=epoch, idp=idp, idps=[idp], optimizer=optimizer, optimizers=optimizers,
        retention=retention, deferred=deferred, defer_checkpoint=deferred.append,
        failed=False,
        run=SimpleNamespace(id="abc", name=None, state=lambda: {"id": "abc", "train": {"n_epochs": 2}}),
    )  # fmt: skip


# -- the base class --------------------------------------------------------------------------


def test_every_hook_of_the_base_class_does_nothing():
    callback = Callback()
    for hook in ("on_train_begin", "on_epoch_begin", "on_epoch_end", "on_train_end"):
        assert getattr(callback, hook)(None) is None
    assert callback.on_optimizer_update(None, None) is None
    assert callback.checkpoint_transforms() == ()


def test_a_function_of_the_records_is_called_at_the_end_of_every_epoch():
    seen = []
    callback = as_callback(seen.append)
    ctx = context()
    callback.on_epoch_begin(ctx)
    callback.on_epoch_end(ctx)
    assert seen == [ctx.idps]


def test_other_objects_are_no_callbacks():
    callback = LRMonitor()
    assert as_callback(callback) is callback
    with pytest.raises(TypeError, match=r"pass LRMonitor\(\), not the class"):
        as_callback(LRMonitor)
    with pytest.raises(TypeError, match="a Callback or a function of the records, not int"):
        as_callback(3)


def test_history_access_is_window_or_full():
    class Reader(Callback):
        history_access = "full"

    assert history_access_of(Callback()) == "window"
    assert history_access_of(Reader()) == "full"
    Reader.history_access = "all"
    with pytest.raises(ValueError, match=r"Reader\.history_access must be one of window, full"):
        history_access_of(Reader())


# -- LRMonitor -------------------------------------------------------------------------------


def test_lr_monitor_keeps_one_rate_per_epoch_and_goes_on_over_fits():
    monitor = LRMonitor()
    for epoch, lr in enumerate((0.1, 0.05)):
        monitor.on_epoch_end(context(epoch, lr))
    monitor.on_train_begin(context())
    monitor.on_epoch_end(context(0, 0.2))
    assert monitor.history == [0.1, 0.05, 0.2]
    assert monitor.update_history == []


def test_lr_monitor_traces_the_update_clock():
    monitor = LRMonitor()
    for index, lr in enumerate((0.04, 0.08)):
        monitor.on_scheduler_step(context(lr=lr), index)
    assert monitor.update_history == [(0, 0.04), (1, 0.08)]


def test_lr_monitor_keeps_the_last_entries_of_a_journaled_run():
    bounded, everything = LRMonitor(), LRMonitor(bounded=False)
    for epoch in range(5):
        for monitor in (bounded, everything):
            monitor.on_epoch_end(context(epoch, epoch + 1.0, retention=2))
    assert bounded.history == [4.0, 5.0]
    assert everything.history == [1.0, 2.0, 3.0, 4.0, 5.0]


# -- ModelCheckpoint -------------------------------------------------------------------------


def test_model_checkpoint_asks_for_its_epochs():
    checkpoint = ModelCheckpoint(epochs=[1, 3], tag="snap")
    asked = []
    for epoch in range(5):
        ctx = context(epoch)
        checkpoint.on_epoch_end(ctx)
        asked += ctx.deferred
    assert asked == ["snap_e1", "snap_e3"]


def test_model_checkpoint_without_epochs_saves_nothing():
    ctx = context()
    ModelCheckpoint().on_epoch_end(ctx)
    assert ctx.deferred == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epochs": [-1]}, r"ModelCheckpoint\.epochs"),
        ({"epochs": [True]}, r"ModelCheckpoint\.epochs"),
        ({"tag": ""}, r"ModelCheckpoint\.tag"),
        ({"tag": "../last"}, "usable in a file name"),
        ({"tag": ".hidden"}, "usable in a file name"),
    ],
)
def test_model_checkpoint_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        ModelCheckpoint(**arguments)


# -- loggers ---------------------------------------------------------------------------------


def full_context(epoch=0):
    optimizers = {
        name: torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
        for name, lr in (("D", 0.1), ("G", 0.2))
    }
    monitor = MonitorSpec("nll", mode="min")
    return context(
        epoch, optimizers=optimizers,
        train_edp=Edp(loss=1.0, accuracy=0.5, extra={"recon": 0.25}),
        val_edp=Edp(loss=0.75, metrics={"mse": 2.0, "accuracy": 0.625}),
        train_summary=Edp(loss=0.875),
        selection=MonitorRecord(monitor=monitor, value=0.5, status="ok", improved=True),
    )  # fmt: skip


EXPECTED = {
    "lr": 0.1,
    "lr/D": 0.1,
    "lr/G": 0.2,
    "train/loss": 1.0,
    "train/accuracy": 0.5,
    "train/recon": 0.25,
    "val/loss": 0.75,
    "val/mse": 2.0,
    "val/metrics/accuracy": 0.625,
    "train_epoch/loss": 0.875,
    "monitor/val.nll": 0.5,
    "monitor/improved": 1.0,
}


def test_tensorboard_writes_every_number_and_no_fabricated_one(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    callback = TensorBoardCallback(str(tmp_path))
    for epoch in (0, 1):
        callback.on_epoch_end(full_context(epoch))
    read = EventAccumulator(str(tmp_path)).Reload()  # flushed before the end
    assert read.Tags()["scalars"]
    callback.on_train_end(full_context(1))

    read = EventAccumulator(str(tmp_path)).Reload()
    assert set(read.Tags()["scalars"]) == set(EXPECTED)
    for tag, value in EXPECTED.items():
        assert [(e.step, pytest.approx(e.value)) for e in read.Scalars(tag)] == [
            (0, value),
            (1, value),
        ]


def test_wandb_logs_offline_and_finishes_its_own_run(tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    callback = WandbCallback(project="nnx-tests", mode="offline", dir=str(tmp_path))
    callback.on_epoch_end(full_context(0))
    run = wandb.run
    assert run.settings.mode == "offline"
    assert run.config["train"]["n_epochs"] == 2
    callback.on_epoch_end(full_context(1))
    callback.on_train_end(full_context(1))
    assert wandb.run is None

    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    written = read_when_complete(file)
    for tag in EXPECTED:
        assert written.count(tag.encode()) >= 2, tag
    assert b"0.625" in written


def read_when_complete(file):
    """W&B's own process writes its protobuf records, and may still do so after finish()."""
    deadline = time.monotonic() + 60
    while b"train_epoch/loss" not in (written := file.read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return written


def test_wandb_attaches_to_a_run_and_leaves_it_open():
    class Run:
        logged, finished = [], False

        def log(self, values, step):
            self.logged.append((step, values))

        def finish(self):
            self.finished = True

    run = Run()
    callback = WandbCallback(wandb_run=run)
    callback.on_epoch_end(full_context(3))
    callback.on_train_end(full_context(3))
    ((step, values),) = run.logged
    assert step == 3
    assert {key: values[key] for key in EXPECTED} == pytest.approx(EXPECTED)
    assert not run.finished
    with pytest.raises(ValueError, match="a run that was started already; project and mode"):
        WandbCallback(wandb_run=run, mode="offline")


@pytest.mark.parametrize(
    ("make", "package"),
    [(TensorBoardCallback, "tensorboard"), (WandbCallback, "wandb"), (MLflowCallback, "mlflow")],
)
def test_a_missing_library_is_named_before_any_work(make, package, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ImportError, match=f"needs {package}.*{re.escape(install_line('nnx-core', package))}"
    ):
        make()


def test_importing_the_callbacks_loads_no_logger():
    import subprocess

    code = "import nnx.callbacks, sys; print({'wandb', 'tensorboard', 'mlflow'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "set()\n"


def test_wandb_leaves_a_run_open_that_was_active_before(tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    mine = wandb.init(project="mine", mode="offline", dir=str(tmp_path))
    try:
        callback = WandbCallback(project="nnx-tests", mode="offline")
        callback.on_epoch_end(full_context(0))
        callback.on_train_end(full_context(0))
        assert wandb.run is mine
    finally:
        mine.finish()


# A store of files cannot hold "lr" beside "lr/D", which is one of the named rates anyway.
IN_MLFLOW = {tag: value for tag, value in EXPECTED.items() if tag != "lr"}


class TrackingStore:
    """What the callback asks of ``mlflow``, in memory."""

    def __init__(self, monkeypatch):
        self.experiments, self.runs, self.active = {"Default": "0"}, {}, None
        entities = types.ModuleType("mlflow.entities")
        entities.Metric = collections.namedtuple("Metric", "key value timestamp step")
        entities.Param = collections.namedtuple("Param", "key value")
        mlflow = types.ModuleType("mlflow")
        mlflow.entities, mlflow.MlflowClient = entities, lambda uri: self
        mlflow.active_run = lambda: self.active
        mlflow.__spec__ = importlib.util.spec_from_loader("mlflow", None)
        monkeypatch.setitem(sys.modules, "mlflow", mlflow)
        monkeypatch.setitem(sys.modules, "mlflow.entities", entities)

    def get_experiment_by_name(self, name):
        found = self.experiments.get(name)
        return found and types.SimpleNamespace(experiment_id=found)

    def create_experiment(self, name):
        return self.experiments.setdefault(name, str(len(self.experiments)))

    def create_run(self, experiment, tags, run_name):
        run = {"experiment": experiment, "tags": tags, "name": run_name}
        id = "one"
        self.runs[id] = {**run, "metrics": [], "params": {}, "status": "RUNNING"}
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=id))

    def log_batch(self, id, metrics=(), params=()):
        assert len(metrics) <= 1000
        assert len(params) <= 100
        self.runs[id]["metrics"] += metrics
        self.runs[id]["params"] |= dict(params)

    def set_terminated(self, id, status):
        self.runs[id]["status"] = status


def test_mlflow_gets_every_number_the_configuration_and_how_it_ended(monkeypatch):
    store = TrackingStore(monkeypatch)
    for failed, status in ((False, "FINISHED"), (True, "FAILED")):
        callback = MLflowCallback(experiment="mine")
        context = full_context(0)
        callback.on_epoch_end(context)
        callback.on_epoch_end(full_context(1))
        context.failed = failed
        callback.on_train_end(context)
        (run,) = store.runs.values()
        assert (store.experiments, run["experiment"]) == ({"Default": "0", "mine": "1"}, "1")
        assert (run["status"], run["tags"]) == (status, {"nnx.run_id": context.run.id})
        assert run["params"]["train.n_epochs"] == "2"
        for step in (0, 1):
            logged = {m.key: m.value for m in run["metrics"] if m.step == step}
            assert logged == IN_MLFLOW


def test_mlflow_leaves_a_run_open_that_was_active_or_is_given(monkeypatch):
    store = TrackingStore(monkeypatch)
    mine = store.create_run("0", {}, "mine")
    for callback, active in ((MLflowCallback(mlflow_run=mine), None), (MLflowCallback(), mine)):
        store.active = active
        callback.on_epoch_end(full_context(0))
        callback.on_train_end(full_context(0))
        (run,) = store.runs.values()
        assert (run["status"], run["params"]["train.n_epochs"]) == ("RUNNING", "2")
    with pytest.raises(ValueError, match="a run that was started already; experiment='x'"):
        MLflowCallback(experiment="x", mlflow_run=mine)


def test_mlflow_itself_stores_what_was_logged(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = tmp_path.as_uri()
    callback = MLflowCallback("mine", tracking_uri=uri)
    for epoch in (0, 1):
        callback.on_epoch_end(full_context(epoch))
    callback.on_train_end(full_context(1))
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["train.n_epochs"] == "2"
    for tag, value in IN_MLFLOW.items():
        history = client.get_metric_history(run.info.run_id, tag)
        assert sorted((m.step, m.value) for m in history) == [(0, value), (1, value)]


def test_no_logger_writes_into_the_runs_folder_by_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    callback = TensorBoardCallback()
    callback.on_epoch_end(full_context(0))
    callback.on_train_end(full_context(0))
    assert os.listdir() == ["tensorboard"]
    assert os.listdir("tensorboard") == [full_context(0).run.id]
