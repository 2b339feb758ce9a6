"""Locks between processes: one file per lock, released when its holder dies.

Locks are re-entrant within a process and thread. A lock file stays behind
empty; its content means nothing. Where the system has ``flock`` it is called
directly, as filelock itself does there: an epoch takes several locks, and a
lock then costs microseconds. Elsewhere filelock does the work; the two exclude
each other.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

from nnx.errors import NNxError
from nnx.utils import files as fs

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_POLL_SECONDS = 0.01
_NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


class LockBusyError(RuntimeError, NNxError):
    """A lock that another process (or thread) holds."""


class _Timeout(NNxError):
    pass


class _Flock:
    """A ``flock``, exclusive or ``shared``, on a file that is created when missing."""

    def __init__(self, path: str, timeout: float, *, shared: bool = False) -> None:
        self._shared = shared
        give_up = time.monotonic() + timeout
        self._wait(path, timeout, give_up)
        while not self._is_at(path):  # its folder was replaced meanwhile: it guards another one
            self.release()
            self._wait(path, timeout, give_up)

    def _wait(self, path: str, timeout: float, give_up: float) -> None:
        self._descriptor = fs.disk.open_lock(path)
        try:
            while not self._try():
                if timeout >= 0 and give_up <= time.monotonic():
                    raise _Timeout
                time.sleep(_POLL_SECONDS)
        except BaseException:
            self.release()
            raise

    def _is_at(self, path: str) -> bool:
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(path))
        except FileNotFoundError:
            return False

    def _try(self) -> bool:
        try:
            fs.disk.lock(self._descriptor, shared=self._shared)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        os.close(self._descriptor)

    # A forked worker inherits the descriptor; kept open there, it would hold the
    # lock after its owner was killed. Closing it there releases nothing here.
    forget = release


class _Filelock:
    def __init__(self, path: str, timeout: float, *, shared: bool = False) -> None:
        from filelock import FileLock, Timeout

        # filelock opens for writing, which must not reach through a link.
        if os.path.islink(path):
            raise OSError(errno.ELOOP, "a lock file must not be a symbolic link", path)
        self._lock = FileLock(path, thread_local=False)
        try:
            self._lock.acquire(timeout=timeout)
        except Timeout:
            raise _Timeout from None

    def release(self) -> None:
        self._lock.release()

    def forget(self) -> None:
        """filelock sees to its own descriptors after a fork."""


_held: dict[tuple[str, int], int] = {}  # (path, thread) -> depth
# The locks that are held. A path may have two, where its folder was replaced under the first.
_files: dict[tuple[str, int], Any] = {}
_guard = threading.Lock()


@contextlib.contextmanager
def locked(
    path: str | os.PathLike[str],
    *,
    timeout: float = -1,
    what: str = "the file",
    optional: bool = False,
    again: bool = True,
    error: type[LockBusyError] = LockBusyError,
) -> Iterator[None]:
    """Hold the lock file at ``path``, created when missing.

    ``timeout`` is in seconds: 0 tries once, -1 waits for ever; running out of
    it raises ``error``, which names ``what``. ``optional`` goes on
    without the lock where the file cannot be created (a read-only folder, in
    which nobody writes either). Without ``again``, a lock that this very thread holds
    already is busy too.
    """
    key = (os.path.abspath(path), threading.get_ident())
    with _guard:
        nested = key in _held
        if nested and not again:
            raise error(f"{what} is in use by this very process (lock {key[0]})")
        if nested:
            _held[key] += 1
    if not nested:
        lock = _acquire(key[0], timeout, what, optional, error)
        if lock is None:
            yield
            return
        with _guard:
            _held[key] = 1
            _files[key] = lock
    try:
        yield
    finally:
        with _guard:
            _held[key] -= 1
            if _held[key] == 0:
                del _held[key]
                _files.pop(key).release()


def _acquire(
    path: str, timeout: float, what: str, optional: bool, busy: type[LockBusyError]
) -> Any:
    try:
        return _take(path, timeout)
    except _Timeout:
        raise busy(f"{what} is in use by another process (lock {path})") from None
    except OSError as error:
        if optional and error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            return None
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "a lock file must not be a symbolic link", path) from None
        raise


def _take(path: str, timeout: float, *, shared: bool = False) -> Any:
    if fcntl is not None:
        try:
            return _Flock(path, timeout, shared=shared)
        except OSError as error:
            if error.errno not in _NO_FLOCK:
                raise
    return _Filelock(path, timeout, shared=shared)


def held_here(path: str | os.PathLike[str]) -> bool:
    """Whether this very thread holds the lock."""
    return (os.path.abspath(path), threading.get_ident()) in _held


def is_held(path: str | os.PathLike[str]) -> bool:
    """Whether anybody holds the lock now; leaves no file behind."""
    where = os.path.abspath(path)
    with _guard:
        if any(path == where for path, _ in _files):
            return True
    if not os.path.exists(where):
        return False
    try:
        # Shared, so that two who look at once do not take each other for the holder.
        _take(where, 0, shared=True).release()
    except _Timeout:
        return True
    except OSError:
        return False  # whoever may not open it does not hold it either
    return False


def _forget_in_child() -> None:
    global _guard
    for lock in _files.values():
        with contextlib.suppress(OSError):
            lock.forget()
    _files.clear()
    _held.clear()
    _guard = threading.Lock()  # another thread of the parent may have held it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
