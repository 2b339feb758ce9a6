"""A disk whose operations fail one at a time, or end the process: what tests put in its place."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import traceback
from concurrent.futures import Future

from nnx.utils import files, flushing

OPERATIONS = tuple(name for name in vars(files.Disk) if not name.startswith("_"))
INTERRUPT = -1
FAULTS = {
    "full": errno.ENOSPC, "broken": errno.EIO, "forbidden": errno.EACCES,
    "interrupted": INTERRUPT, "killed": 0,
}  # fmt: skip


class FailingDisk(files.Disk):
    """Fails the operation number ``at`` with ``code``, or ends the process there.

    Whether a killed process dies before, inside or after the operation goes by ``at``.
    """

    def __init__(self, at: int = 0, code: int = 0, links: bool = True) -> None:
        self.at, self.code, self.links = at, code, links
        self.done: list[str] = []
        self.error: BaseException | None = None


def _failing(name):
    def real(self, *args, **options):
        if name == "link" and not self.links:
            raise OSError(errno.EPERM, "no hard links here")
        if name not in ("flush", "flush_directory"):  # too slow by the thousand
            return getattr(files.Disk, name)(self, *args, **options)

    def operation(self, *args, **options):
        self.done.append(name)
        if len(self.done) != self.at:
            return real(self, *args, **options)
        part = name == "write" and len(args[1]) > 1
        if part:  # a full disk takes a part
            real(self, args[0], memoryview(args[1]).cast("B")[: len(args[1]) // 2])
        elif name == "close" or (self.code == 0 and self.at % 2):
            with contextlib.suppress(OSError):
                real(self, *args, **options)
        if self.code == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.code == INTERRUPT:  # inside the window that holds a Ctrl-C, the second one
            self.error = KeyboardInterrupt()
        else:
            self.error = OSError(self.code, os.strerror(self.code))
        raise self.error

    return operation


for _name in OPERATIONS:
    setattr(FailingDisk, _name, _failing(_name))


class Inline:
    """Flushes in turn instead of side by side, so that an operation keeps its number."""

    def submit(self, function, *args):
        future = Future()
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)
        return future


def act(action, disk, monkeypatch):
    """Do it on that disk, one operation after another."""
    with monkeypatch.context() as patch:
        patch.setattr(files, "disk", disk)
        patch.setattr(flushing, "_workers", Inline)
        action()


def killed(action, disk, monkeypatch):
    """Do it in a process that the disk kills."""
    child = os.fork()
    if child == 0:
        try:
            act(action, disk, monkeypatch)
            print(f"it got past {disk.at} in {disk.done}", file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
