from __future__ import annotations

import os
import threading
import time

import pytest
import torch
from nnx.enums import Checkpoints
from nnx.store import NNCheckpoint, NNRun, RunBusyError, RunWriter, read_point


def test_a_written_run_loads_with_its_history_and_its_points(train, parts, root):
    run = train(epochs=3)
    loaded = NNRun.load(run.id)
    assert loaded.id == run.id
    assert loaded.idps == run.idps == [parts.record(e, b) for e in range(3) for b in range(2)]
    for tag, epoch in ((Checkpoints.FIRST, 0), (Checkpoints.LAST, 2), (Checkpoints.BEST, 2)):
        checkpoint, state = NNCheckpoint.load_with_training_state(run.id, tag)
        assert checkpoint.idp == parts.record(epoch, 1)
        expected = parts.checkpoint(epoch)
        assert list(checkpoint.net_state) == list(expected.net_state)
        for name, tensor in expected.net_state.items():
            assert torch.equal(checkpoint.net_state[name], tensor)
        moments = state["optimizer_state"]["state"][1]["exp_avg"]
        assert torch.equal(moments, parts.state(epoch)["optimizer_state"]["state"][1]["exp_avg"])
        assert state["optimizer_state"]["param_groups"][0]["betas"] == (0.9, 0.999)
        assert NNCheckpoint.verify(run.id, tag)["position"]["completed_epoch"] == epoch


def test_tags_of_one_epoch_are_one_file_on_disk(train, root):
    run = train(epochs=2)
    folder = f"runs/{run.id}/checkpoints"

    def inode(name):
        return os.stat(f"{folder}/{name}").st_ino

    sidecars = {n.split(".")[0]: n for n in os.listdir(folder) if n.count(".") == 4}
    assert inode("last.pt") == inode("best.pt") != inode("first.pt")
    assert inode(sidecars["last"]) == inode(sidecars["best"]) == inode("last.pt.opt.pt")
    assert inode("best.pt.opt.pt") == inode("last.pt.opt.pt")


def test_each_tag_counts_its_own_generations(train, root):
    run = train(epochs=3)
    assert NNCheckpoint.resume_point(run.id, Checkpoints.LAST)["generation"] == 3
    assert NNCheckpoint.resume_point(run.id, Checkpoints.FIRST)["generation"] == 1


def test_replaced_generations_leave_no_file_behind(train, root):
    run = train(epochs=4)
    names = os.listdir(f"runs/{run.id}/checkpoints")
    assert len([n for n in names if n.startswith("last.pt.opt.")]) == 2  # current and compatible
    assert not [n for n in names if "staged" in n or n.startswith(".")]


def test_an_existing_run_is_refused_before_anything_changes(train, root):
    run = train(epochs=1)
    before = sorted(os.listdir(f"runs/{run.id}"))
    with (
        pytest.raises(FileExistsError, match=r"already exists in runs.*overwrite_existing=True"),
        RunWriter.open(NNRun.load(run.id)),
    ):
        raise AssertionError
    assert sorted(os.listdir(f"runs/{run.id}")) == before


def test_a_second_writer_is_told_at_once_and_afterwards_that_the_run_is_there(parts, root):
    run = parts.run()
    told = []

    def second():
        began = time.monotonic()
        try:
            with RunWriter.open(run, overwrite=True):
                raise AssertionError
        except RunBusyError as error:
            told.append((str(error), time.monotonic() - began))

    with RunWriter.open(run) as writer:
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        writer.append(parts.record(0, 1))
        writer.commit_epoch(parts.checkpoint(0), parts.state(0), best=True)
    ((message, waited),) = told
    assert f"(lock {os.path.join('runs', '.leases', run.id)}" in message
    assert waited < 10  # a training takes hours
    with pytest.raises(FileExistsError, match="overwrite_existing=True"), RunWriter.open(run):
        raise AssertionError
    with RunWriter.open(run, overwrite=True):
        pass
    assert NNRun.load(run.id).idps  # nothing was committed in its place


def test_a_run_that_is_being_written_is_refused(parts, root):
    run = parts.run()
    with RunWriter.open(run):
        with pytest.raises(RunBusyError, match="trained by another process"):
            run.ensure_writable()
        with pytest.raises(RunBusyError), RunWriter.open(run):
            raise AssertionError


def test_a_fit_that_fails_before_its_first_commit_leaves_no_run(parts, root):
    def fit():
        with RunWriter.open(parts.run()) as writer:
            writer.append(parts.record(0))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit()
    assert not os.path.exists(f"runs/{parts.run().id}")
    with RunWriter.open(parts.run()):
        pass


def test_a_failed_last_rolls_the_history_back(train, parts, root, monkeypatch):
    run = parts.run(3)

    def fit():
        with RunWriter.open(run) as writer:
            for epoch in range(2):
                writer.append(parts.record(epoch, 1))
                state = parts.state(epoch)
                if epoch == 1:
                    state["rng_state"] = {"stream": object()}
                writer.commit_epoch(parts.checkpoint(epoch), state)

    with pytest.raises(TypeError, match=r"rng_state\['stream'\] holds a builtins.object"):
        fit()
    assert [r.epoch_idx for r in NNRun.load(run.id).idps] == [0]
    assert NNCheckpoint.verify(run.id, Checkpoints.LAST)["position"]["completed_epoch"] == 0
    with open(f"runs/{run.id}/idps.csv") as stream:
        assert len(stream.readlines()) == 2


def test_a_callback_checkpoint_is_weights_only_and_a_weights_only_point(train, parts, root):
    run = parts.run(1)
    with RunWriter.open(run) as writer:
        writer.append(parts.record(0, 1))
        writer.commit_epoch(
            parts.checkpoint(0), parts.state(0), deferred={"custom_e0": parts.checkpoint(0)}
        )
    point = read_point(run.id, "custom_e0")
    assert point.training_state is None
    assert point.checkpoint.training_state_present is False
    assert point.completed_epoch == 0


def test_a_step_point_is_newer_than_last_until_the_epoch_commits(parts, root):
    run = parts.run(2)
    with RunWriter.open(run) as writer:
        writer.append(parts.record(0, 1))
        writer.commit_epoch(parts.checkpoint(0), parts.state(0))
        inside = parts.state(0) | {"position": {"batches": 1, "records": [parts.record(1).state()]}}
        inside["counters"] = {"global_step": 3}
        writer.commit_step(parts.checkpoint(1), inside)
        point = read_point(run.id, "latest")
        assert (point.tag, point.training_state["position"]["batches"]) == ("step", 1)
        assert NNRun.load(run.id).idps == [parts.record(0, 1)]
        assert read_point(run.id, "last").completed_epoch == 0
        writer.append(parts.record(1, 1))
        writer.commit_epoch(parts.checkpoint(1), parts.state(1))
    assert read_point(run.id, "latest").tag == "last"
    with pytest.raises(FileNotFoundError, match="no point inside an epoch"):
        read_point(run.id, "step")
    assert not [n for n in os.listdir(f"runs/{run.id}/checkpoints") if n.startswith("step.pt.o")]


def test_overwriting_starts_afresh(train, root):
    run = train(epochs=3)
    again = train(run=NNRun.load(run.id), epochs=1, overwrite=True)
    assert again.id == run.id
    assert [r.epoch_idx for r in NNRun.load(run.id).idps] == [0, 0]
    assert NNCheckpoint.resume_point(run.id, Checkpoints.LAST)["generation"] == 1
    assert [n for n in os.listdir("runs") if n.startswith(".trash")] == []


def test_probing_a_run_that_does_not_exist_creates_nothing(root):
    assert NNCheckpoint.load_with_training_state("a" * 32, Checkpoints.LAST) == (None, None)
    assert NNCheckpoint.load_training_state("a" * 32, Checkpoints.LAST) is None
    assert NNCheckpoint.load_optimizer_state("a" * 32, Checkpoints.LAST) is None
    assert NNCheckpoint.verify("a" * 32, Checkpoints.BEST) is None
    assert not os.path.exists("runs")
    with pytest.raises(ValueError, match="plain name"):
        NNCheckpoint.load_training_state("../a", Checkpoints.LAST)
