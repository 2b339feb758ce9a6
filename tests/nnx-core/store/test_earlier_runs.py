"""Runs that were written before stored forms became those of the original.

``tests/data/earlier-runs`` holds them with what their code then computed:
``expected.json`` has each run's id, its losses, the outputs of its last weights
and the losses of two more epochs.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from nnx import (
    Activations,
    Checkpoints,
    Losses,
    Nets,
    NNCheckpoint,
    NNConvParams,
    NNModel,
    NNModelParams,
    NNParams,
    NNRun,
    NNTrainParams,
    PrecisionPolicy,
    TaskSpec,
    set_seed,
)
from nnx.provenance import ExperimentManifest, compare
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EARLIER = Path(__file__).parents[2] / "data" / "earlier-runs"
EXPECTED = json.loads((EARLIER / "expected.json").read_text())
_draw = torch.Generator().manual_seed(5)
X = torch.randn(24, 6, generator=_draw)
Y = torch.randint(0, 3, (24,), generator=_draw)
BOTH = torch.randint(0, 2, (24, 2), generator=_draw).float()
REAL = torch.randn(24, 2, generator=_draw)
IMAGES = torch.randn(24, 1, 8, 8, generator=_draw)


def net(**changes):
    given = {"input_dim": 6, "output_dim": 3, "hidden_dims": [4], "dropout_prob": 0.1}
    return NNParams(**{**given, "activation": Activations.RELU, **changes})


def params(**changes):
    return NNModelParams(**{"net": Nets.FEED_FWD, "loss": Losses.CROSS_ENTROPY, **changes})


def module():
    return nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.1), nn.Tanh(), nn.Linear(4, 3))


MODELS = {
    "runtime": lambda: NNModel(module=module(), params=params(net=None)),
    "multilabel": lambda: NNModel(
        net(output_dim=2),
        params(loss=Losses.BINARY_CROSS_ENTROPY, task=TaskSpec.multilabel(labels=["a", "b"])),
    ),
    "bf16": lambda: NNModel(net(), params(precision=PrecisionPolicy("bf16"))),
    "fp32": lambda: NNModel(net(), params(precision=PrecisionPolicy("fp32"))),
    "provenance": lambda: NNModel(net(), params(task=TaskSpec.categorical(3))),
}
DATA = {"multilabel": (X, BOTH)}


@pytest.fixture
def runs(tmp_path, monkeypatch):
    shutil.copytree(EARLIER, tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def train(model, x, y, **changes):
    given = {"n_epochs": 2, "seed": 1, "save_phase_checkpoints": False}
    given["train_loader"] = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    given["val_loader"] = DataLoader(TensorDataset(x, y), batch_size=24)
    return model.train(NNTrainParams(**{**given, **changes}))


def losses(run):
    return [record.train_edp.loss for record in run.idps]


def test_every_run_keeps_the_id_that_it_has_on_disk(runs):
    found = {run.id: run for run in NNRun.all()}
    ids = {case["id"] for case in EXPECTED.values() if "id" in case}
    assert ids < set(found)
    for name, case in EXPECTED.items():
        if "id" in case:
            run = found[case["id"]]
            assert losses(run) == case["loss"], name
            assert run.state()["id"] == run.id
            run.save(update_best=False)
            again = NNRun.load(run.id)
            assert (again.id, again) == (run.id, run)


def test_a_changed_configuration_gets_its_own_id(runs):
    import dataclasses

    run = NNRun.load(EXPECTED["bf16"]["id"])
    copy = dataclasses.replace(run, train=dataclasses.replace(run.train, n_epochs=9))
    fresh = NNRun(net=run.net, model=run.model, train=run.train)
    assert len({run.id, copy.id, fresh.id}) == 3
    assert run.with_idps([]).id == run.id


@pytest.mark.parametrize("name", MODELS)
def test_the_last_weights_give_the_outputs_that_they_gave(runs, name):
    case = EXPECTED[name]
    checkpoint = NNCheckpoint.load(case["id"], Checkpoints.LAST)
    given = {"module": module()} if name == "runtime" else {}
    model = NNModel.from_checkpoint(checkpoint, **given)
    with torch.no_grad():
        outputs = model.net.eval()(X[:3]).flatten().tolist()
    assert outputs == pytest.approx(case["outputs"], abs=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_a_resume_goes_on_as_it_went_on(runs, name):
    case = EXPECTED[name]
    set_seed(99)
    child = train(MODELS[name](), *DATA.get(name, (X, Y)), resume_from_run_id=case["id"])
    assert losses(child) == pytest.approx(case["resumed_loss"], abs=1e-6)
    assert (
        child.train.parent_run_id == case["id"] or child.resume_status.source_run_id == case["id"]
    )


def test_a_module_of_another_topology_is_still_told_apart(runs):
    checkpoint = NNCheckpoint.load(EXPECTED["runtime"]["id"], Checkpoints.LAST)
    other = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.2), nn.Tanh(), nn.Linear(4, 3))
    with pytest.raises(ValueError, match="another topology"):
        NNModel.from_checkpoint(checkpoint, module=other)


def test_a_task_gets_the_width_that_its_labels_tell(runs):
    assert NNRun.load(EXPECTED["multilabel"]["id"]).model.task.num_outputs == 2
    assert NNRun.load(EXPECTED["regression"]["id"]).model.task.num_outputs == 2


def test_provenance_is_verified_as_written_and_compared_in_todays_form(runs):
    case = EXPECTED["provenance"]
    record = NNRun.load(case["id"]).provenance
    assert record.attempt.status == "completed"
    stored = json.loads((runs / case["id"] / "provenance.json").read_text())
    assert record.fingerprint == stored["fingerprint"]
    plan = ExperimentManifest.for_model(
        MODELS["provenance"](),
        train=NNTrainParams(n_epochs=5, seed=1),
        data={"train": "rows"},
        splits={"group": record.manifest.splits["group"], "declared": "2024"},
    )
    assert compare(case["id"], plan).differences == ()


def test_a_convolutional_run_loads_and_its_weights_give_the_same_outputs(runs):
    case = EXPECTED["conv"]
    run = NNRun.load(case["id"])
    assert isinstance(run.net, NNConvParams)
    assert run.net.activations == [Activations.TANH]
    model = NNModel.from_checkpoint(NNCheckpoint.load(case["id"], Checkpoints.LAST))
    with torch.no_grad():
        outputs = model.net.eval()(IMAGES[:3]).flatten().tolist()
    assert outputs == pytest.approx(case["outputs"], abs=1e-6)


def test_a_convolutional_run_resumes(runs):
    case = EXPECTED["conv"]
    model = NNModel(
        NNConvParams(
            input_dim=64, output_dim=3, hidden_dims=[5], conv_channels=[2], kernel_size=3,
            dropout_prob=0.0, activation=Activations.RELU, activations=[Activations.TANH],
        ),
        params(net=Nets.CONV),
    )  # fmt: skip
    child = train(model, IMAGES, Y, resume_from_run_id=case["id"])
    assert losses(child) == pytest.approx(case["resumed_loss"], abs=1e-6)


def test_blocks_with_an_activation_of_their_own_are_refused_by_name():
    state = json.loads(json.dumps({
        "input_dim": 64, "output_dim": 3, "dropout_prob": 0.0, "hidden_dims": "[5]",
        "activation": "relu", "activations": "['tanh', 'relu']", "conv_channels": "[2]",
        "kernel_size": 3,
    }))  # fmt: skip
    with pytest.raises(ValueError, match="activation of their own, which is no longer supported"):
        NNConvParams.from_state(state)
