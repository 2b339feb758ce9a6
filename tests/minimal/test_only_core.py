"""Only nnx-core and what it declares: it imports, and what is optional refuses."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import nnx
import pytest
import torch
from nnx.plugins import siblings
from nnx.plugins.siblings import how_to_get, install_line
from torch.utils.data import DataLoader, TensorDataset

OPTIONAL = (
    "pandas", "sklearn", "tensorboard", "wandb", "mlflow", "torchdata", "torch_geometric", "tokenizers",
    "huggingface_hub", "plotly", "captum", "torchinfo", "torchao", "optuna", "gguf", "faiss",
    "onnx", "peft", "transformers",
)  # fmt: skip


@pytest.mark.parametrize("library", OPTIONAL)
def test_nothing_optional_is_installed(library: str) -> None:
    assert importlib.util.find_spec(library) is None


def test_every_module_of_core_imports() -> None:
    found = [m.name for m in pkgutil.walk_packages(nnx.__path__, "nnx.")]
    assert "nnx.cli.app" in found
    for name in found:
        if name not in ("nnx.__main__", "nnx.sklearn"):  # the second refuses: see below
            importlib.import_module(name)


def test_every_public_name_of_core_is_there() -> None:
    for name in nnx.__all__:
        assert getattr(nnx, name) is not None


@pytest.mark.parametrize("distribution", siblings.MODULES)
def test_every_name_of_an_extension_refuses_with_its_install_line(distribution: str) -> None:
    for name in (*siblings.PUBLIC_NAMES[distribution], *siblings.MODULES[distribution]):
        assert not hasattr(nnx, name)
        with pytest.raises(ImportError) as raised:
            exec(f"from nnx import {name}", {})
        assert siblings.how_to_get(repr(name), distribution) in str(raised.value)


# -- core trains -------------------------------------------------------------------------


def a_model() -> nnx.NNModel:
    return nnx.NNModel(
        net_params=nnx.NNParams(input_dim=4, output_dim=2, hidden_dims=[8], dropout_prob=0.0),
        params=nnx.NNModelParams(net=nnx.Nets.FEED_FWD, loss=nnx.Losses.CROSS_ENTROPY),
    )


def test_a_model_trains_resumes_and_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    nnx.set_seed(0)
    inputs = torch.randn(64, 4)
    data = TensorDataset(inputs, (inputs[:, 0] > 0).long())
    loader = DataLoader(data, batch_size=16, shuffle=True)
    params = nnx.NNTrainParams(n_epochs=4, train_loader=loader, val_loader=loader, seed=0)
    run = a_model().train(params)
    errors = [record.val_edp.error for record in run.idps if record.val_edp is not None]
    assert len(errors) == 4
    assert errors[-1] < errors[0]
    assert nnx.NNRun.load(run.id).state() == run.state()
    longer = dataclasses.replace(params, resume_from_run_id=run.id, resume_mode="stateful")
    assert a_model().train(longer).resume_status.mode == "stateful"


def test_the_command_trains_a_table_and_predicts(tmp_path: Path) -> None:
    rows = "".join(
        f"{n},{'red' if n % 3 else 'blue'},{'yes' if n > 20 else 'no'}\n" for n in range(40)
    )
    (tmp_path / "data.csv").write_text("size,colour,label\n" + rows)

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "nnx", *arguments]
        env = {**os.environ, "COLUMNS": "140"}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("train", "data.csv", "--target", "label", "--epochs", "3")
    assert run("predict", "best", "data.csv").splitlines()[0].startswith("predicted label,")
    assert "finished" in run("runs")
    assert "missing" in run("doctor")


# -- what is optional says how to get it ---------------------------------------------------

REFUSALS = {
    "a data frame": (
        lambda: nnx.NNTabularDataset(df=object(), feature_cols=["a"], target_col="b"),
        install_line("nnx-core", "tabular"),
    ),
    "tensorboard": (lambda: nnx.TensorBoardCallback(), install_line("nnx-core", "tensorboard")),
    "scikit-learn": (
        lambda: importlib.import_module("nnx.sklearn"), install_line("nnx-core", "sklearn"),
    ),
    "mlflow": (lambda: nnx.MLflowCallback(), install_line("nnx-core", "mlflow")),
    "wandb": (lambda: nnx.WandbCallback(project="p"), install_line("nnx-core", "wandb")),
    "the hub": (lambda: a_model().save_pretrained("here"), how_to_get("That", "nnx-hub")),
    "publishing": (lambda: a_model().push_to_hub("me/model"), how_to_get("That", "nnx-hub")),
    "onnx": (
        lambda: a_model().to_onnx("model.onnx", torch.randn(1, 4)),
        how_to_get("That", "nnx-hub", "onnx"),
    ),
    "a tokenizer": (
        lambda: nnx.NNTokenizerParams.from_state({"path": "tokenizer.json"}),
        install_line("nnx-lm"),
    ),
    "a graph net": (lambda: nnx.Nets.GRAPH_CONV(params=a_model().net_params), how_to_get("'graph_conv'", "nnx-graph")),
    "the demo's data": (
        lambda: importlib.import_module("nnx.cli.demo")._table(),
        install_line("nnx-core", "demo"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("part", REFUSALS)
def test_an_optional_part_refuses_with_its_install_line(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call, line = REFUSALS[part]
    kind = TypeError if part == "a data frame" else ImportError
    with pytest.raises(kind) as raised:
        call()
    assert line in str(raised.value)
    assert list(tmp_path.iterdir()) == []
