from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from nnx.enums import Checkpoints
from nnx.store import NNCheckpoint, NNRun, RunBusyError, RunWriter, idps_csv
from nnx.store.cleanup import collect
from nnx.store.lease import remove
from nnx.store.paths import RunPaths
from nnx.store.pointer import best_run_id


def everything() -> set[str]:
    return {str(path) for path in Path("runs").rglob("*")}


def test_a_sound_folder_has_nothing_to_remove_and_a_missing_one_neither(train, root):
    train(epochs=2)
    before = everything()
    assert collect() == []
    assert everything() == before  # no lock file either
    assert collect("elsewhere") == []
    assert not os.path.exists("elsewhere")


def test_leftovers_are_removed_and_other_files_are_left_alone(train, parts, root):
    run = train(epochs=2)
    other = Path("runs/notes")
    other.mkdir()
    (other / "mine.txt").touch()
    keep = everything() | {f"runs/{run.id}/table.json"}
    Path(f"runs/{run.id}/table.json").touch()
    checkpoints = Path(f"runs/{run.id}/checkpoints")
    reserved = Path("runs/reserved")
    reserved.mkdir()
    (reserved / ".history-committed-by-last").touch()
    (reserved / ".run.yaml.0123456789ab").touch()
    Path("runs/empty").mkdir()
    shutil.copytree(f"runs/{run.id}", "runs/.trash-x-01234567")
    Path("runs/.best.0123456789ab").symlink_to("x")
    (checkpoints / ".last.pt.opt.pt.0123456789ab").touch()
    (checkpoints / f"last.pt.opt.{'0' * 32}.pt").touch()
    (checkpoints / "q1.pt.staged").touch()
    (checkpoints / "q1.pt.manifest.json.staged").write_text("{")
    idps_csv.write(f"runs/{run.id}/idps.csv", [*run.idps, parts.record(2, 0)])
    before = everything()
    listed = collect(dry_run=True)
    assert everything() == before
    assert len(listed) == 8
    assert "torn" not in str(listed)
    assert everything() > keep
    assert [(x.path, x.reason) for x in collect()] == [(x.path, x.reason) for x in listed]
    assert {p for p in everything() if ".lock" not in p} == {p for p in keep if ".lock" not in p}
    assert idps_csv.read(f"runs/{run.id}/idps.csv") == run.idps
    assert collect() == []


def test_a_run_in_training_is_passed_over(parts, root):
    with RunWriter.open(parts.run()) as writer:
        writer.append(parts.record(0, 1))
        writer.commit_epoch(parts.checkpoint(0), parts.state(0))
        stray = Path(f"runs/{parts.run().id}/.x.0123456789ab")
        stray.touch()

        import threading

        found = []
        thread = threading.Thread(target=lambda: found.extend(collect()))
        thread.start()
        thread.join()
        assert found == []
        assert stray.exists()


def test_a_pointer_to_nothing_is_elected_anew(train, parts, root):
    worse, better = (
        train(parts.run(1, salt=str(error)), 1, errors=[error]) for error in (0.4, 0.2)
    )
    assert best_run_id() == better.id
    shutil.rmtree(f"runs/{better.id}")
    assert best_run_id() is None
    (leftover,) = collect()
    assert leftover.reason == "points to no run"
    assert best_run_id() == worse.id


def test_removing_a_run_moves_the_pointer_first(train, parts, root):
    worse, better = (
        train(parts.run(1, salt=str(error)), 1, errors=[error]) for error in (0.4, 0.2)
    )
    remove(RunPaths.of(better.id))
    assert best_run_id() == worse.id
    assert not os.path.exists(f"runs/{better.id}")
    remove(RunPaths.of(worse.id))
    assert not os.path.lexists("runs/best")
    with pytest.raises(FileNotFoundError, match="there is no run"):
        remove(RunPaths.of(worse.id))


def test_removing_one_of_two_runs_that_never_shared_keeps_the_other_whole(train, parts, root):
    first, second = (train(parts.run(2, salt=salt), 2) for salt in "ab")
    remove(RunPaths.of(first.id))
    assert NNRun.load(second.id).idps == second.idps
    for tag in (Checkpoints.FIRST, Checkpoints.LAST, Checkpoints.BEST):
        assert NNCheckpoint.verify(second.id, tag)


def test_a_run_in_training_is_not_removed(parts, root):
    import threading

    with RunWriter.open(parts.run()):
        caught = []

        def attempt():
            try:
                remove(RunPaths.of(parts.run().id))
            except RunBusyError as error:
                caught.append(error)

        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
        assert "in use by another process" in str(caught[0])


def test_a_pointer_that_a_killed_process_left_behind_is_brought_up_to_date(train, parts, root):
    """A run commits a better BEST, and its process dies before it claims the pointer."""
    worse, better = (
        train(parts.run(1, salt=str(error)), 1, errors=[error]) for error in (0.4, 0.2)
    )
    os.unlink("runs/best")
    os.symlink(worse.id, "runs/best")
    assert [x.reason for x in collect(dry_run=True)] == ["does not point to the best run"]
    assert best_run_id() == worse.id
    assert len(collect()) == 1
    assert best_run_id() == better.id
    os.unlink("runs/best")
    assert len(collect()) == 1
    assert best_run_id() == better.id
    assert collect() == []


@pytest.mark.skipif(os.name == "nt", reason="only flock can be shared")
def test_a_look_at_a_run_does_not_keep_a_training_from_starting(parts, root):
    import threading

    from nnx.utils.locks import _Flock

    paths = RunPaths.of(parts.run().id)
    os.makedirs("runs/.leases")
    look = _Flock(paths.lease, 0, shared=True)  # as `nnx runs` does for an instant
    threading.Timer(0.05, look.release).start()
    with parts.run().writable_lease():
        assert os.path.isdir(paths.dir)
