"""Writing files so that a name is either the old file or the new one."""

from __future__ import annotations

import hashlib
import os
import threading

import numpy as np
import pytest
from nnx.utils import files
from nnx.utils.files import atomic_write, is_temporary_name, temporary_name
from nnx.utils.flushing import Flushes, HashingFile, sha256_of, side_by_side


@pytest.fixture
def disk(monkeypatch):
    """Replace one operation of the disk by a failure."""

    def fail(name, error):
        class Failing(files.Disk):
            pass

        def operation(self, *args):
            raise error

        setattr(Failing, name, operation)
        monkeypatch.setattr(files, "disk", Failing())

    return fail


@pytest.mark.parametrize("name", ["create", "write", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left"), KeyboardInterrupt()])
def test_a_failure_anywhere_keeps_the_old_file_and_leaves_no_other(tmp_path, disk, name, error):
    path = tmp_path / "run.yaml"
    path.write_text("old")
    disk(name, error)

    def write():
        with atomic_write(path) as stream:
            stream.write("new")

    with pytest.raises(type(error)) as caught:
        write()
    assert caught.value is error
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["run.yaml"]


def test_an_error_while_cleaning_up_does_not_mask_the_first(tmp_path, monkeypatch):
    class Failing(files.Disk):
        def replace(self, source, target):
            raise OSError("the rename")

        def unlink(self, path):
            raise OSError("the cleanup")

    monkeypatch.setattr(files, "disk", Failing())

    def write():
        with atomic_write(tmp_path / "x") as stream:
            stream.write("new")

    with pytest.raises(OSError, match="the rename"):
        write()


def test_a_failed_flush_is_tolerated_unless_it_must_not_be(tmp_path, disk):
    disk("flush", OSError(5, "Input/output error"))
    with atomic_write(tmp_path / "x") as stream:
        stream.write("new")
    assert (tmp_path / "x").read_text() == "new"

    def strict():
        with atomic_write(tmp_path / "x", strict=True) as stream:
            stream.write("newer")

    with pytest.raises(OSError, match="Input/output"):
        strict()
    assert (tmp_path / "x").read_text() == "new"


def test_bytes_text_bare_names_and_links(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with atomic_write("bare") as stream:
        stream.write("línea\r\n")
    assert (tmp_path / "bare").read_bytes() == "línea\r\n".encode()
    os.mkdir("real")
    os.symlink("real/target", "link")
    with atomic_write("link", "wb") as stream:
        stream.write(b"\x00\xff")
    assert os.path.islink("link")
    assert (tmp_path / "real" / "target").read_bytes() == b"\x00\xff"
    assert sorted(os.listdir(tmp_path)) == ["bare", "link", "real"]


def test_the_mode_is_that_of_an_ordinary_new_file(tmp_path):
    (tmp_path / "plain").touch()
    with atomic_write(tmp_path / "ours") as stream:
        stream.write("x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_temporary_names_are_known_and_no_other_is():
    assert is_temporary_name(os.path.basename(temporary_name("a/last.pt")))
    for name in ("last.pt", ".run.lock", ".x", ".a.0123", "a.0123456789ab", ".0123456789ab"):
        assert not is_temporary_name(name)


def test_a_filesystem_that_cannot_flush_is_accepted_and_a_broken_disk_is_not(tmp_path, monkeypatch):
    with open(tmp_path / "x", "wb") as stream:
        monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(22, "no")))
        files.Disk().flush(stream.fileno())
        monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(5, "broken")))
        with pytest.raises(OSError, match="broken"):
            files.Disk().flush(stream.fileno())


def test_where_only_a_full_flush_reaches_the_drive_it_is_asked_for(tmp_path, monkeypatch):
    """macOS: ``fsync`` ends in the drive's cache."""
    from types import SimpleNamespace

    from nnx.utils import disk as disk_module

    asked = []
    system = SimpleNamespace(F_FULLFSYNC=51, fcntl=lambda fd, what: asked.append(what))
    monkeypatch.setattr(disk_module, "fcntl", system)
    monkeypatch.setattr(os, "fsync", lambda fd: asked.append("fsync"))
    with open(tmp_path / "x", "wb") as stream:
        files.Disk().flush(stream.fileno())
    files.Disk().flush_directory(tmp_path)
    assert asked == [51, 51]


@pytest.mark.parametrize("sizes", [[0], [10], [300_000], [5, 300_000, 7, 2_000_000, 1]])
def test_the_digest_is_that_of_the_bytes_whoever_hashed_them(tmp_path, sizes):
    blocks = [np.random.default_rng(0).bytes(size) for size in sizes]
    held = [np.frombuffer(block, dtype=np.uint8) for block in blocks]
    alive = [
        (a.__array_interface__["data"][0], a.__array_interface__["data"][0] + a.size)
        for a in held[::2]
    ]
    for known in ([], alive):
        path = tmp_path / f"x{len(known)}"
        file, flushes = HashingFile(path, known), Flushes()
        for array in held:
            file.write(memoryview(array))
        digest = file.finish(flushes)
        flushes.wait()
        data = path.read_bytes()
        assert data == b"".join(blocks)
        assert digest == hashlib.sha256(data).hexdigest()
        assert file.size == len(data)


def test_a_buffer_that_is_reused_at_once_is_hashed_before_that(tmp_path):
    file, flushes, buffer = HashingFile(tmp_path / "x"), Flushes(), bytearray(1 << 20)
    for fill in range(5):
        buffer[:] = bytes([fill]) * len(buffer)
        file.write(memoryview(buffer))
    digest = file.finish(flushes)
    flushes.wait()
    assert digest == hashlib.sha256((tmp_path / "x").read_bytes()).hexdigest()


def test_an_abandoned_file_is_gone_and_its_thread_too(tmp_path):
    held = np.zeros(1 << 20, dtype=np.uint8)
    start = held.__array_interface__["data"][0]
    before = threading.active_count()
    file = HashingFile(tmp_path / "x", [(start, start + held.size)])
    file.write(memoryview(held))
    file.abandon()
    assert os.listdir(tmp_path) == []
    assert threading.active_count() == before


def test_flushes_raise_the_first_failure_after_all_have_ended(tmp_path, disk):
    disk("flush", OSError(5, "Input/output error"))
    flushes = Flushes()
    for name in "ab":
        flushes.add(os.open(tmp_path / name, os.O_CREAT | os.O_WRONLY))
    with pytest.raises(OSError, match="Input/output"):
        flushes.wait()
    flushes.wait()  # said once


def test_small_files_and_their_folder_are_flushed_together_and_a_large_one_at_once(
    tmp_path, monkeypatch
):
    flushed, large_is_done = [], threading.Event()

    class Watched(files.Disk):
        def flush(self, descriptor):
            size = os.fstat(descriptor).st_size
            flushed.append(size)
            super().flush(descriptor)
            if size >= files.BLOCK:
                large_is_done.set()

        def flush_directory(self, path):
            flushed.append(path)
            super().flush_directory(path)

    monkeypatch.setattr(files, "disk", Watched())
    flushes = Flushes()
    for name, size in (("a", 10), ("b", files.BLOCK), ("c", 20)):
        descriptor = os.open(tmp_path / name, os.O_CREAT | os.O_WRONLY)
        os.write(descriptor, bytes(size))
        flushes.add(descriptor, size)
    flushes.add_directory(tmp_path)
    assert large_is_done.wait(60)
    assert flushed == [files.BLOCK]
    flushes.wait()
    assert sorted(flushed[1:], key=str) == sorted([10, 20, tmp_path], key=str)


def test_a_failure_to_flush_a_folder_is_raised(tmp_path, disk):
    disk("flush_directory", OSError(5, "Input/output error"))
    flushes = Flushes()
    flushes.add_directory(tmp_path)
    with pytest.raises(OSError, match="Input/output"):
        flushes.wait()


def test_work_is_done_side_by_side_and_its_first_error_in_order_is_raised():
    meet, ended = threading.Barrier(3, timeout=60), []

    def work(number):
        meet.wait()  # none could pass this alone
        ended.append(number)
        if number:
            raise ValueError(f"item {number}")
        return number

    with pytest.raises(ValueError, match="item 1"):
        side_by_side(work, [0, 1, 2])
    assert sorted(ended) == [0, 1, 2]
    assert side_by_side(len, ["a", "bc"]) == [1, 2]
    assert side_by_side(len, []) == []


def test_a_file_is_digested_in_blocks(tmp_path):
    data = os.urandom(files.BLOCK + 3)
    (tmp_path / "x").write_bytes(data)
    assert sha256_of(tmp_path / "x") == hashlib.sha256(data).hexdigest()
