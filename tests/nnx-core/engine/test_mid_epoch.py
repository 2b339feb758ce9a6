"""A run killed inside an epoch goes on where it stood, and ends as if it had not been killed."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from nnx import Callback, Checkpoints, NNCheckpoint

# Many training processes are killed, and each of their runs is trained three times.
pytestmark = pytest.mark.slow
SOURCE = Path(__file__).with_name("midepoch_cases.py")


def load_cases():
    spec = importlib.util.spec_from_file_location("midepoch_cases", SOURCE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


cases = load_cases()


def child(mode, folder):
    done = subprocess.run(
        [sys.executable, str(SOURCE), mode],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "NNX_TQDM_DISABLE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Each case whole, and killed with SIGKILL inside an epoch and resumed by another process."""
    folder = tmp_path_factory.mktemp("midepoch")
    child("kill", folder)
    child("finish", folder)
    results = torch.load(folder / "results.pt", weights_only=True)
    return results, json.loads((folder / "killed.json").read_text()), folder


def same(left, right):
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right))
    return left == right


@pytest.mark.parametrize("name", cases.CASES)
def test_a_killed_run_equals_the_uninterrupted_one(outcomes, name):
    results, _, _ = outcomes
    whole, resumed = results[name]["whole"], results[name]["resumed"]
    for part in ("weights", "optimizers", "rates", "torch", "python", "numpy"):
        assert same(whole[part], resumed[part]), part
    first = resumed["history"][0]
    assert first["epoch_idx"] == cases.KILL_EPOCH
    assert first["batch_idx"] == 0, "the partial epoch's records come with the point"
    expected = [row for row in whole["history"] if row["epoch_idx"] >= cases.KILL_EPOCH]
    assert same(expected, resumed["history"])


def test_last_stays_the_marker_of_committed_epochs(outcomes):
    _, killed, folder = outcomes
    for run in killed.values():
        last = NNCheckpoint.load(run=run, type=Checkpoints.LAST, root=str(folder / "runs"))
        assert last.idp.epoch_idx == cases.KILL_EPOCH - 1
        assert (folder / "runs" / run / "checkpoints" / "step.pt").is_file()


def test_a_committed_epoch_replaces_its_points(kit):
    run = kit.model().train(kit.train_params(n_epochs=2, checkpoint_every=2))
    assert not list(Path(f"runs/{run.id}/checkpoints").glob("step.pt*manifest*"))
    assert not Path(f"runs/{run.id}/checkpoints/step.pt").exists()


def test_points_do_not_change_what_trains(kit):
    plain, pointed = kit.model(), kit.model()
    plain.train(kit.train_params(n_epochs=2))
    pointed.train(kit.train_params(n_epochs=2, checkpoint_every=1))
    assert kit.same(plain.net.state_dict(), pointed.net.state_dict())


def test_checkpoint_every_is_part_of_the_configuration_only_when_set(kit):
    assert "checkpoint_every" not in kit.train_params().state()
    assert kit.train_params(checkpoint_every=5).state()["checkpoint_every"] == 5
    with pytest.raises(ValueError, match="checkpoint_every"):
        kit.train_params(checkpoint_every=0)


class StopHere(Exception):
    pass


class DieAt(Callback):
    """Raises after so many committed updates; knows the run it was in."""

    def __init__(self, updates):
        self.updates = updates

    def on_train_begin(self, ctx):
        self.run = ctx.run.id
        ctx.update_listeners.append(self._listen)

    def _listen(self, ctx):
        if ctx.committed_updates == self.updates:
            raise StopHere


def interrupted(kit, params, updates):
    """The id of a run that died after so many updates."""
    die = DieAt(updates)
    with pytest.raises(StopHere):
        kit.model(seed=0).train(params, callbacks=[die])
    return die.run


def test_latest_is_the_newer_of_the_point_and_the_last_epoch(kit):
    params = kit.train_params(n_epochs=3, checkpoint_every=2)
    whole = kit.model()
    whole.train(dataclasses.replace(params, data_id="whole"))
    run = interrupted(kit, params, 11)  # the second epoch, after a point at its fourth batch
    request = {"resume_from_run_id": run, "resume_epochs": "planned"}
    model = kit.model(seed=4)
    rest = model.train(dataclasses.replace(params, resume_from_checkpoint="latest", **request))
    assert rest.resume_status.source_checkpoint == "step"
    assert [i.iter_idx for i in rest.idps] == list(range(6, 18))
    assert kit.same(whole.net.state_dict(), model.net.state_dict())
    again = kit.model(seed=5)
    again.train(dataclasses.replace(params, resume_from_checkpoint="last", **request))
    assert kit.same(whole.net.state_dict(), again.net.state_dict())


def test_a_point_in_the_first_epoch_is_enough(kit):
    params = kit.train_params(n_epochs=2, checkpoint_every=2)
    whole = kit.model()
    whole.train(dataclasses.replace(params, data_id="whole"))
    run = interrupted(kit, params, 5)
    model = kit.model(seed=4)
    model.train(
        dataclasses.replace(
            params, resume_from_run_id=run, resume_from_checkpoint="latest", resume_epochs="planned"
        )
    )
    assert kit.same(whole.net.state_dict(), model.net.state_dict())


def test_additional_epochs_after_a_point_finish_its_epoch_first(kit):
    params = kit.train_params(n_epochs=2, checkpoint_every=2)
    run = interrupted(kit, params, 11)
    rest = kit.model().train(
        dataclasses.replace(params, resume_from_run_id=run, resume_from_checkpoint="step")
    )
    assert [i.epoch_idx for i in rest.idps] == [1] * 6 + [2] * 6
    assert [i.iter_idx for i in rest.idps] == list(range(12))


def test_a_killed_continuation_can_be_continued(kit):
    """Two interruptions in the same epoch."""
    params = kit.train_params(n_epochs=2, checkpoint_every=1)
    whole = kit.model()
    whole.train(dataclasses.replace(params, data_id="whole"))
    run = interrupted(kit, params, 3)
    request = {"resume_from_checkpoint": "step", "resume_epochs": "planned"}
    second = dataclasses.replace(params, resume_from_run_id=run, **request)

    middle = interrupted(kit, second, 5)
    model = kit.model(seed=4)
    rest = model.train(dataclasses.replace(params, resume_from_run_id=middle, **request))
    assert kit.same(whole.net.state_dict(), model.net.state_dict())
    assert [i.iter_idx for i in rest.idps] == list(range(12))


def test_a_loader_that_is_too_short_for_the_point_is_refused(kit):
    params = kit.train_params(n_epochs=2, checkpoint_every=4)
    run = interrupted(kit, params, 5)
    short = dataclasses.replace(
        params, train_loader=kit.loader(32), resume_from_run_id=run, resume_from_checkpoint="step"
    )
    with pytest.raises(ValueError, match="ended before batch 4"):
        kit.model().train(short)
