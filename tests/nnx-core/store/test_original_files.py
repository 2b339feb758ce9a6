"""Files of the original system, beside whole runs: safetensors, training states, flat rows."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from nnx import (
    Activations,
    Checkpoints,
    Losses,
    Nets,
    NNCheckpoint,
    NNIterationDataPoint,
    NNModel,
    NNModelParams,
    NNParams,
    NNRun,
    NNTrainParams,
    set_seed,
)
from nnx.store import ResumePointError, idps_csv
from safetensors.torch import save_file
from torch.utils.data import DataLoader, TensorDataset

ORIGINAL = Path(__file__).parents[2] / "data" / "original-runs"
_draw = torch.Generator().manual_seed(5)
X = torch.randn(24, 6, generator=_draw)
Y = torch.randint(0, 3, (24,), generator=_draw)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def model():
    params = NNParams(
        input_dim=6, output_dim=3, hidden_dims=[4], dropout_prob=0.1, activation=Activations.RELU
    )
    return NNModel(params, NNModelParams(net=Nets.FEED_FWD, loss=Losses.CROSS_ENTROPY))


def train(**changes):
    given = {"n_epochs": 2, "seed": 1, "save_phase_checkpoints": False}
    given["train_loader"] = DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True)
    set_seed(11)
    return model().train(NNTrainParams(**{**given, **changes}))


# -- flat rows -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["csv", "monitor"])
def test_a_flat_row_of_the_table_is_the_record(kind):
    (path,) = (ORIGINAL / kind).glob("*/idps.csv")
    run = NNRun.load(path.parent.name, str(path.parent.parent))
    with path.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [NNIterationDataPoint.from_state(row) for row in rows] == run.idps


def test_a_flat_row_may_come_from_pandas():
    pandas = pytest.importorskip("pandas")
    (path,) = (ORIGINAL / "monitor").glob("*/idps.csv")
    run = NNRun.load(path.parent.name, str(path.parent.parent))
    rows = pandas.DataFrame(map(idps_csv.flatten, run.idps)).to_dict("records")
    assert [NNIterationDataPoint.from_state(row) for row in rows] == run.idps


def test_a_nested_record_without_scores_is_no_flat_row():
    with pytest.raises(KeyError):
        NNIterationDataPoint.from_state({"lr": 0.1, "iter_idx": 0, "epoch_idx": 0, "batch_idx": 0})


# -- checkpoints ---------------------------------------------------------------------


def as_the_original(checkpoint, path, **more):
    parts = {
        "net_params": checkpoint.net_params.state(),
        "model_params": checkpoint.model_params.state(),
        "idp": checkpoint.idp.state(),
    }
    tensors = {name: value.contiguous() for name, value in checkpoint.net_state.items()}
    save_file(tensors, path, {key: json.dumps(value) for key, value in {**parts, **more}.items()})


def test_a_safetensors_checkpoint_of_the_original_is_read():
    run = train()
    ours = NNCheckpoint.load(run.id, Checkpoints.LAST)
    as_the_original(ours, "theirs.safetensors", transforms=[])
    theirs = NNCheckpoint.from_file("theirs.safetensors")
    assert (theirs.net_params, theirs.model_params, theirs.idp) == (
        ours.net_params, ours.model_params, ours.idp,
    )  # fmt: skip
    rebuilt = NNModel.from_checkpoint(theirs).net.eval()
    assert torch.equal(rebuilt(X), NNModel.from_checkpoint(ours).net.eval()(X))


def test_tensors_that_are_no_checkpoint_are_still_refused():
    save_file({"a": torch.zeros(1)}, "plain.safetensors", {"format": "pt"})
    with pytest.raises(ResumePointError, match="not a checkpoint of NNx"):
        NNCheckpoint.from_file("plain.safetensors")


# -- training states -----------------------------------------------------------------

NAMES = {
    "optimizer": "optimizer_state",
    "scheduler": "scheduler_state",
    "rng": "rng_state",
    "checkpoint_id": "generation",
}


def test_a_training_state_has_the_names_of_the_original_too():
    run = train()
    state = NNCheckpoint.load_training_state(run.id, Checkpoints.LAST)
    for theirs, ours in NAMES.items():
        assert state[theirs] is state[ours]
    checkpoint, again = NNCheckpoint.load_with_training_state(run.id, Checkpoints.LAST)
    assert again["checkpoint_id"] == checkpoint.training_state_id


def test_a_converted_run_of_the_original_resumes_from_its_training_state():
    """The one-time conversion of docs/coming-from-the-original.md, and what it leaves."""
    run = train(n_epochs=4)
    expected = [r.train_edp.loss for r in run.idps[6:]]
    source = train(n_epochs=2, data_id="first half")
    checkpoint, state = NNCheckpoint.load_with_training_state(source.id, Checkpoints.LAST)
    folder = Path(f"runs/{source.id}/checkpoints")
    for file in folder.iterdir():
        file.unlink()
    as_the_original(checkpoint, str(folder / "last.pt"))
    theirs = {key: state[ours] for key, ours in NAMES.items()}
    theirs |= {"nnx_training_state_version": 4, "generation": 3, "scaler": None, "model": None}
    theirs |= {"completed_epoch": 1, "optimizer_type": state["optimizer_type"]}
    theirs |= {"optimizer_topology": state["optimizer_topology"], "counters": state["counters"]}
    torch.save(theirs, folder / "last.pt.opt.pt")
    assert NNRun.load(source.id).idps == source.idps
    child = train(n_epochs=2, resume_from_run_id=source.id)
    assert [r.train_edp.loss for r in child.idps] == pytest.approx(expected, abs=1e-7)
    assert child.resume_status.mode == "stateful"
