"""Locks between processes: one file per lock, released when its holder dies.

Locks are re-entrant within a process and thread. A lock file stays behind
empty; its content means nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from typing import Any

from filelock import FileLock, Timeout


class LockBusyError(RuntimeError):
    """A lock that another process (or thread) holds."""


_held: dict[tuple[str, int], int] = {}  # (path, thread) -> depth
_files: dict[str, Any] = {}  # path -> the held FileLock
_guard = threading.Lock()


@contextlib.contextmanager
def locked(
    path: str | os.PathLike[str],
    *,
    timeout: float = -1,
    what: str = "the file",
    optional: bool = False,
    error: type[LockBusyError] = LockBusyError,
) -> Iterator[None]:
    """Hold the lock file at ``path``, created when missing.

    ``timeout`` is in seconds: 0 tries once, -1 waits for ever; running out of
    it raises ``error``, which names ``what``. ``optional`` goes on
    without the lock where the file cannot be created (a read-only folder, in
    which nobody writes either).
    """
    key = (os.path.abspath(path), threading.get_ident())
    with _guard:
        nested = key in _held
        if nested:
            _held[key] += 1
    if not nested:
        lock = _acquire(key[0], timeout, what, optional, error)
        if lock is None:
            yield
            return
        with _guard:
            _held[key] = 1
            _files[key[0]] = lock
    try:
        yield
    finally:
        with _guard:
            _held[key] -= 1
            if _held[key] == 0:
                del _held[key]
                _files.pop(key[0]).release()


def _acquire(
    path: str, timeout: float, what: str, optional: bool, busy: type[LockBusyError]
) -> FileLock | None:
    # A lock file is opened for writing, which must not reach through a link.
    if os.path.islink(path):
        raise OSError(errno.ELOOP, "a lock file must not be a symbolic link", path)
    lock = FileLock(path, timeout=timeout, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        raise busy(f"{what} is in use by another process (lock {path})") from None
    except OSError as error:
        if optional and error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            return None
        raise
    return lock


def is_held(path: str | os.PathLike[str]) -> bool:
    """Whether anybody holds the lock now; leaves no file behind."""
    where = os.path.abspath(path)
    if where in _files:
        return True
    if not os.path.exists(where):
        return False
    try:
        import fcntl
    except ImportError:
        return _try(where)
    try:
        descriptor = os.open(where, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return False  # whoever may not open it does not hold it either
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _try(path: str) -> bool:
    try:
        with locked(path, timeout=0, optional=True):
            return False
    except LockBusyError:
        return True


def _forget_in_child() -> None:
    # A forked worker inherits the descriptors; kept open there, they would hold
    # the lock after its owner was killed. Closing them releases nothing here.
    for lock in _files.values():
        descriptor = getattr(getattr(lock, "_context", None), "lock_file_fd", None)
        if isinstance(descriptor, int):
            with contextlib.suppress(OSError):
                os.close(descriptor)
            lock._context.lock_file_fd = None
    _files.clear()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
