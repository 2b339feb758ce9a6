"""A name on disk is either the old file or the new file.

Everything here changes the disk through :data:`disk`, one small object, so that
every way in which a disk can fail is tried by replacing it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import io
import os
import queue
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

from nnx.utils.disk import UNSUPPORTED, Disk, StrPath

# A filesystem that cannot link says one of these; copying is the fallback.
_CANNOT_LINK = UNSUPPORTED | {errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EACCES}
BLOCK = 1 << 18

T = TypeVar("T")
R = TypeVar("R")


disk = Disk()


def temporary_name(path: StrPath) -> str:
    """A fresh name beside ``path``: ``.<name>.<random>``, as leftovers are known by."""
    folder, name = os.path.split(os.fspath(path))
    return os.path.join(folder, f".{name}.{secrets.token_hex(6)}")


def is_temporary_name(name: str) -> bool:
    """Whether a file name is one of :func:`temporary_name`."""
    stem, _, token = name.rpartition(".")
    return (
        len(stem) > 1
        and stem.startswith(".")
        and len(token) == 12
        and all(c in "0123456789abcdef" for c in token)
    )


def remove_quietly(path: StrPath) -> None:
    """Remove a file if that can be done."""
    with contextlib.suppress(OSError):
        disk.unlink(path)


def named(error: OSError, path: StrPath) -> OSError:
    """An error of the disk that says which file it is about: ``path``, as the caller knows it."""
    if error.errno is not None:
        error.filename = os.fspath(path)
    return error


def close_quietly(descriptor: int) -> None:
    """Close a descriptor while another error is on its way."""
    with contextlib.suppress(OSError):
        disk.close(descriptor)


@contextlib.contextmanager
def closing(descriptor: int) -> Iterator[int]:
    """Close a descriptor at the end; a failure to close never masks an earlier one."""
    try:
        yield descriptor
    except BaseException:
        close_quietly(descriptor)
        raise
    disk.close(descriptor)


class _DiskFile(io.RawIOBase):
    """A raw stream over a descriptor, writing through :data:`disk`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return disk.write(self._descriptor, data)

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return os.lseek(self._descriptor, offset, whence)

    def tell(self) -> int:
        return os.lseek(self._descriptor, 0, os.SEEK_CUR)

    def close(self) -> None:
        if not self.closed:
            try:
                super().close()
            finally:
                disk.close(self._descriptor)


@contextlib.contextmanager
def atomic_write(
    path: StrPath, mode: str = "w", *, durable: bool = True, strict: bool = False
) -> Iterator[IO[Any]]:
    """Open a temporary file beside ``path`` and rename it into place on success.

    A symbolic link at ``path`` is followed. On any error the temporary file is
    removed and the first error is raised; ``path`` then still holds what it
    held. ``durable`` flushes the file and its directory; only ``strict`` makes
    a failed flush an error.
    """
    target = Path(path).resolve()
    temporary = temporary_name(target)
    try:
        raw = _DiskFile(disk.create(temporary))
    except OSError as error:
        raise named(error, target if target.parent.is_dir() else target.parent) from None
    try:
        try:
            stream: Any = io.BufferedWriter(raw, BLOCK)
            if "b" not in mode:
                stream = io.TextIOWrapper(stream, encoding="utf-8", newline="")
            yield stream
            stream.flush()
            if durable:
                _flush(lambda: disk.flush(raw.fileno()), strict)
            stream.close()
        finally:
            with contextlib.suppress(OSError, ValueError):
                raw.close()
        disk.replace(temporary, target)
    except BaseException as error:
        remove_quietly(temporary)
        if isinstance(error, OSError) and error.filename in (None, temporary):
            named(error, target)
        raise
    if durable:
        _flush(lambda: disk.flush_directory(target.parent), strict)


def _flush(flush: Any, strict: bool) -> None:
    try:
        flush()
    except OSError:
        if strict:
            raise


_pool: Any = None


def _workers() -> Any:
    """The threads that wait for the disk; a forked child makes its own."""
    global _pool
    if _pool is None:
        from concurrent.futures import ThreadPoolExecutor

        _pool = ThreadPoolExecutor(8, thread_name_prefix="nnx-flush")
    return _pool


def _forget_workers() -> None:
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_workers)


def side_by_side(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """``function`` of each item, in threads; the first error in the items' order is raised.

    For what waits for the disk or hashes, which other threads do not wait for. All
    of them have ended when this returns or raises.
    """
    given = list(items)
    running: list[Any] = []
    with contextlib.suppress(RuntimeError):  # the interpreter is shutting down: no more threads
        running.extend(_workers().submit(function, item) for item in given[1:])
    results = [_outcome(functools.partial(function, item)) for item in given[:1]]
    results += [_outcome(task.result) for task in running]
    results += [_outcome(functools.partial(function, item)) for item in given[len(results) :]]
    for result in results:
        if isinstance(result, _Raised):
            raise result.error
    return results


class _Raised:
    def __init__(self, error: BaseException) -> None:
        self.error = error


def _outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except BaseException as error:
        return _Raised(error)


def sha256_of(path: StrPath) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest, block = hashlib.sha256(), memoryview(bytearray(BLOCK))
    with open(path, "rb", buffering=0) as stream:
        while count := stream.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()


class Flushes:
    """Files flushed side by side, since each flush only waits for the disk.

    :meth:`add` takes a descriptor over: it is flushed in the background and
    closed. :meth:`wait` returns when all of them are on stable storage, and
    raises the first failure. Small files are kept until then and flushed at the
    same moment: a journaling filesystem then commits them together, and with
    them the names in their folder (:meth:`add_directory`).
    """

    def __init__(self) -> None:
        self._running: list[Any] = []
        self._kept: list[Callable[[], None]] = []

    def add(self, descriptor: int, size: int = 0) -> None:
        flush = functools.partial(_flush_and_close, disk, descriptor)
        if size < BLOCK:
            self._kept.append(flush)
        else:
            self._start(flush)

    def add_directory(self, path: StrPath) -> None:
        """Flush the names in a directory as they are now."""
        self._kept.append(functools.partial(disk.flush_directory, path))

    def wait(self) -> None:
        while len(self._kept) > 1:
            self._start(self._kept.pop(0))
        running, self._running, kept, self._kept = self._running, [], self._kept, []
        outcomes = [_outcome(flush) for flush in kept]  # the last one here, meanwhile
        outcomes += [_outcome(flush.result) for flush in running]
        for outcome in outcomes:
            if isinstance(outcome, _Raised):
                raise outcome.error

    def settle(self) -> None:
        """Wait without asking how it went, before files are given up."""
        with contextlib.suppress(BaseException):
            self.wait()

    def _start(self, flush: Callable[[], None]) -> None:
        try:
            self._running.append(_workers().submit(flush))
        except RuntimeError:  # the interpreter is shutting down: no more threads
            flush()


def _flush_and_close(disk: Disk, descriptor: int) -> None:
    try:
        disk.flush(descriptor)
    finally:
        disk.close(descriptor)


def write_new(path: StrPath, data: bytes, flushes: Flushes) -> None:
    """Write a new file and have it flushed; none is left behind on an error."""
    descriptor = disk.create(path)
    try:
        disk.write(descriptor, data)
    except BaseException as error:
        close_quietly(descriptor)
        remove_quietly(path)
        if isinstance(error, OSError):
            named(error, path)
        raise
    flushes.add(descriptor, len(data))


def share_file(source: StrPath, target: StrPath) -> None:
    """Make a new name ``target`` for what ``source`` holds, stored once if possible.

    A hard link where the filesystem has them, else a reflink, else a copy.
    Files shared this way are only ever replaced, never changed in place.
    """
    try:
        disk.link(source, target)
        return
    except NotImplementedError:
        pass
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
    with open(source, "rb") as stream:
        copy = disk.create(target)
        try:
            with closing(copy):
                if not _reflink(stream.fileno(), copy):
                    while block := stream.read(1 << 22):
                        disk.write(copy, block)
                disk.flush(copy)
        except BaseException:
            remove_quietly(target)
            raise


def _reflink(source: int, target: int) -> bool:
    try:
        disk.clone(source, target)
    except OSError:
        return False
    return True


class HashingFile:
    """A new file whose SHA-256 is computed while it is written.

    ``alive`` lists memory ranges ``(start, end)`` that stay unchanged until
    :meth:`finish`. A large block inside one of them is hashed on a helper
    thread while the writer goes on; every other block is hashed at once.
    """

    def __init__(self, path: StrPath, alive: Sequence[tuple[int, int]] = ()) -> None:
        self.path = os.fspath(path)
        self.size = 0
        self._alive = alive
        self._small = bytearray()
        self._hash = hashlib.sha256()
        self._queue: queue.SimpleQueue[Any] | None = None
        self._thread: threading.Thread | None = None
        self._descriptor = disk.create(path)

    def write(self, data: Any) -> int:
        size = len(data)
        if size < BLOCK:
            self._small += data
            if len(self._small) >= BLOCK:
                self._drain()
        else:
            self._drain()
            self._put(data, self._stays(data))
        return size

    def flush(self) -> None:
        """Nothing: the file is flushed once, by :meth:`finish`."""

    def finish(self, flushes: Flushes) -> str:
        """Hand the file over to be flushed and closed; its digest in hexadecimal."""
        self._drain()
        descriptor, self._descriptor = self._descriptor, -1
        flushes.add(descriptor, self.size)
        self._stop()
        return self._hash.hexdigest()

    def abandon(self) -> None:
        """Close and remove the file, whatever was written so far."""
        self._stop()
        if self._descriptor >= 0:
            close_quietly(self._descriptor)
            self._descriptor = -1
        remove_quietly(self.path)

    def _drain(self) -> None:
        if self._small:
            data, self._small = self._small, bytearray()
            self._put(data, True)

    def _put(self, data: Any, stays: bool) -> None:
        large = len(data) >= BLOCK and stays
        if self._queue is None and large:
            self._queue = queue.SimpleQueue()
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        if self._queue is None:
            self._hash.update(data)
        else:
            self._queue.put(data if stays else bytes(data))
        try:
            self.size += disk.write(self._descriptor, data)
        except OSError as error:
            raise named(error, self.path) from None

    def _run(self) -> None:
        assert self._queue is not None
        while (data := self._queue.get()) is not None:
            self._hash.update(data)

    def _stop(self) -> None:
        if self._queue is not None and self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._queue = self._thread = None

    def _stays(self, data: Any) -> bool:
        if not self._alive:
            return False
        import numpy as np

        start = np.frombuffer(data, dtype=np.uint8).__array_interface__["data"][0]
        end = start + len(data)
        return any(low <= start and end <= high for low, high in self._alive)
