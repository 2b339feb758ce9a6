"""Exports give what the model gives, on every batch size, or are not written."""

from __future__ import annotations

import json
import os
import re
import subprocess
import venv
from pathlib import Path

import numpy as np
import pytest
import torch
from nnx import Activations, Losses, Nets, NNModel, NNModelParams, NNParams
from nnx.hub import ExportError
from nnx.hub.exporting import RECORD
from safetensors import safe_open

onnxruntime = pytest.importorskip("onnxruntime")
import onnx  # noqa: E402

X = torch.randn(20, 6, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def model():
    torch.manual_seed(0)
    net = NNParams(
        input_dim=6, output_dim=3, hidden_dims=[8], dropout_prob=0.2, activation=Activations.RELU
    )
    return NNModel(net, NNModelParams(net=Nets.FEED_FWD, loss=Losses.CROSS_ENTROPY))


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("rows", [1, 4])
def test_onnx_runs_on_any_batch(model, dynamo, rows):
    model.net.train()
    assert model.to_onnx("m.onnx", X[:rows], dynamo=dynamo) == "m.onnx"
    assert model.net.training
    assert os.listdir(".") == ["m.onnx"]
    graph = onnx.load("m.onnx")
    onnx.checker.check_model(graph)
    record = json.loads({p.key: p.value for p in graph.metadata_props}[RECORD])
    assert record["max_difference"] <= record["tolerance"] == 1e-4
    assert (record["opset"], record["batches"]) == (18 if dynamo else 17, [1, 2, 3, 7])
    session = onnxruntime.InferenceSession("m.onnx")
    for n in (1, 5, 20):
        (found,) = session.run(None, {"input": X[:n].numpy()})
        np.testing.assert_allclose(found, model.predict(X[:n]).logits, atol=1e-5)


def test_pt2_runs_on_any_batch(model):
    assert model.export("m.pt2", "pt2", example_input=X[:1]) == "m.pt2"
    extra = {RECORD: ""}
    back = torch.export.load("m.pt2", extra_files=extra).module()
    assert json.loads(extra[RECORD])["max_difference"] <= 1e-4
    for n in (1, 5):
        np.testing.assert_allclose(back(X[:n]).detach(), model.predict(X[:n]).logits, atol=1e-5)


def test_safetensors_hold_the_weights_and_what_they_are(model):
    model.export("m.safetensors", "safetensors")
    with safe_open("m.safetensors", framework="pt") as file:
        about = json.loads(file.metadata()[RECORD])
        for name, value in model.net.state_dict().items():
            assert torch.equal(file.get_tensor(name), value)
    assert about["config"]["net_params"]["input_dim"] == 6


def test_an_export_beyond_the_tolerance_is_not_written(model):
    with pytest.raises(ExportError, match="more than -1"):
        model.export("m.onnx", "onnx", example_input=X, tolerance=-1)
    assert os.listdir(".") == []


def test_what_cannot_be_exported_is_named(model):
    with pytest.raises(TypeError, match="positional forward"):
        model.to_onnx("m.onnx", {"x": X})
    with pytest.raises(TypeError, match=r"example_input\[0\]"):
        model.to_onnx("m.onnx", "x")
    with pytest.raises(ValueError, match="input_names must be 1"):
        model.to_onnx("m.onnx", X, input_names=["a", "b"])

    class Refuses(torch.nn.Linear):
        exportable = False

    with pytest.raises(TypeError, match="cannot be exported"):
        NNModel(params=NNModelParams(), module=Refuses(6, 2)).export("m", "onnx", example_input=X)
    assert os.listdir(".") == []


def test_an_adapted_and_a_runtime_net_are_exported(model):
    model.net.layers[0] = torch.nn.Sequential(model.net.layers[0], torch.nn.Tanh())
    model.to_onnx("a.onnx", X)
    module = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.GELU())
    NNModel(params=NNModelParams(), module=module).to_onnx("b.onnx", X, dynamic_batch=False)
    assert sorted(os.listdir(".")) == ["a.onnx", "b.onnx"]


SCRIPTS = [
    text
    for text in re.findall(
        r"```\{\.python \.no-run\}\n(.*?)```",
        (Path(__file__).parents[2] / "docs" / "travel.md").read_text(encoding="utf-8"),
        re.DOTALL,
    )
    if "import nnx" not in text and "from nnx" not in text
]


@pytest.fixture(scope="module")
def without_nnx(tmp_path_factory):
    """The Python of a new environment that has the third-party libraries, and no NNx."""
    folder = tmp_path_factory.mktemp("without-nnx") / "env"
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    shown = subprocess.run(
        [python, "-I", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    libraries = Path(torch.__file__).parents[1]
    Path(shown.stdout.strip(), "libraries.pth").write_text(f"{libraries}\n")
    found = subprocess.run(
        [python, "-I", "-c", "import importlib.util as u; print(u.find_spec('nnx') is None)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    if found.stdout.strip() != "True":
        pytest.skip("NNx is installed in the folder of torch, which the environment borrows")
    return str(python)


def test_the_documented_scripts_run_where_there_is_no_nnx(without_nnx):
    """On files of a net with four inputs."""
    torch.manual_seed(0)
    net = NNParams(input_dim=4, output_dim=2, hidden_dims=[8], dropout_prob=0.0)
    model = NNModel(net, NNModelParams(net=Nets.FEED_FWD, loss=Losses.CROSS_ENTROPY))
    rows = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    model.to_onnx("model.onnx", rows)
    model.export("model.pt2", "pt2", example_input=rows)
    model.export("model.safetensors", "safetensors")
    wanted = str(model.predict(rows).logits.argmax(axis=1))
    assert len(SCRIPTS) == 3
    for script in SCRIPTS:
        assert script.count("\n") <= 20
        done = subprocess.run(
            [without_nnx, "-I", "-c", script], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr[-2000:]
        if "default_rng(0)" in script:
            assert done.stdout.strip() == wanted
