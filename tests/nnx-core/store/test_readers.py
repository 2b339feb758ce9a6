"""Readers beside a run that trains: they see whole epochs, and never an error."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest
from nnx.enums import Checkpoints
from nnx.history import HistoryJournal, iter_history
from nnx.store import NNCheckpoint, NNRun, RunWriter, read_point
from nnx.store.errors import RunReplacedError
from nnx.store.listing import list_runs
from nnx.store.points import verify_point


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("history", [None, HistoryJournal(retention=8)], ids=["table", "journal"])
def test_readers_beside_a_training_see_whole_epochs(parts, root, history):
    run = parts.run(60, salt="read")
    done, errors, seen = threading.Event(), [], {"load": [], "point": [], "all": []}

    def fit():
        try:
            with RunWriter.open(run, history=history) as writer:
                for epoch in range(60):
                    record = parts.record(epoch, 1)
                    if epoch == 30:  # a column that was never there
                        record = type(record).from_state({**record.state(), "update_count": 3})
                    writer.extend([parts.record(epoch, 0), record])
                    checkpoint = parts.checkpoint(epoch, idp=record)
                    writer.commit_epoch(checkpoint, parts.state(epoch), best=True)
        finally:
            done.set()

    def reader(look):
        def loop():
            while not done.is_set():
                there = os.path.exists(f"runs/{run.id}/checkpoints/last.pt")
                try:
                    look()
                except FileNotFoundError:
                    if there:  # the first epoch may be committed between the look and now
                        raise
            look()

        def guarded():
            try:
                loop()
            except BaseException as error:
                errors.append(error)

        return threading.Thread(target=guarded)

    def load():
        idps = NNRun.load(run.id).idps
        assert len(idps) % 2 == 0
        seen["load"].append(idps[-1].epoch_idx if idps else -1)

    def point():
        found = read_point(run.id, "last")
        assert found.training_state["completed_epoch"] == found.checkpoint.idp.epoch_idx
        seen["point"].append(found.completed_epoch)

    def everything():
        seen["all"].append(len(list(iter_history(run.id))))
        list(list_runs())
        NNRun.all()
        NNCheckpoint.load(run.id, Checkpoints.BEST)

    threads = [reader(look) for look in (load, point, everything)]
    for thread in threads:
        thread.start()
    fit()
    for thread in threads:
        thread.join()
    assert errors == []
    for looks in seen.values():
        assert looks == sorted(looks)
    assert (seen["load"][-1], seen["point"][-1], seen["all"][-1]) == (59, 59, 120)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("history", [None, HistoryJournal(retention=8)], ids=["table", "journal"])
def test_readers_see_one_run_or_the_other_while_it_is_overwritten(parts, root, history):
    run = parts.run(2, salt="again")
    done, errors = threading.Event(), []

    def fit():
        with RunWriter.open(run, history=history, overwrite=True) as writer:
            for epoch in range(2):
                writer.extend(parts.record(epoch, batch) for batch in range(2))
                checkpoint = parts.checkpoint(epoch, idp=writer.idps[-1])
                writer.commit_epoch(checkpoint, parts.state(epoch), best=True)

    def listed():
        for row in list_runs():
            assert row.problem is None
            assert row.epochs in (1, 2)

    def recorded():
        with contextlib.suppress(RunReplacedError):
            assert len(list(iter_history(run.id))) in (2, 4)

    def reader(look):
        def loop():
            try:
                while not done.is_set():
                    look()
            except BaseException as error:
                errors.append(error)

        return threading.Thread(target=loop)

    fit()
    looks = (
        lambda: NNRun.load(run.id),
        lambda: NNRun.all(),
        lambda: read_point(run.id, "last"),
        lambda: verify_point(run.id, "best"),
        listed,
        recorded,
    )
    threads = [reader(look) for look in looks]
    for thread in threads:
        thread.start()
    try:
        for _ in range(8):
            fit()
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert errors == []


@pytest.mark.parametrize("name", ["", "checkpoints"])
def test_nothing_is_written_through_a_link_in_place_of_a_folder(train, parts, root, tmp_path, name):
    run = train(epochs=1)
    folder, outside = Path(f"runs/{run.id}") / name, tmp_path / "outside"
    folder.rename(outside)
    folder.symlink_to(outside)
    before = sorted(os.listdir(outside))
    with pytest.raises(FileExistsError, match="symbolic link"):
        run.save()
    with pytest.raises(FileExistsError, match="symbolic link"):
        parts.checkpoint(1).save(run.id, Checkpoints.LAST)
    assert sorted(os.listdir(outside)) == before


def test_names_of_every_alphabet_work_and_hostile_ones_do_not(parts, root):
    run = parts.run(2, salt="sål 塩 \N{SNOWMAN}")
    with RunWriter.open(run, "runs 塩 塩") as writer:
        writer.append(parts.record(0, 1))
        deferred = {"写真_e0": parts.checkpoint(0)}
        writer.commit_epoch(parts.checkpoint(0), parts.state(0), best=True, deferred=deferred)
        writer.finish()
    assert NNRun.load(run.id, "runs 塩 塩").salt == run.salt
    assert read_point(run.id, "写真_e0", "runs 塩 塩").completed_epoch == 0
    assert NNRun.load("best", "runs 塩 塩").id == run.id


def test_records_of_a_run_and_of_its_successor_are_never_mixed(parts, root):
    history = HistoryJournal(retention=4)
    run = parts.run(2, salt="mixed")

    def fit(epochs):
        with RunWriter.open(run, history=history, overwrite=True) as writer:
            for epoch in range(epochs):
                writer.extend(parts.record(epoch, batch) for batch in range(2))
                writer.commit_epoch(
                    parts.checkpoint(epoch, idp=writer.idps[-1]), parts.state(epoch), best=True
                )

    fit(6)
    records = iter_history(run.id)
    first = next(records)
    assert first.epoch_idx == 0
    fit(3)
    with pytest.raises(RunReplacedError, match="was replaced while its records were read"):
        list(records)
    assert len(list(iter_history(run.id))) == 6
