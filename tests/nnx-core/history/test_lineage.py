"""Histories across resumes, exports and migrations."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import warnings
from pathlib import Path

import pytest
from nnx.history import HistoryJournal, export_history_csv, iter_history, migrate_history
from nnx.records import NNEvaluationDataPoint, ResumeStatus
from nnx.store import NNRun, RunBusyError, RunWriter, idps_csv
from nnx.store.paths import RunPaths


@pytest.fixture
def chain(train, parts, root):
    """Write a run that resumed ``parent`` after ``branch`` and trained some epochs."""

    def child(parent, epochs, salt, *, branch, checkpoint="last", journal=False, status=None):
        run = parts.run(9, salt=salt).with_resume_status(
            status or ResumeStatus(
                mode="stateful", source_run_id=parent if isinstance(parent, str) else parent.id,
                source_checkpoint=checkpoint, source_epoch=branch,
            )
        )  # fmt: skip
        history = HistoryJournal(retention=2) if journal else None
        with RunWriter.open(run, history=history) as writer:
            for epoch in epochs:
                writer.extend([parts.record(epoch, 0), parts.record(epoch, 1)])
                writer.commit_epoch(parts.checkpoint(epoch), parts.state(epoch), best=True)
            return writer.finish()

    return child


def epochs_of(run, **options):
    return [r.epoch_idx for r in iter_history(run.id, **options) if r.batch_idx == 0]


@pytest.mark.parametrize("journal", [False, True], ids=["tables", "journals"])
def test_each_epoch_appears_once_across_a_lineage(train, parts, chain, journal):
    spec = HistoryJournal(retention=2) if journal else None
    first = train(parts.run(4, salt="first"), 4, history=spec)
    second = chain(first, [2, 3, 4], "second", branch=1, journal=journal)  # not from its last
    third = chain(second, [4, 5], "third", branch=3, journal=journal)
    assert epochs_of(third) == [4, 5]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert epochs_of(third, lineage=True) == [0, 1, 2, 3, 4, 5]
        assert epochs_of(second, lineage=True) == [0, 1, 2, 3, 4]
        assert epochs_of(first, lineage=True) == [0, 1, 2, 3]


def test_a_parent_with_table_and_a_child_with_journal_join(train, parts, chain):
    first = train(parts.run(4, salt="first"), 2)
    second = chain(first, [2], "second", branch=1, journal=True)
    assert epochs_of(second, lineage=True) == [0, 1, 2]


def test_a_child_without_a_committed_record_shows_its_parents_up_to_the_branch(train, parts, chain):
    first = train(parts.run(4, salt="first"), 4)
    second = chain(first, [], "second", branch=1)
    parts.run(9, salt="second").with_resume_status(
        ResumeStatus(mode="stateful", source_run_id=first.id, source_epoch=1)
    ).save(update_best=False)
    assert epochs_of(second, lineage=True) == [0, 1]


def test_a_fresh_run_is_its_own_lineage(train, parts, chain):
    first = train(parts.run(4, salt="first"), 2)
    status = ResumeStatus(mode="fresh", source_run_id=first.id)
    other = chain(first, [0, 1], "student", branch=None, status=status)
    assert epochs_of(other, lineage=True) == [0, 1]


def test_an_unrecorded_branch_is_the_epoch_of_that_checkpoint_now(train, parts, chain):
    first = train(parts.run(4, salt="first"), 4)
    second = chain(first, [1, 2], "second", branch=None, checkpoint="first")
    assert epochs_of(second, lineage=True) == [0, 1, 2]


def test_an_unreadable_parent_checkpoint_falls_back_to_the_childs_first_record(train, parts, chain):
    first = train(parts.run(4, salt="first"), 4)
    second = chain(first, [2, 3], "second", branch=None)
    last = Path(f"runs/{first.id}/checkpoints/last.pt")
    last.unlink()
    last.write_bytes(b"")
    with pytest.warns(RuntimeWarning, match=f"epochs of {first.id} before 2 are used"):
        assert epochs_of(second, lineage=True) == [0, 1, 2, 3]


@pytest.mark.parametrize("how", ["gone", "pointer", "unknown"])
def test_a_lineage_that_cannot_be_followed_starts_at_the_child(train, parts, chain, how):
    first = train(parts.run(4, salt="first"), 2)
    if how == "pointer":
        second, message = chain("best", [2], "second", branch=1), "runs/best"
    elif how == "gone":
        second, message = chain(first, [2], "second", branch=1), "is gone"
        shutil.rmtree(f"runs/{first.id}")
    else:
        second, message = chain(first, [], "second", branch=None), "is unknown"
        parts.run(9, salt="second").with_resume_status(
            ResumeStatus(mode="stateful", source_run_id=first.id, source_checkpoint="q1")
        ).save(update_best=False)
    with pytest.warns(RuntimeWarning, match=message):
        assert epochs_of(second, lineage=True) == ([] if how == "unknown" else [2])


def test_a_lineage_in_a_circle_ends(train, parts, chain):
    first = train(parts.run(4, salt="first"), 2)
    second = chain(first, [2], "second", branch=1)
    loaded = NNRun.load(first.id).with_resume_status(
        ResumeStatus(mode="stateful", source_run_id=second.id, source_epoch=9)
    )
    loaded.save(update_best=False)
    with pytest.warns(RuntimeWarning, match="returns to"):
        assert epochs_of(second, lineage=True) == [0, 1, 2]


def test_reading_a_lineage_leaves_the_source_byte_for_byte(train, parts, chain):
    first = train(parts.run(4, salt="first"), 2)

    def digest():
        return {
            p: hashlib.sha256(p.read_bytes()).hexdigest()
            for p in Path(f"runs/{first.id}").rglob("*")
            if p.is_file()
        }

    before = digest()
    second = chain(first, [2], "second", branch=1)
    list(iter_history(second.id, lineage=True))
    assert digest() == before


def test_an_export_is_the_table_that_save_would_write(train, parts, chain, tmp_path):
    eager = train(parts.run(3, salt="eager"), 3)
    bounded = train(parts.run(3, salt="bounded"), 3, history=HistoryJournal(retention=2))
    assert export_history_csv(bounded.id, tmp_path / "out.csv") == 6
    assert (tmp_path / "out.csv").read_bytes() == Path(f"runs/{eager.id}/idps.csv").read_bytes()
    child = chain(bounded, [3], "child", branch=2, journal=True)
    assert export_history_csv(child.id, tmp_path / "own.csv") == 2
    assert export_history_csv(child.id, tmp_path / "all.csv", lineage=True) == 8
    assert idps_csv.read(str(tmp_path / "all.csv")) == list(iter_history(child.id, lineage=True))


def test_an_unknown_run_is_refused_when_asked_not_when_read(root):
    with pytest.raises(FileNotFoundError, match="no run 'x'"):
        iter_history("x")


# Migration


def test_a_migrated_run_keeps_its_id_and_its_records(train, parts, root):
    run = train(parts.run(3, salt="m"), 3)
    yaml = Path(f"runs/{run.id}/run.yaml").read_bytes()
    migrate_history(run.id, spec=HistoryJournal(retention=4, chunk_size=1))
    assert not os.path.exists(f"runs/{run.id}/idps.csv")
    assert Path(f"runs/{run.id}/run.yaml").read_bytes() == yaml
    assert list(iter_history(run.id)) == run.idps
    loaded = NNRun.load(run.id)
    assert (loaded.id, loaded.idps) == (run.id, run.idps[-4:])
    migrate_history(run.id)  # done already
    assert list(iter_history(run.id)) == run.idps


def test_numbers_that_are_not_finite_can_be_migrated(parts, root):
    nan, inf = float("nan"), float("inf")
    run = parts.run(3)
    with RunWriter.open(run) as writer:
        for epoch, loss in enumerate([1.0, nan, -inf]):
            edp = NNEvaluationDataPoint(loss=loss, error=0.5, extra={"norm": loss})
            first, last = parts.record(epoch, 0), parts.record(epoch, 1)
            writer.extend([dataclasses.replace(first, train_edp=edp), last.with_val_edp(edp)])
            writer.commit_epoch(parts.checkpoint(epoch, idp=writer.idps[-1]), parts.state(epoch))
        written = [repr(record.state()) for record in writer.idps]
    migrate_history(run.id)
    assert [repr(record.state()) for record in iter_history(run.id)] == written
    assert not os.path.exists(f"runs/{run.id}/idps.csv")


def test_an_interrupted_migration_is_run_again(train, parts, root, monkeypatch):
    run = train(parts.run(3, salt="m"), 3)
    (Path(f"runs/{run.id}/history")).mkdir()
    Path(f"runs/{run.id}/history/chunk-00000000.jsonl").write_text("leftover")
    assert NNRun.load(run.id).idps == run.idps  # the table still counts
    table = Path(f"runs/{run.id}/idps.csv").read_bytes()
    migrate_history(run.id)
    Path(f"runs/{run.id}/idps.csv").write_bytes(table)  # published, the table not yet removed
    migrate_history(run.id)
    assert not os.path.exists(f"runs/{run.id}/idps.csv")
    assert list(iter_history(run.id)) == run.idps


def test_uncommitted_rows_are_not_deleted_unless_asked(train, parts, root):
    run = train(parts.run(3, salt="m"), 2)
    idps_csv.write(f"runs/{run.id}/idps.csv", [*run.idps, parts.record(2, 0)])
    before = sorted(os.listdir(f"runs/{run.id}"))
    with pytest.raises(ValueError, match=r"holds 1 row\(s\) that LAST never committed"):
        migrate_history(run.id)
    assert sorted(os.listdir(f"runs/{run.id}")) == before
    migrate_history(run.id, discard_uncommitted=True)
    assert list(iter_history(run.id)) == run.idps


def test_what_cannot_be_migrated_is_refused(train, parts, root):
    run = train(parts.run(3, salt="m"), 1)
    with pytest.raises(ValueError, match="by its own id"):
        migrate_history("best")
    with pytest.raises(FileNotFoundError, match="no run"):
        migrate_history("missing")
    import threading

    from nnx.store.lease import lease

    caught = []

    def other():
        try:
            migrate_history(run.id)
        except RunBusyError as error:
            caught.append(error)

    with lease(RunPaths.of(run.id)):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(caught) == 1
    os.unlink(f"runs/{run.id}/idps.csv")
    with pytest.raises(FileNotFoundError, match="nothing to migrate"):
        migrate_history(run.id)
