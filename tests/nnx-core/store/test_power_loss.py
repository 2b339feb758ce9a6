"""The power fails: of a file only what was flushed is left, of a folder only its flushed names.

One fit runs on a disk that notes what each flush made durable. Every state that
a power loss could have left behind at worst is then laid out and examined.
"""

from __future__ import annotations

import os
import threading

import pytest
from nnx.enums import Checkpoints
from nnx.history import HistoryJournal
from nnx.provenance import ExperimentManifest
from nnx.store import RunWriter
from nnx.store.committed import NOTHING
from nnx.utils import files


class Ledger(files.Disk):
    """A disk that knows what would survive."""

    def __init__(self):
        self.contents: dict[int, bytes] = {}  # inode -> flushed bytes
        self.names: dict[int, dict[str, tuple]] = {}  # inode of a folder -> flushed names
        self.committed = NOTHING
        self._guard = threading.Lock()
        self.states: list[tuple[dict, dict, int]] = []
        self._kept: list[int] = []  # open descriptors: no inode is used twice

    def create(self, path):
        descriptor = super().create(path)
        self._kept.append(os.dup(descriptor))
        return descriptor

    def open_append(self, path):
        descriptor = super().open_append(path)
        self._kept.append(os.dup(descriptor))
        return descriptor

    def mkdir(self, path):
        super().mkdir(path)
        self._kept.append(os.open(path, os.O_RDONLY))

    def flush(self, descriptor):
        info = os.fstat(descriptor)
        data = os.pread(descriptor, info.st_size, 0)
        with self._guard:  # flushes run side by side
            self.contents = {**self.contents, info.st_ino: data}
            self.note()

    def flush_directory(self, path):
        found = {}
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_symlink():
                    found[entry.name] = ("link", os.readlink(entry.path))
                else:
                    found[entry.name] = ("dir" if entry.is_dir() else "file", entry.inode())
        with self._guard:
            self.names = {**self.names, os.stat(path).st_ino: found}
            self.note()

    def note(self):
        self.states.append((self.contents, self.names, self.committed))

    def close_all(self):
        for descriptor in self._kept:
            os.close(descriptor)


def lay_out(contents, names, folder, target):
    """Write down what is left of ``folder``."""
    os.mkdir(target)
    for name, (kind, what) in names.get(folder, {}).items():
        path = os.path.join(target, name)
        if kind == "dir":
            lay_out(contents, names, what, path)
        elif kind == "link":
            os.symlink(what, path)
        else:
            with open(path, "wb") as stream:
                stream.write(contents.get(what, b""))
            os.utime(path, (0, 0))


@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwritten"])
@pytest.mark.parametrize("journal", [False, True], ids=["table", "journal"])
def test_a_committed_epoch_survives_a_power_loss(
    parts, tmp_path, monkeypatch, check_sound, journal, overwrite
):
    root = str(tmp_path / "runs")
    run = parts.run(8, salt="the one")
    history = HistoryJournal(retention=100) if journal else None

    def fit(ledger):
        plan = ExperimentManifest(config={"a": 1})
        options = {"history": history, "overwrite": overwrite, "provenance": plan}
        with RunWriter.open(run, root, **options) as writer:
            for epoch in range(2):
                for batch in range(2):
                    writer.append(parts.record(epoch, batch))
                phases = [(Checkpoints.FIRST, Checkpoints.Q1)[epoch]]
                writer.commit_epoch(
                    parts.checkpoint(epoch, idp=writer.idps[-1]), parts.state(epoch),
                    phases=phases, best=True, deferred={f"custom_e{epoch}": parts.checkpoint(epoch)}
                )  # fmt: skip
                ledger.committed = epoch
                ledger.note()
            writer.finish()
            ledger.note()

    ledger = Ledger()
    with monkeypatch.context() as patch:
        patch.setattr(files, "disk", ledger)
        if overwrite:
            with RunWriter.open(run, root) as writer:
                writer.extend(parts.record(0, batch) for batch in range(2))
                writer.commit_epoch(parts.checkpoint(0), parts.state(0), best=True)
            ledger.states.clear()
        fit(ledger)
        folder = os.stat(tmp_path).st_ino
    ledger.close_all()
    examined = set()
    for number, (contents, names, committed) in enumerate(ledger.states):
        left = str(tmp_path / f"left-{number}")
        lay_out(contents, names, folder, left)
        check_sound(f"{left}/runs", committed={run.id: committed} if committed >= 0 else {})
        if committed >= 0:
            assert os.path.exists(f"{left}/runs/{run.id}/run.yaml"), f"state {number}"
        examined.add(committed)
    assert examined == {-1, 0, 1}
