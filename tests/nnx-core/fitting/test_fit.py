"""``nnx.fit``: the same values as the long way, from less."""

from __future__ import annotations

import copy
import inspect
import os
import subprocess
import sys

import nnx
import numpy as np
import pytest
import torch
from nnx.fitting import Batches, Fitted, fit
from nnx.params.scheduler import DEFAULT_SCHEDULER
from nnx.params.training import DEFAULT_OPTIM
from nnx.plugins import manager
from nnx.plugins.siblings import how_to_get
from nnx.seeding import isolated_rng
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def rows(n=48, seed=0):
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 3
    return torch.randn(n, 4, generator=generator) + 2.0 * y[:, None], y


X, Y = rows()
VX, VY = rows(24, seed=1)
PARAMS = nnx.NNParams(input_dim=4, output_dim=3, hidden_dims=[8], dropout_prob=0.1)


def small():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def loaders():
    return (
        DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True),
        DataLoader(TensorDataset(VX, VY), batch_size=16),
    )


def weights(model):
    return {name: value.clone() for name, value in model.net.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def the_long_way(net, train, val, **module):
    model_params = nnx.NNModelParams(
        net=net, loss=nnx.Losses.CROSS_ENTROPY, device=nnx.Devices.CPU,
        precision=nnx.PrecisionPolicy("bf16"),
    )  # fmt: skip
    with isolated_rng(3):
        module = {name: make() for name, make in module.items()}
        model = nnx.NNModel(params=model_params, **module)
    monitor = nnx.MonitorSpec("auroc")
    optim = nnx.NNOptimParams.builder().adamw(max_lr=3e-3).grad_clip(1.0).accumulate_grad(2)
    params = nnx.NNTrainParams(
        n_epochs=3, train_loader=train, val_loader=val, seed=3, optim=optim.build(),
        metrics=[nnx.MetricSpec("auroc")], monitor=monitor, data_id="rows",
    )  # fmt: skip
    stop = nnx.EarlyStopping(monitor, patience=2)
    return model, model.train(params, callbacks=[stop], salt="long")


SAID = {
    "loss": "Cross_Entropy", "optimizer": "adamw", "lr": 3e-3, "epochs": 3, "grad_clip_norm": 1.0,
    "accumulate": 2, "metrics": ("auroc",), "monitor": "auroc", "early_stopping": 2,
    "precision": "bf16", "device": "cpu", "seed": 3, "data_id": "rows",
}  # fmt: skip


@pytest.mark.parametrize("kind", ["factory", "module", "params", "spec"])
def test_it_builds_the_values_of_the_long_way_and_trains_the_same_weights(kind):
    if kind == "spec":
        nnx.register_model_factory("tests.fit", 1, lambda config: small(), replace=True)
    with isolated_rng(3):
        made = small()
    net, long = {
        "factory": (small, {"net": None, "module": small}),
        "module": (made, {"net": None, "module": lambda: copy.deepcopy(made)}),
        "params": (PARAMS, {"net": nnx.Nets.FEED_FWD, "net_params": lambda: PARAMS}),
        "spec": (nnx.ModelSpec("tests.fit"), {"net": nnx.ModelSpec("tests.fit")}),
    }[kind]
    train, val = loaders()
    model, run = the_long_way(train=train, val=val, **long)
    fitted = fit(net, train, val, **SAID, salt="short")
    one, other = fitted.run.state(), run.state()
    assert one.pop("id") != other.pop("id")
    assert (one.pop("salt"), other.pop("salt")) == ("short", "long")
    assert one == other
    assert fitted.run.id == nnx.NNRun(
        net=run.net, model=run.model, train=run.train, salt="short", transforms=()
    ).id  # fmt: skip
    assert same(weights(model), weights(fitted.model))
    assert [r.val_edp for r in fitted.run.idps] == [r.val_edp for r in run.idps]
    nnx.unregister_model_factory("tests.fit", 1)


def test_what_is_left_out_is_as_the_long_way_has_it():
    run = fit(small, *loaders(), epochs=1, device="cpu").run
    left = nnx.NNTrainParams(n_epochs=1)
    assert run.train.state() == left.state()
    assert (run.train.optim, run.train.scheduler) == (DEFAULT_OPTIM, DEFAULT_SCHEDULER)
    assert run.model.state() == nnx.NNModelParams(net=run.model.net).state()


def test_the_words_for_losses_schedules_and_devices_are_those_of_the_long_way():
    smoothed = nn.CrossEntropyLoss(label_smoothing=0.1)
    fitted = fit(
        small, *loaders(), loss=smoothed, optimizer="adamw", lr=3e-4, epochs=3,
        schedule="warmup_cosine", metrics=("auroc",), monitor="auroc", early_stopping=5,
        accumulate=4, precision="bf16", device="auto", seed=0,
    )  # fmt: skip
    run = fitted.run
    assert run.train.scheduler == nnx.SchedulerSpec("warmup_cosine")
    assert run.model.loss == nnx.NNModelParams(loss=smoothed).loss
    assert run.model.device is nnx.Devices.AUTO
    constant = fit(small, *loaders(), schedule=None, device="cpu", epochs=2, seed=0).run
    assert constant.train.state() == nnx.NNTrainParams(n_epochs=2, scheduler=None, seed=0).state()
    assert {record.lr for record in constant.idps} == {DEFAULT_OPTIM.max_lr}
    assert fitted.evaluate().accuracy == fitted.best().evaluate(loaders()[1]).accuracy


def test_tensors_datasets_arrays_and_tables_are_the_same_data():
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame(X.numpy(), columns=list("abcd")).assign(y=Y.numpy())
    arrays = (X.double().numpy(), Y.numpy().astype(np.int8))
    cases = {
        "loader": ((DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True),), {}),
        "tensors": (((X, Y),), {"batch_size": 8}),
        "dataset": ((TensorDataset(X, Y),), {"batch_size": 8}),
        "arrays": ((arrays,), {"batch_size": 8}),
        "table": ((frame,), {"batch_size": 8, "target": "y"}),
        "series": (((frame[list("abcd")], frame["y"]),), {"batch_size": 8}),
    }
    trained = {
        name: fit(small, *data, epochs=1, seed=0, device="cpu", salt=name, **options)
        for name, (data, options) in cases.items()
    }
    expected = weights(trained["loader"].model)
    for name, fitted in trained.items():
        assert same(expected, weights(fitted.model)), name
    read = trained["table"]
    assert read.evaluate(frame).accuracy == trained["arrays"].evaluate(arrays).accuracy
    shuffled = frame[["d", "y", "b", "a", "c"]]
    assert np.array_equal(read.predict(shuffled).logits, read.predict(X.numpy()).logits)
    assert read.evaluate(shuffled) == read.evaluate(frame)


def test_the_targets_of_a_regression_are_one_number_per_row():
    x = np.linspace(-1, 1, 32)[:, None]
    fitted = fit(
        lambda: nn.Linear(1, 1), (x, (3 * x[:, 0] > 0).astype(int)), loss="mean_squared_error",
        epochs=1, device="cpu",
    )  # fmt: skip
    loader = fitted.batches.loader((x, x[:, 0]), "data", shuffle=False)
    _, y = next(iter(loader))
    assert (y.shape, y.dtype) == ((32, 1), torch.float32)
    assert torch.equal(y, torch.from_numpy(x).float())


def test_classes_may_be_whole_floats_in_a_column_and_probabilities_stay():
    batches = Batches(loss=nnx.Losses.CROSS_ENTROPY)
    for y in ([0.0, 2.0], np.array([[0], [2]]), np.array([0, 2], dtype=np.uint8)):
        *_, read = next(iter(batches.loader((VX[:2], y), "train", shuffle=False)))
        assert torch.equal(read, torch.tensor([0, 2]))
    soft = np.array([[0.5, 0.5], [1.0, 0.0]])
    *_, read = next(iter(batches.loader((VX[:2], soft), "train", shuffle=False)))
    assert torch.equal(read, torch.from_numpy(soft).float())
    with pytest.raises(ValueError, match=r"train\[1\] holds 0.5 in row 1, which is not the index"):
        batches.loader((VX[:2], [1.0, 0.5]), "train", shuffle=False)


def test_the_best_epoch_is_scored_and_used_without_the_data_at_hand():
    class Worse(nnx.Callback):
        def on_epoch_end(self, ctx):
            if ctx.epoch == 2:
                with torch.no_grad():
                    [p.zero_() for p in ctx.model.net.parameters()]

    for net in (small, small(), PARAMS):
        fitted = fit(
            net, (X, Y), (VX, VY), epochs=3, seed=1, lr=0.05, device="cpu", callbacks=[Worse()],
            on_existing="replace",
        )  # fmt: skip
        stream = torch.get_rng_state()
        best = fitted.best()
        assert torch.equal(torch.get_rng_state(), stream)
        scores = [r.val_edp.error for r in fitted.run.idps if r.val_edp]
        assert isinstance(best, Fitted)
        assert best.evaluate().error == min(scores)
        assert fitted.evaluate().error == fitted.model.evaluate(loaders()[1]).error > min(scores)
        assert best.predict(VX).classes.shape == (24,)
        stored = nnx.NNCheckpoint.load(fitted.run.id, nnx.Checkpoints.BEST).net_state
        assert same(weights(best.model), dict(stored))
    with pytest.raises(ValueError, match="this fit had no validation data"):
        fit(small, (X, Y), epochs=1, device="cpu").evaluate()


def test_a_script_that_is_run_again_continues():
    said = {"epochs": 4, "seed": 1, "device": "cpu", "on_existing": "resume"}

    class Stop(nnx.Callback):
        def on_epoch_begin(self, ctx):
            if ctx.epoch == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(small, (X, Y), **said, callbacks=[Stop()])
    fitted = fit(small, (X, Y), **said)
    whole = fit(small, (X, Y), **said, salt="whole")
    assert repr(whole) == f"Fitted(Sequential, run {whole.run.id}, 4 epochs)"
    assert same(weights(fitted.model), weights(whole.model))
    assert fit(small, (X, Y), **said).run.id == fitted.run.id


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"optimizer": "adamw"}, r"optimizer='adamw'\) needs a learning rate, lr="),
        ({"optimizer": "adamwx", "lr": 0.1}, "did you mean 'adamw'"),
        ({"optimizer": DEFAULT_OPTIM, "accumulate": 2}, "say accumulate in its NNOptimParams"),
        ({"loss": "crossentropy"}, "did you mean 'cross_entropy'"),
        ({"net": 3}, "takes a torch.nn.Module, a function that makes one"),
        ({"train": loaders()[0], "batch_size": 4}, "has batches of its own; leave batch_size out"),
        ({"train": X}, r"needs inputs and targets: a tuple \(train_x, train_y\)"),
        ({"train": (X, Y[:5])}, r"different numbers of rows: \[48, 5\]"),
        ({"train": (X[:0], Y[:0])}, "train has no rows"),
        ({"train": (X.numpy(), ["a"] * 48)}, r"train\[1\] is not numeric"),
        ({"train": (X.numpy() * np.nan, Y)}, r"train\[0\], row 0: nan is not finite"),
        ({"target": "y"}, "target= names a column of a DataFrame"),
        ({"monitor": "auroc"}, "which is not declared"),
        ({"distributed": "dpp"}, "did you mean 'ddp'"),
        ({"device": "gpu"}, "device must be one of"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_done(arguments, problem):
    stream = torch.get_rng_state()
    asked = {"net": small, "train": (X, Y), "device": "cpu", "epochs": 1, **arguments}
    with pytest.raises((ValueError, TypeError), match=problem):
        fit(**asked)
    assert torch.equal(torch.get_rng_state(), stream)
    assert not os.path.exists("runs")


def test_tables_that_do_not_fit_are_refused():
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"a": [0.0, 1.0], "b": [1, 0], "y": [0, 1]})
    said = {"net": lambda: nn.Linear(2, 2), "epochs": 1, "device": "cpu"}
    for train, val, target, problem in (
        (frame, None, None, "say which column is to be predicted, with target="),
        (frame, None, "z", "train has no column 'z'"),
        (frame, frame[["a", "y"]], "y", r"val lacks the columns \['b'\], which train has"),
        (frame.assign(a=["x", "y"]), None, "y", "column 'a' is not numeric"),
        (frame.assign(a=[None, 1.0]), None, "y", "column 'a', row 0: nan is not finite"),
    ):
        with pytest.raises(ValueError, match=problem):
            fit(train=train, val=val, target=target, **said)
    assert not os.path.exists("runs")


def test_images_and_tokens_keep_their_shapes_and_kinds():
    batches = Batches(batch_size=2)
    images, tokens = np.zeros((2, 3, 4, 4)), np.ones((2, 5), dtype=np.int32)
    one, two, y = next(iter(batches.loader((images, tokens, [0, 1]), "train", shuffle=False)))
    assert (one.shape, one.dtype) == ((2, 3, 4, 4), torch.float32)
    assert (two.shape, two.dtype, y.dtype) == ((2, 5), torch.int64, torch.int64)
    images[1, 2, 3, 3] = np.inf
    with pytest.raises(ValueError, match="row 1: inf is not finite"):
        batches.loader((images, [0, 1]), "train", shuffle=False)


def test_the_report_is_that_of_the_renderer_of_pages(monkeypatch):
    fitted = fit(small, (X, Y), epochs=1, device="cpu")
    monkeypatch.setattr("nnx.fitting.fitted.PAGE", "tests.page")
    with pytest.raises(ImportError) as refused:
        fitted.report()
    assert str(refused.value) == how_to_get("Fitted.report", "nnx-viz")
    renderers = manager.registry("renderer")
    renderers.register("tests.page", 1, lambda ids, path: f"{path} of {ids}", owner="tests")
    try:
        assert fitted.report("x.html") == f"x.html of {[fitted.run.id]}"
    finally:
        renderers.unregister("tests.page", 1)


def test_nothing_is_said_shortly_that_the_long_way_lacks_and_the_name_costs_nothing():
    long = {
        *nnx.NNTrainParams.__dataclass_fields__,
        *nnx.NNModelParams.__dataclass_fields__,
        *nnx.NNOptimParams.__dataclass_fields__,
        *inspect.signature(nnx.NNModel.train).parameters,
        *inspect.signature(nnx.NNModel.__init__).parameters,
    }
    words = {
        "train": "train_loader", "val": "val_loader", "epochs": "n_epochs", "optimizer": "optim",
        "lr": "max_lr", "accumulate": "accumulate_grad_batches", "schedule": "scheduler",
    }  # fmt: skip
    own = {"early_stopping", "target", "batch_size"}  # a callback, and how data are read
    assert {words.get(name, name) for name in inspect.signature(fit).parameters} - own <= long
    code = "import nnx, sys; print('torch' in sys.modules, 'fit' in dir(nnx))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "True"]
    assert nnx.fit is fit
