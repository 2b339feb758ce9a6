"""``nnx export`` as a person runs it; ``nnx hub`` is in test_publishing.py."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from nnx import Losses, Nets, NNModel, NNModelParams, NNParams, NNTrainParams
from nnx.cli.app import build
from typer.testing import CliRunner

onnxruntime = pytest.importorskip("onnxruntime")
X = torch.randn(20, 6, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def nnx(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NNX_RUNS", "")

    def nnx(*arguments):
        os.environ["NNX_RUNS"] = ""
        done = CliRunner().invoke(build(), arguments)
        return done.exit_code, done.stdout, done.stderr

    return nnx


def trained(**module):
    torch.manual_seed(0)
    net = NNParams(input_dim=6, output_dim=3, hidden_dims=[8], dropout_prob=0.2)
    params = NNModelParams(net=None if module else Nets.FEED_FWD, loss=Losses.CROSS_ENTROPY)
    model = NNModel(None if module else net, params, **module)
    loader = [(X, torch.arange(20) % 3)]
    params = NNTrainParams(n_epochs=2, seed=3, train_loader=loader, val_loader=loader)
    return model, model.train(params)


def test_a_run_is_exported_to_each_runtime(nnx):
    model, run = trained()
    wanted = model.predict(X).logits
    code, out, err = nnx("export", run.id[:8], "m.onnx", "--to", "onnx", "--checkpoint", "last")
    assert (code, out) == (0, "m.onnx\n"), err
    (found,) = onnxruntime.InferenceSession("m.onnx").run(None, {"input": X.numpy()})
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    code, out, _ = nnx("export", run.id, "--to", "pt2", "--checkpoint", "last")
    assert (code, out) == (0, f"{run.id[:12]}.pt2\n")
    found = torch.export.load(out.strip()).module()(X).detach()
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    code, out, _ = nnx("export", run.id, "m.safetensors", "--to", "safetensors", "--shape", "6")
    assert (code, out) == (0, "m.safetensors\n")
    code, out, _ = nnx("export", run.id, "d.onnx", "--to", "onnx", "--dynamo")
    assert (code, out) == (0, "d.onnx\n")


def test_what_cannot_be_exported_is_one_line_and_leaves_nothing(nnx):
    _, run = trained()
    before = sorted(os.listdir("."))
    code, _, err = nnx("export", run.id, "m.x", "--to", "onxx")
    assert (code, err.startswith("nnx: "), "onnx" in err) == (1, True, True)
    code, _, err = nnx("export", "0" * 32, "--to", "onnx")
    assert (code, err.count("\n")) == (1, 1)
    code, _, err = nnx("export", run.id, "--to", "onnx", "--shape", "7")
    assert (code, err.startswith("nnx: ")) == (1, True)
    code, _, err = nnx("export", run.id, "--to", "onnx", "--shape", "six")
    assert code != 0
    assert "six is not numbers" in err
    _, run = trained(module=torch.nn.Linear(6, 3))
    code, _, err = nnx("export", run.id, "--to", "onnx", "--shape", "6")
    assert (code, "runtime" in err or "module" in err) == (1, True)
    assert sorted(os.listdir(".")) == before
