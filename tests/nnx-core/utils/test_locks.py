from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
from nnx.utils.locks import LockBusyError, is_held, locked


def in_thread(act):
    caught = []

    def run():
        try:
            act()
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return caught


def test_a_lock_is_re_entrant_and_exclusive_between_threads(tmp_path):
    path = tmp_path / "x.lock"

    def attempt():
        with locked(path, timeout=0, what="run x"):
            pass

    with locked(path), locked(path):
        assert is_held(path)
        (error,) = in_thread(attempt)
        assert isinstance(error, LockBusyError)
        assert "run x is in use by another process" in str(error)
    assert not is_held(path)
    assert in_thread(attempt) == []


def test_a_folder_may_be_replaced_under_a_lock_that_lies_in_it(tmp_path):
    folder = tmp_path / "run"
    path = folder / "x.lock"

    def replace():
        folder.rename(tmp_path / "old")
        folder.mkdir()

    def take():
        with locked(path, timeout=60):
            taken.append(is_held(path))

    def wait():
        with locked(path, timeout=60):
            # Of the folder that is there now, not of the one that it waited for.
            taken.append(in_thread(lambda: locked(path, timeout=0).__enter__()))

    taken = []
    folder.mkdir()
    with locked(path):
        waiter = threading.Thread(target=wait)
        waiter.start()
        time.sleep(0.1)  # the waiter looks at the first folder's lock
        replace()
        assert in_thread(take) == []
    waiter.join()
    assert taken[0] is True
    assert [type(error) for error in taken[1]] == [LockBusyError]
    assert not is_held(path)


def test_a_lock_is_exclusive_between_processes_and_ends_with_its_holder(tmp_path):
    path = tmp_path / "x.lock"
    code = (
        "import sys; from nnx.utils.locks import locked\n"
        "with locked(sys.argv[1]): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout.readline() == b"held\n"
        assert is_held(path)
        with pytest.raises(LockBusyError), locked(path, timeout=0):
            raise AssertionError
        holder.kill()
    with locked(path, timeout=60):
        pass


def test_looking_creates_nothing(tmp_path):
    assert not is_held(tmp_path / "x.lock")
    assert os.listdir(tmp_path) == []


def test_a_link_in_place_of_a_lock_is_refused_and_its_target_untouched(tmp_path):
    (tmp_path / "precious").write_text("data")
    (tmp_path / "x.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic link"), locked(tmp_path / "x.lock"):
        raise AssertionError
    assert (tmp_path / "precious").read_text() == "data"


@pytest.mark.parametrize("first", ["_Flock", "_Filelock"])
def test_flock_and_filelock_exclude_each_other(tmp_path, first, monkeypatch):
    from nnx.utils import locks

    if locks.fcntl is None:
        pytest.skip("this system has no flock")
    second = {"_Flock": "_Filelock", "_Filelock": "_Flock"}[first]
    path = str(tmp_path / "x.lock")
    held = getattr(locks, first)(path, 0)
    with pytest.raises(locks._Timeout):
        getattr(locks, second)(path, 0)
    held.release()
    getattr(locks, second)(path, 0).release()


def test_without_flock_filelock_does_the_work(tmp_path, monkeypatch):
    from nnx.utils import locks

    monkeypatch.setattr(locks, "fcntl", None)
    with locked(tmp_path / "x.lock"):
        assert is_held(tmp_path / "x.lock")
        (error,) = in_thread(lambda: locked(tmp_path / "x.lock", timeout=0).__enter__())
        assert isinstance(error, LockBusyError)
    assert not is_held(tmp_path / "x.lock")


def test_waiting_for_a_lock_ends_when_it_is_free(tmp_path):
    path, order = tmp_path / "x.lock", []

    def wait():
        with locked(path, timeout=20):
            order.append("second")

    with locked(path):
        thread = threading.Thread(target=wait)
        thread.start()
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


@pytest.mark.skipif(os.name == "nt", reason="only flock can be shared")
def test_who_only_looks_is_not_taken_for_the_holder(tmp_path):
    from nnx.utils import locks

    path = str(tmp_path / "x.lock")
    other = locks._Flock(path, 0, shared=True)  # another look, at the same instant
    assert not is_held(path)
    threading.Timer(0.05, other.release).start()
    with locked(path, timeout=20):
        assert is_held(path)
