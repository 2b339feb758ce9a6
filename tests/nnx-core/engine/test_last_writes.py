"""What fails after the last commit, and what each commit leaves word of."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from nnx import Callback, Checkpoints, ModelCheckpoint, NNCheckpoint, NNRun
from nnx.history import HistoryJournal
from nnx.provenance import ExperimentManifest
from nnx.store import run as store_run
from nnx.store import writer as store_writer
from nnx.utils import files


def attempt_of(run_id):
    document = json.loads(Path(f"runs/{run_id}/attempt.json").read_text())
    return document.get("attempt", document)


def test_each_commit_is_recorded_with_the_attempt(kit):
    seen = []

    class Look(Callback):
        def on_epoch_begin(self, ctx):
            if ctx.epoch:
                seen.append(attempt_of(ctx.run.id))

    params = kit.train_params(n_epochs=3)
    plan = ExperimentManifest.for_model(kit.model(), train=params)
    run = kit.model().train(params, callbacks=[Look()], provenance=plan)
    assert [(a["status"], a["last_committed"]["epoch"]) for a in seen] == [
        ("running", 0), ("running", 1),
    ]  # fmt: skip
    point = NNCheckpoint.resume_point(run.id, Checkpoints.LAST)
    last = attempt_of(run.id)
    assert (last["status"], last["last_committed"]) == (
        "completed", {"tag": "last", "epoch": 2, "generation": point["generation"]},
    )  # fmt: skip


class FullDisk(files.Disk):
    def create(self, path, *args, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


class FillsUp(Callback):
    """The disk is full from the last epoch's end on, when nothing but the end is left."""

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch

    def on_train_end(self, ctx):
        self.monkeypatch.setattr(files, "disk", FullDisk())


@pytest.mark.parametrize("journal", [None, HistoryJournal(retention=4)], ids=["table", "journal"])
def test_a_disk_that_fills_up_at_the_very_end_still_gives_the_run(kit, monkeypatch, journal):
    params = kit.train_params(n_epochs=2)
    plan = ExperimentManifest.for_model(kit.model(), train=params)
    with pytest.warns(RuntimeWarning) as told, monkeypatch.context() as patch:
        run = kit.model().train(
            params, callbacks=[FillsUp(patch)], provenance=plan, history=journal
        )
    said = [str(w.message) for w in told if "finished and committed" in str(w.message)]
    for what in ("LAST as on_train_end left", "the run's metadata", "the attempt completed"):
        assert sum(what in message for message in said) == 1
    assert all("No space left" in message for message in said)
    assert [r.epoch_idx for r in run.idps if r.val_edp] in ([0, 1], [1])
    loaded = NNRun.load(run.id)
    assert loaded.idps == run.idps
    assert NNCheckpoint.verify(run.id, Checkpoints.LAST)["record"]["epoch_idx"] == 1
    assert loaded.provenance.attempt.last_committed["epoch"] == 1


def test_only_the_last_metadata_is_forgiven(kit, monkeypatch):
    def broken(*args):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(store_run, "write_metadata", broken)
    monkeypatch.setattr(store_writer, "write_metadata", broken)
    with pytest.raises(OSError, match="Input/output"):
        kit.model().train(kit.train_params(n_epochs=1))


class Scales(Callback):
    def on_epoch_end(self, ctx):
        with torch.no_grad():
            for parameter in ctx.model.net.parameters():
                parameter.mul_(2.0)


def test_a_model_checkpoint_holds_the_weights_as_they_were_when_it_ran(kit):
    before, after = ModelCheckpoint([1], tag="before"), ModelCheckpoint([1], tag="after")
    run = kit.model().train(kit.train_params(n_epochs=2), callbacks=[before, Scales(), after])
    first, second, last = (
        NNCheckpoint.load(run.id, tag) for tag in ("before_e1", "after_e1", "last")
    )
    assert kit.same(second.net_state, last.net_state)
    assert kit.same({n: 2 * w for n, w in first.net_state.items()}, last.net_state)
    assert first.idp == second.idp == last.idp
    assert first.training_state_present is False


def test_a_journals_folder_is_found_from_anywhere(kit, tmp_path, monkeypatch):
    run = kit.model().train(kit.train_params(n_epochs=2), history=HistoryJournal(retention=4))
    assert run.history == str(tmp_path / "runs" / run.id / "history")
    assert NNRun.load(run.id).history == run.history
    monkeypatch.chdir("/")
    assert run.save(str(tmp_path / "runs")).id == run.id
