"""Every operation on the disk fails once, and every one is the last before a crash."""

from __future__ import annotations

import errno
import os
import shutil

import pytest
from nnx.enums import Checkpoints
from nnx.store import NNRun, RunWriter
from nnx.store.committed import NOTHING, committed_epoch
from nnx.store.election import best_run_id
from nnx.store.paths import RunPaths
from nnx.store.points import read_manifest
from nnx.utils import files

OPERATIONS = (
    "create", "open_append", "write", "flush", "flush_directory", "truncate", "replace", "link",
    "symlink", "unlink", "mkdir", "rmdir",
)  # fmt: skip


class Crash(BaseException):
    """The process is gone: nothing after this touches the disk."""


class FailingDisk(files.Disk):
    """Fails the operation number ``at``; ``crash`` lets none succeed afterwards."""

    def __init__(self, at: int, code: int, *, crash: bool, late: bool = False) -> None:
        self.at, self.code, self.crash, self.late = at, code, crash, late
        self.count = 0
        self.failed: str | None = None
        self.real = files.Disk()


def _failing(name):
    def real(self, *args):
        if name not in ("flush", "flush_directory"):  # too slow by the thousand
            return getattr(self.real, name)(*args)

    def operation(self, *args):
        if self.failed is not None and self.crash:
            raise Crash
        self.count += 1
        if self.count != self.at:
            return real(self, *args)
        self.failed = name
        if name == "write" and len(args[1]) > 1:  # a full disk takes a part
            real(self, args[0], memoryview(args[1]).cast("B")[: len(args[1]) // 2])
        elif self.late:
            real(self, *args)
        if self.crash:
            raise Crash
        raise OSError(self.code, os.strerror(self.code))

    return operation


for _name in OPERATIONS:
    setattr(FailingDisk, _name, _failing(_name))


@pytest.fixture
def fit(parts):
    """A fit with phases, BEST, step points and a callback's checkpoint."""

    def run_fit(run, root, history=None, overwrite=False):
        with RunWriter.open(run, root, history=history, overwrite=overwrite) as writer:
            for epoch in range(2):
                writer.append(parts.record(epoch, 0))
                inside = parts.state(epoch)
                inside["counters"] = {"global_step": 2 * epoch + 1}
                writer.commit_step(parts.checkpoint(epoch), inside)
                writer.append(parts.record(epoch, 1, error=0.3 - 0.1 * epoch))
                writer.commit_epoch(
                    parts.checkpoint(epoch, idp=writer.idps[-1]),
                    parts.state(epoch),
                    phases=[Checkpoints.FIRST] if epoch == 0 else [],
                    best=True,
                    deferred={f"custom_e{epoch}": parts.checkpoint(epoch)},
                )
            writer.finish()

    return run_fit


@pytest.fixture
def folders(train, parts, tmp_path):
    """Fresh runs folders that already hold a run, which owns ``best``."""
    train(parts.run(3, salt="first"), epochs=1, errors=[0.4])

    def fresh(name: str) -> str:
        root = tmp_path / f"runs-{name}"
        shutil.copytree(tmp_path / "runs", root, symlinks=True)
        return str(root)

    return fresh


def attempt(fit, run, root, disk, monkeypatch, **options):
    """Run the fit on a failing disk; the last epoch whose commit returned."""
    monkeypatch.setattr(files, "disk", disk)
    committed = []
    real = RunWriter.commit_epoch

    def commit_epoch(self, *args, **kwargs):
        done = real(self, *args, **kwargs)
        committed.append(done.epoch)
        return done

    monkeypatch.setattr(RunWriter, "commit_epoch", commit_epoch)
    error = None
    try:
        fit(run, root, **options)
    except (OSError, Crash) as caught:
        error = caught
    monkeypatch.undo()
    return (committed[-1] if committed else NOTHING), error


def count_operations(fit, run, root, monkeypatch, **options):
    disk = FailingDisk(-1, 0, crash=False)
    attempt(fit, run, root, disk, monkeypatch, **options)
    return disk.count


def journal():
    from nnx.history import HistoryJournal

    return HistoryJournal(retention=4, chunk_size=1)


THOROUGH = os.environ.get("NNX_THOROUGH") == "1"
# The whole sweep takes minutes: by default every ninth operation, with NNX_THOROUGH=1 all.
STRIDE = 1 if THOROUGH else 9


@pytest.mark.parametrize("history", [None, journal], ids=["table", "journal"])
def test_a_crash_at_any_operation_keeps_every_committed_epoch(
    fit, folders, parts, monkeypatch, check_sound, history
):
    options = {"history": history() if history else None}
    run = parts.run(3, salt="crash")
    total = count_operations(fit, run, folders("count"), monkeypatch, **options)
    assert total > 100
    for at in range(1 + STRIDE // 2, total + 1, STRIDE):
        root = folders(str(at))
        disk = FailingDisk(at, 0, crash=True, late=at % 2 == 0)
        committed, error = attempt(fit, run, root, disk, monkeypatch, **options)
        assert isinstance(error, Crash) or disk.failed is None
        paths = RunPaths(root, run.id)
        check_sound(root, committed={run.id: committed})
        if paths.exists():
            best = read_manifest(run.id, "best", root)
            last = committed_epoch(paths)
            assert (best["record"]["epoch_idx"] if best else NOTHING) == last
        shutil.rmtree(root)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
@pytest.mark.parametrize("history", [None, journal], ids=["table", "journal"])
def test_a_failed_operation_raises_and_keeps_every_committed_epoch(
    fit, folders, parts, monkeypatch, check_sound, history, code
):
    options = {"history": history() if history else None}
    run = parts.run(3, salt="fail")
    total = count_operations(fit, run, folders("count"), monkeypatch, **options)
    for at in range(1 + STRIDE // 2, total + 1, STRIDE):
        root = folders(str(at))
        disk = FailingDisk(at, code, crash=False)
        committed, error = attempt(fit, run, root, disk, monkeypatch, **options)
        paths = RunPaths(root, run.id)
        if error is None:
            assert committed == 1
        if not paths.exists():
            assert not os.path.exists(paths.dir)
        check_sound(root, committed={run.id: committed})
        assert best_run_id(root) is not None
        shutil.rmtree(root)


def test_an_overwrite_that_fails_anywhere_leaves_the_old_run_or_none(
    fit, folders, parts, monkeypatch, check_sound
):
    run = parts.run(3, salt="again")
    base = folders("base")
    fit(run, base)
    total = count_operations(fit, run, base, monkeypatch, overwrite=True)
    for at in range(1, total + 1, STRIDE + 2):
        root = f"{base}-{at}"
        shutil.copytree(base, root, symlinks=True)
        disk = FailingDisk(at, errno.EIO, crash=at % 2 == 0)
        attempt(fit, run, root, disk, monkeypatch, overwrite=True)
        check_sound(root)
        holder = best_run_id(root)
        assert holder is not None
        assert NNRun.load(holder, root).id == holder
        shutil.rmtree(root)


def test_a_failed_link_falls_back_to_a_copy(fit, root, parts, monkeypatch, check_sound):
    class NoLinks(files.Disk):
        def link(self, source, target):
            raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(files, "disk", NoLinks())
    run = parts.run(3, salt="copies")
    fit(run, root)
    folder = f"runs/{run.id}/checkpoints"
    assert os.stat(f"{folder}/last.pt").st_ino != os.stat(f"{folder}/best.pt").st_ino
    with open(f"{folder}/last.pt", "rb") as last, open(f"{folder}/best.pt", "rb") as best:
        assert last.read() == best.read()
    check_sound(root)
