"""Recorded recipes as the original system stores them, and as earlier runs did."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from nnx import (
    Activations,
    Checkpoints,
    Losses,
    Nets,
    NNCheckpoint,
    NNModel,
    NNModelParams,
    NNParams,
    NNRun,
    NNTrainParams,
    set_seed,
)
from nnx.params import NNCheckpointTransform
from nnx.transforms import TransformOp, TransformRecipe, lora, low_rank
from torch.utils.data import DataLoader, TensorDataset

DATA = Path(__file__).parents[2] / "data"
EARLIER = json.loads((DATA / "earlier-runs" / "expected.json").read_text())
_draw = torch.Generator().manual_seed(5)
X = torch.randn(24, 6, generator=_draw)
Y = torch.randint(0, 3, (24,), generator=_draw)
WIDE = torch.load(DATA / "earlier-runs" / "inputs.pt", weights_only=True)["x32"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    shutil.copytree(DATA / "earlier-runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)


def model(*operations, **net):
    given = {"input_dim": 6, "output_dim": 3, "hidden_dims": [8], "dropout_prob": 0.0}
    params = NNParams(**{**given, "activation": Activations.RELU, **net})
    made = NNModel(params, NNModelParams(net=Nets.FEED_FWD, loss=Losses.CROSS_ENTROPY))
    return TransformRecipe(operations).materialize(made)


def test_a_trained_recipe_is_stored_under_the_id_of_the_original(here):
    wanted = json.loads((DATA / "identities.json").read_text())["recipe_lora"]
    set_seed(11)
    made = model(lora("layers.0", r=2, alpha=4.0))
    loader = DataLoader(TensorDataset(X, Y), batch_size=8)
    run = made.train(NNTrainParams(n_epochs=1, seed=1, train_loader=loader))
    assert run.id == wanted["id"]
    assert yaml.safe_load(Path(f"runs/{run.id}/run.yaml").read_text()) == wanted["run_yaml"]
    checkpoint = NNCheckpoint.load(run.id, Checkpoints.LAST)
    assert [t.state() for t in checkpoint.transforms] == wanted["checkpoint"]
    assert sorted(made.net.state_dict()) == wanted["keys"]
    assert [r.train_edp.loss for r in run.idps] == pytest.approx(wanted["loss"], abs=2e-5)


def test_each_operation_has_flat_options_in_order_of_their_names():
    record = low_rank("a", "b", rank=2).checkpoint_transform().state()
    assert record == {
        "name": "low_rank",
        "options": {"method": "svd", "rank": 2, "targets": ["a", "b"]},
        "version": 1,
    }
    assert list(record) == sorted(record)
    assert list(record["options"]) == sorted(record["options"])


@pytest.mark.parametrize(
    ("earlier", "name", "config"),
    [
        ("nnx.lora", "lora", {"r": 2, "alpha": 4.0, "dropout": 0.0}),
        ("nnx.low_rank", "low_rank", {"rank": 2, "method": "svd"}),
        ("torchao.qat", "torchao_qat", {"qat_config": "8da4w", "groupsize": 32}),
    ],
)
def test_an_operation_of_an_earlier_form_is_read_in_todays(earlier, name, config):
    stored = {"name": earlier, "version": 1, "options": {"targets": ["a"], "config": config}}
    read = NNCheckpointTransform.from_state(stored)
    assert read == NNCheckpointTransform(name, 1, {**config, "targets": ["a"]})
    assert TransformOp.from_checkpoint_transform(read).config == config


def test_an_operation_of_others_is_read_as_it_was_written():
    stored = {"name": "acme.x", "version": 2, "options": {"targets": ["a"], "config": {"k": 1}}}
    read = NNCheckpointTransform.from_state(stored)
    assert read.state() == stored


def outputs(checkpoint, x):
    net = NNModel.from_checkpoint(checkpoint).net.eval()
    with torch.no_grad():
        return net(x[:3]).float().flatten().tolist()


def test_an_earlier_run_with_a_recipe_loads_and_resumes(here):
    case = EARLIER["recipe"]
    run = NNRun.load(case["id"])
    assert (run.id, [t.name for t in run.transforms]) == (case["id"], ["lora", "low_rank"])
    checkpoint = NNCheckpoint.load(run.id, Checkpoints.LAST)
    assert outputs(checkpoint, X) == pytest.approx(case["outputs"], abs=1e-6)
    set_seed(99)
    made = model(
        lora("layers.0", r=2, alpha=4.0), low_rank("layers.1", rank=2),
        hidden_dims=[4], dropout_prob=0.1,
    )  # fmt: skip
    child = made.train(
        NNTrainParams(
            n_epochs=2, seed=1, save_phase_checkpoints=False, resume_from_run_id=run.id,
            train_loader=DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True),
            val_loader=DataLoader(TensorDataset(X, Y), batch_size=24),
        )
    )  # fmt: skip
    losses = [r.train_edp.loss for r in child.idps]
    assert losses == pytest.approx(case["resumed_loss"], abs=1e-6)


def test_an_earlier_quantized_run_loads(here):
    pytest.importorskip("torchao")
    case = EARLIER["qat"]
    checkpoint = NNCheckpoint.load(case["id"], Checkpoints.LAST)
    assert [t.name for t in checkpoint.transforms] == ["torchao_qat"]
    assert NNRun.load(case["id"]).id == case["id"]
    assert outputs(checkpoint, WIDE) == pytest.approx(case["outputs"], abs=1e-5)
