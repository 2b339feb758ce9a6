"""A script that is run again: refused, continued, loaded or trained anew, as it says."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from nnx import Callback, Checkpoints, EarlyStopping, NNCheckpoint, NNRun, NNSchedulerParams
from nnx.enums import Schedulers
from nnx.history import iter_history
from nnx.store import RunBusyError
from nnx.store.errors import RunExistsError


class StopHere(Exception):
    pass


class DieAt(Callback):
    """Raises after so many committed updates."""

    def __init__(self, updates):
        self.updates = updates

    def on_train_begin(self, ctx):
        ctx.update_listeners.append(self.listen)

    def listen(self, ctx):
        if ctx.committed_updates == self.updates:
            raise StopHere


def everything(folder="runs"):
    return {
        str(path): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file() and not path.name.endswith(".lock")
    }


def again(params, on_existing):
    return dataclasses.replace(params, on_existing=on_existing)


def whole(kit, params):
    """The weights and losses of the same training in one go, elsewhere."""
    model = kit.model()
    run = model.train(dataclasses.replace(params, data_id="whole"))
    return kit.weights(model.net), [record.train_edp.loss for record in run.idps]


def warmup(kit, **kwargs):
    """A schedule whose horizon is that of the plan, on the clock of updates."""
    schedule = NNSchedulerParams(
        kind=Schedulers.LINEAR_WARMUP_DECAY, clock="optimizer_update",
        min_lr=0.0, factor=0.5, patience=1, cooldown=0, threshold=0.0,
    )  # fmt: skip
    return kit.train_params(scheduler=schedule, **kwargs)


@pytest.mark.parametrize("on_existing", ["error", "resume", "load", "replace"])
def test_what_is_done_with_an_existing_run_is_no_part_of_its_id(kit, on_existing):
    params = kit.train_params()
    asked = again(params, on_existing)
    assert asked.state() == params.state()
    run = kit.model().train(asked)
    assert run.id == NNRun(net=run.net, model=run.model, train=params).id
    assert run.finished
    assert NNRun.load(run.id).finished


def test_a_word_that_is_none_of_the_four_and_contradictions_are_refused(kit):
    with pytest.raises(ValueError, match=r"on_existing must be one of error.*did you mean 'resume"):
        kit.train_params(on_existing="resum")
    with pytest.raises(ValueError, match="overwrite_existing=True replaces it"):
        kit.train_params(on_existing="load", overwrite_existing=True)
    with pytest.raises(ValueError, match="names another one"):
        kit.train_params(on_existing="resume", resume_from_run_id="abc")


@pytest.mark.parametrize("updates", [3, 9, 13], ids=["epoch 0", "inside epoch 1", "epoch 2"])
@pytest.mark.parametrize("make", ["plateau", "warmup"])
def test_a_stopped_run_goes_on_and_ends_as_if_it_had_never_stopped(kit, make, updates):
    every = {"checkpoint_every": 2}
    params = warmup(kit, **every) if make == "warmup" else kit.train_params(**every)
    weights, losses = whole(kit, params)
    asked = again(params, "resume")
    with pytest.raises(StopHere):
        kit.model().train(asked, callbacks=[DieAt(updates)])
    model = kit.model(seed=5)
    run = model.train(asked)
    assert kit.same(weights, kit.weights(model.net))
    assert [record.train_edp.loss for record in iter_history(run.id, lineage=True)] == losses
    assert run.finished
    first = NNRun.find("parent == None and data_id == None")
    assert [run.train.resume_from_run_id] == [one.id for one in first]


def test_it_is_continued_as_often_as_it_stops_and_then_returned(kit):
    params = kit.train_params(n_epochs=4)
    weights, _ = whole(kit, params)
    asked = again(params, "resume")
    for updates in (7, 13):
        with pytest.raises(StopHere):
            kit.model().train(asked, callbacks=[DieAt(updates)])
    model = kit.model(seed=3)
    run = model.train(asked)
    assert kit.same(weights, kit.weights(model.net))
    before = everything()
    fresh = kit.model(seed=8)
    found = fresh.train(asked)
    assert (found.id, found.state()) == (run.id, run.state())
    assert found.idps == run.idps
    assert kit.same(weights, kit.weights(fresh.net))
    assert everything() == before


def test_a_continuation_of_what_was_replaced_since_is_not_taken_for_the_new_ones(kit):
    params = kit.train_params()
    for on_existing in ("resume", "replace"):
        with pytest.raises(StopHere):
            kit.model().train(again(params, on_existing), callbacks=[DieAt(7)])
        if on_existing == "resume":
            old = kit.model().train(again(params, "resume"))
    model = kit.model()
    (replaced,) = (run for run in NNRun.all() if run.id != old.id)
    run = model.train(again(params, "resume"))
    assert run.id == old.id
    source = NNCheckpoint.verify(replaced.id, Checkpoints.LAST)["checkpoint_id"]
    assert (
        run.resume_status.source_checkpoint_id == source != (old.resume_status.source_checkpoint_id)
    )


def test_a_run_that_early_stopping_ended_is_finished(kit):
    asked = again(kit.train_params(n_epochs=30), "resume")
    stop = [EarlyStopping(patience=0, min_delta=10.0)]
    run = kit.model().train(asked, callbacks=stop)
    assert run.idps[-1].epoch_idx == 1
    assert kit.model(seed=2).train(asked, callbacks=stop).idps == run.idps
    assert len(NNRun.all()) == 1


def test_a_run_that_committed_nothing_begins_again(kit):
    asked = again(kit.train_params(n_epochs=1), "resume")
    model = kit.model()
    weights = whole(kit, kit.train_params(n_epochs=1))[0]
    run = NNRun(net=model.net_params, model=model.params, train=asked)
    os.makedirs(f"runs/{run.id}")
    Path(f"runs/{run.id}/.history-committed-by-last").write_text("")
    run.save(update_best=False)
    assert kit.model().train(asked).id == run.id
    model = kit.model(seed=9)
    model.train(asked)
    assert kit.same(weights, kit.weights(model.net))


def test_load_returns_the_run_and_its_last_weights_as_they_stand(kit, capsys):
    asked = again(kit.train_params(), "load")
    first = kit.model()
    run = first.train(asked)
    before, streams = everything(), torch.get_rng_state()
    model = kit.model(seed=4)
    torch.set_rng_state(streams)
    capsys.readouterr()
    found = model.train(asked)
    assert capsys.readouterr().out == f"Run loaded from runs/{run.id}\n"
    assert found.id == run.id
    assert kit.same(first.net.state_dict(), model.net.state_dict())
    assert torch.equal(torch.get_rng_state(), streams)
    assert everything() == before


def test_load_of_a_run_that_has_no_epoch_says_what_to_do(kit):
    params = kit.train_params(checkpoint_every=2)
    with pytest.raises(StopHere):
        kit.model().train(params, callbacks=[DieAt(3)])
    model = kit.model(seed=4)
    weights = kit.weights(model.net)
    with pytest.raises(FileNotFoundError, match="continue it with on_existing='resume'"):
        model.train(again(params, "load"))
    assert kit.same(weights, kit.weights(model.net))


@pytest.mark.parametrize("on_existing", ["resume", "load"])
def test_a_run_without_checkpoints_is_not_touched(kit, on_existing):
    params = kit.train_params()
    kept = kit.model().train(params)
    for path in sorted(Path(f"runs/{kept.id}").rglob("*"), reverse=True):
        if "checkpoints" in str(path) or path.name.startswith(".history"):
            path.rmdir() if path.is_dir() else path.unlink()
    before = everything()
    with pytest.raises(RunExistsError, match="no LAST checkpoint that could be loaded"):
        kit.model().train(again(params, on_existing))
    assert everything() == before


def test_replace_keeps_the_old_run_until_the_first_commit(kit):
    params = kit.train_params()
    run = kit.model().train(params)
    before = everything()
    with pytest.raises(StopHere):
        kit.model(seed=1).train(again(params, "replace"), callbacks=[DieAt(2)])
    assert everything() == before
    model = kit.model(seed=1)
    assert model.train(again(params, "replace")).id == run.id
    last = NNCheckpoint.load(run.id, Checkpoints.LAST)
    assert kit.same(dict(last.net_state), dict(model.net.state_dict()))


def test_the_beginning_of_an_id_resumes_that_run_under_the_id_of_the_whole_one(kit):
    params = kit.train_params()
    with pytest.raises(StopHere):
        kit.model().train(params, callbacks=[DieAt(7)])
    (stopped,) = NNRun.list()
    named = [
        kit.model().train(
            dataclasses.replace(
                params, resume_from_run_id=stopped.id[:length], resume_epochs="planned",
                overwrite_existing=True,
            )
        )
        for length in (8, None)
    ]  # fmt: skip
    assert named[0].id == named[1].id
    assert named[0].train.resume_from_run_id == stopped.id


SCRIPT = """
import os, signal, sys
sys.path.insert(0, {folder!r})
import conftest as kit
from nnx import Callback

class Kill(Callback):
    def on_train_begin(self, ctx):
        ctx.update_listeners.append(self.listen)
    def listen(self, ctx):
        if ctx.committed_updates == 9 and ctx.run.train.resume_from_run_id is None:
            if "wait" in sys.argv:
                print("waiting", flush=True)
                sys.stdin.read()
            os.kill(os.getpid(), signal.SIGKILL)

model = kit.model()
params = kit.train_params(checkpoint_every=2, on_existing="resume")
run = model.train(params, callbacks=[Kill()])
print(sum(float(p.double().sum()) for p in model.net.parameters()).hex())
"""


def started(*arguments):
    code = SCRIPT.format(folder=str(Path(__file__).parent))
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.skipif(os.name == "nt", reason="SIGKILL")
def test_the_same_script_twice_survives_a_kill_and_is_refused_while_it_runs(kit):
    params = kit.train_params(checkpoint_every=2)
    weights, _ = whole(kit, params)
    process = started("wait")
    assert process.stdout.readline() == "waiting\n"
    for on_existing in ("resume", "load", "replace"):
        with pytest.raises(RunBusyError, match="is being trained"):
            kit.model().train(again(params, on_existing))
    process.communicate("")
    assert process.returncode == -signal.SIGKILL
    out, err = started().communicate()
    expected = sum(float(p.double().sum()) for n, p in weights.items()).hex()
    assert out.splitlines()[-1] == expected, err
