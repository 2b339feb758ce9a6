"""The best of a training survives its resumes: file, scores, predictions and pointer."""

from __future__ import annotations

import dataclasses
import os
from functools import partial
from pathlib import Path

import pytest
from nnx import (
    Callback,
    Checkpoints,
    MonitorSpec,
    NNCheckpoint,
    NNEvaluationDataPoint,
    NNModel,
    NNRun,
    NNSchedulerParams,
    NNTrainerParams,
    Schedulers,
    Trainer,
    supervised_objective,
)
from nnx.history import HistoryJournal
from nnx.store.pointer import best_run_id
from nnx.store.points import verify_point
from nnx.store.predictions import load_predictions, save_predictions

# Where the best so far is at each epoch's end: 0, 1, 1, 1, 4, 4.
ERRORS = [0.5, 0.3, 0.4, 0.3, 0.2, 0.6]
BEST_AT = [0, 1, 1, 1, 4, 4]
N = len(ERRORS)
MONITORS = {
    "signal": None,
    "error": MonitorSpec("error"),
    "max": MonitorSpec("error", mode="max"),
    "min_delta": MonitorSpec("error", min_delta=0.15),
}


def scripted(ctx, *, maximized=False):
    """The validation errors above; upside down they have their best at the same epochs."""
    error = ERRORS[ctx.epoch_idx]
    return NNEvaluationDataPoint(loss=1.0, error=1 - error if maximized else error)


class Watch(Callback):
    """What BEST and the pointer hold after each commit, seen at the next epoch's start."""

    def __init__(self):
        self.seen = []

    def look(self, ctx):
        best = NNCheckpoint.load(ctx.run.id, Checkpoints.BEST)
        pointed = best_run_id()
        shown = None if pointed is None else NNCheckpoint.load(pointed, Checkpoints.BEST)
        self.seen.append((best, shown))

    def on_epoch_begin(self, ctx):
        if ctx.epoch:
            self.look(ctx)


def stop_after(epoch):
    def stop(self, ctx):
        ctx.should_stop = ctx.epoch >= epoch

    return type("Stop", (Callback,), {"on_epoch_end": stop})()


def train(kit, monitor, *, callbacks=(), history=None, resume=None, **params):
    plan = kit.train_params(n_epochs=N, monitor=monitor, **params)
    if resume is not None:
        plan = dataclasses.replace(
            plan, resume_from_run_id=resume.id, resume_mode="stateful", resume_epochs="planned"
        )
    step = partial(scripted, maximized=monitor is not None and monitor.mode == "max")
    return kit.model().train(plan, callbacks=list(callbacks), eval_step_fn=step, history=history)


def outcome(kit, run):
    """What the run's BEST scores and predicts on rows that nobody trained on."""
    model = NNModel.from_checkpoint(NNCheckpoint.load(run.id, Checkpoints.BEST))
    test = kit.loader(40, shuffle=False, seed=5)
    predicted = model.predict(test)
    targets = [int(y) for _, labels in test for y in labels]
    save_predictions(run.id, "test", targets=targets, predicted=list(predicted.classes))
    return model.evaluate(test).state(), predicted.logits.tolist(), load_predictions(run.id)


def same_best(kit, ours, theirs):
    return kit.same(ours.net_state, theirs.net_state) and ours.idp.state() == theirs.idp.state()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    def go(name):
        (tmp_path / name).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / name)

    return go


@pytest.mark.parametrize("journal", [None, HistoryJournal(retention=4)], ids=["table", "journal"])
@pytest.mark.parametrize("name", MONITORS)
def test_a_training_split_anywhere_has_the_best_of_the_uninterrupted_one(
    kit, folder, name, journal
):
    monitor = MONITORS[name]
    folder("whole")
    watched = Watch()
    whole = train(kit, monitor, callbacks=[watched], history=journal)
    alone = [*watched.seen]
    expected, pointed = outcome(kit, whole), NNCheckpoint.load("best", Checkpoints.BEST)
    at = [b.idp.epoch_idx for b, _ in alone]
    assert at == (BEST_AT[:-1] if name != "min_delta" else [0, 1, 1, 1, 1])
    for split in range(N - 1):
        folder(f"split{split}")
        first = train(kit, monitor, callbacks=[stop_after(split)], history=journal)
        watched = Watch()
        second = train(kit, monitor, callbacks=[watched], history=journal, resume=first)
        for (ours, shown), (theirs, wanted) in zip(
            watched.seen[1:], alone[split + 1 :], strict=True
        ):
            assert same_best(kit, ours, theirs)
            assert same_best(kit, shown, wanted)
        assert outcome(kit, second) == expected
        assert same_best(kit, NNCheckpoint.load("best", Checkpoints.BEST), pointed)
        status = NNRun.load(second.id).resume_status
        assert (status.best_run_id, status.best_epoch) == (first.id, at[split])
        verify_point(second.id, "best")


def test_every_resume_of_a_chain_hands_the_best_on(kit):
    run = train(kit, None, callbacks=[stop_after(0)])
    chain = [run]
    for epoch in range(1, 4):
        chain.append(train(kit, None, callbacks=[stop_after(epoch)], resume=chain[-1]))
        best = NNCheckpoint.load(chain[-1].id, Checkpoints.BEST)
        assert best.idp.epoch_idx == BEST_AT[epoch]
    manifest = NNCheckpoint.resume_point(chain[-1].id, Checkpoints.BEST)
    assert manifest["origin"] == {"run_id": chain[1].id, "epoch": 1}
    assert chain[-1].resume_status.best_run_id == chain[1].id
    files = [f"runs/{r.id}/checkpoints/best.pt" for r in chain[1:]]
    assert len({os.stat(path).st_ino for path in files}) == 1  # stored once
    last = train(kit, None, resume=chain[-1])  # epoch 4 is better: the origin is itself
    assert "origin" not in NNCheckpoint.resume_point(last.id, Checkpoints.BEST)
    assert best_run_id() == last.id


class Dies(Callback):
    """Fails after a number of updates."""

    def __init__(self, updates):
        self.updates = updates

    def on_train_begin(self, ctx):
        self.run = ctx.run
        ctx.update_listeners.append(self.listen)

    def listen(self, ctx):
        if ctx.committed_updates == self.updates:
            raise RuntimeError("the power went out")


def test_a_resume_inside_an_epoch_hands_the_best_on_twice(kit):
    whole = train(kit, None, data_id="whole")
    first, second = Dies(3 * 6 + 3), Dies(3 * 6 + 5)  # both in epoch 3, BEST is of epoch 1
    every = {"checkpoint_every": 2, "resume_from_checkpoint": "latest"}
    with pytest.raises(RuntimeError, match="power"):
        train(kit, None, callbacks=[first], **every)
    with pytest.raises(RuntimeError, match="power"):
        train(kit, None, callbacks=[second], resume=first.run, **every)
    assert NNCheckpoint.load(second.run.id, Checkpoints.LAST) is None  # a point and BEST
    last = train(kit, None, callbacks=[stop_after(3)], resume=second.run, **every)
    assert NNCheckpoint.load(last.id, Checkpoints.BEST).idp.epoch_idx == 1
    assert last.resume_status.best_run_id == first.run.id
    rest = train(kit, None, resume=last)
    ours, theirs = (NNCheckpoint.load(run.id, Checkpoints.BEST) for run in (rest, whole))
    assert same_best(kit, ours, theirs)


def test_a_taken_over_best_resumes_and_outlives_its_source(kit):
    from nnx.store.lease import remove
    from nnx.store.paths import RunPaths

    first = train(kit, None, callbacks=[stop_after(1)])
    second = train(kit, None, callbacks=[stop_after(3)], resume=first)
    assert best_run_id() == first.id  # a tie keeps the incumbent
    remove(RunPaths.of(first.id))
    assert best_run_id() == second.id
    plan = kit.train_params(
        n_epochs=N, resume_from_run_id=second.id, resume_from_checkpoint="best",
        resume_epochs="planned",
    )  # fmt: skip
    third = kit.model().train(plan, eval_step_fn=scripted)
    assert [r.epoch_idx for r in third.idps if r.val_edp] == [2, 3, 4, 5]
    assert NNCheckpoint.load(third.id, Checkpoints.BEST).idp.epoch_idx == 4


def test_the_best_of_a_split_trainer_is_that_of_the_whole_one(kit):
    params = NNTrainerParams(
        n_epochs=5, optims={"all": kit.adam(max_lr=0.3)}, seed=3, train_loader=kit.loader(),
        val_loader=kit.loader(48, shuffle=False, seed=1),
    )  # fmt: skip

    def fit(**changes):
        plan = dataclasses.replace(params, **changes)
        return Trainer(model=kit.model()).train(plan, objective=supervised_objective())

    whole = NNCheckpoint.load(fit().id, Checkpoints.BEST)
    for epochs in range(1, 5):
        first = fit(n_epochs=epochs, data_id=str(epochs))
        rest = fit(n_epochs=5 - epochs, data_id=str(epochs), resume_from_run_id=first.id)
        assert kit.same(NNCheckpoint.load(rest.id, Checkpoints.BEST).net_state, whole.net_state)


@pytest.mark.parametrize("name", ["signal", "error"])
def test_a_source_whose_best_is_later_starts_afresh_and_says_so(kit, name):
    monitor = MONITORS[name]
    whole = train(kit, monitor)
    plan = kit.train_params(
        n_epochs=2, monitor=monitor, resume_from_run_id=whole.id, resume_from_checkpoint="first"
    )
    with pytest.warns(RuntimeWarning, match=r"is of epoch 4, later than epoch 0: .* afresh"):
        child = kit.model().train(plan, eval_step_fn=scripted)
    assert child.resume_status.best_run_id is None
    if monitor is not None:
        assert "nnx.monitor" in child.resume_status.fresh_components
    assert NNCheckpoint.load(child.id, Checkpoints.BEST).idp.epoch_idx == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"data_id": "other rows"}, "another measure: data 'these rows', not 'other rows'"),
        ({"val_loader": None}, "was chosen by validation, this run's is not"),
        ({"monitor": MonitorSpec("loss")}, "another measure: monitor None"),
    ],
)
def test_a_best_of_another_measure_is_not_inherited(kit, change, reason):
    step = NNSchedulerParams(
        kind=Schedulers.STEP, step_size=3, min_lr=0.0, factor=0.5, patience=0, cooldown=0,
        threshold=0.0,
    )  # fmt: skip
    first = train(kit, None, callbacks=[stop_after(1)], scheduler=step, data_id="these rows")
    plan = kit.train_params(n_epochs=1, resume_from_run_id=first.id, scheduler=step)
    plan = dataclasses.replace(plan, **change)
    evaluate = None if plan.val_loader is None else scripted
    with pytest.warns(RuntimeWarning, match=reason):
        child = kit.model().train(plan, eval_step_fn=evaluate)
    assert child.resume_status.best_run_id is None
    assert NNCheckpoint.load(child.id, Checkpoints.BEST).idp.epoch_idx == 2


def test_a_data_id_that_only_tells_runs_apart_is_no_other_measure(kit):
    first = train(kit, None, callbacks=[stop_after(3)], data_id="split")
    assert best_run_id() == first.id
    second = train(kit, None, resume=first)  # epoch 4 is better
    assert second.resume_status.best_run_id == first.id
    assert best_run_id() == second.id


def test_a_damaged_best_keeps_nobody_from_resuming(kit):
    first = train(kit, None, callbacks=[stop_after(2)])  # LAST is epoch 2, BEST epoch 1
    path = Path(f"runs/{first.id}/checkpoints/best.pt")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    path.write_bytes(data)
    with pytest.warns(RuntimeWarning, match=r"SHA-256 of .*best\.pt .* afresh"):
        child = train(kit, None, resume=first)
    assert NNCheckpoint.load(child.id, Checkpoints.BEST).idp.epoch_idx == 4


def test_a_best_that_is_gone_by_the_first_commit_is_said(kit):
    first = train(kit, None, callbacks=[stop_after(2)])
    lose = type("Lose", (Callback,), {})()
    lose.on_epoch_begin = lambda ctx: Path(f"runs/{first.id}/checkpoints/best.pt").unlink(
        missing_ok=True
    )
    with pytest.warns(RuntimeWarning, match="removed or replaced since"):
        child = train(kit, None, callbacks=[lose, stop_after(3)], resume=first)
    assert NNCheckpoint.load(child.id, Checkpoints.BEST) is None
    assert NNRun.load(child.id).id == child.id


def test_weights_alone_begin_their_own_best(kit):
    first = train(kit, None, callbacks=[stop_after(1)])
    plan = kit.train_params(n_epochs=1, resume_from_run_id=first.id, resume_mode="weights_only")
    child = kit.model().train(plan, eval_step_fn=scripted)
    assert child.resume_status.best_run_id is None
    assert NNCheckpoint.load(child.id, Checkpoints.BEST).idp.epoch_idx == 2
