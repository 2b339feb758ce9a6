"""What waits for the disk, or hashes, while something else goes on."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from nnx.utils import files
from nnx.utils.disk import Disk, StrPath

T = TypeVar("T")
R = TypeVar("R")

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
    digest, block = hashlib.sha256(), memoryview(bytearray(files.BLOCK))
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
        flush = functools.partial(_flush_and_close, files.disk, descriptor)
        if size < files.BLOCK:
            self._kept.append(flush)
        else:
            self._start(flush)

    def add_directory(self, path: StrPath) -> None:
        """Flush the names in a directory as they are now."""
        self._kept.append(functools.partial(files.disk.flush_directory, path))

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
    descriptor = files.disk.create(path)
    try:
        files.disk.write(descriptor, data)
    except BaseException as error:
        files.close_quietly(descriptor)
        files.remove_quietly(path)
        if isinstance(error, OSError):
            files.named(error, path)
        raise
    flushes.add(descriptor, len(data))


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
        self._descriptor = files.disk.create(path)

    def write(self, data: Any) -> int:
        size = len(data)
        if size < files.BLOCK:
            self._small += data
            if len(self._small) >= files.BLOCK:
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
            files.close_quietly(self._descriptor)
            self._descriptor = -1
        files.remove_quietly(self.path)

    def _drain(self) -> None:
        if self._small:
            data, self._small = self._small, bytearray()
            self._put(data, True)

    def _put(self, data: Any, stays: bool) -> None:
        large = len(data) >= files.BLOCK and stays
        if self._queue is None and large:
            self._queue = queue.SimpleQueue()
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        if self._queue is None:
            self._hash.update(data)
        else:
            self._queue.put(data if stays else bytes(data))
        try:
            self.size += files.disk.write(self._descriptor, data)
        except OSError as error:
            raise files.named(error, self.path) from None

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
