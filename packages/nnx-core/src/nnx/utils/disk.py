"""Every operation that changes a disk, in one small object.

Replacing :data:`nnx.utils.files.disk` by one that fails tries every way in which
a disk can fail; nothing else in the store changes the disk.
"""

from __future__ import annotations

import errno
import os
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# A filesystem that cannot flush says one of these; anything else is a real failure.
UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.ENOTTY}
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
_FICLONE = 0x40049409  # ioctl: share the blocks of another file (btrfs, XFS, ZFS)

StrPath = str | os.PathLike[str]


class Disk:
    """The operations that change a disk."""

    def create(self, path: StrPath) -> int:
        """A descriptor of a new file; an existing name, or a link, is an error."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _NO_FOLLOW, 0o666)

    def open_append(self, path: StrPath) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | _NO_FOLLOW, 0o666)

    def reopen(self, path: StrPath) -> int:
        """A descriptor of a file that is there, to flush it."""
        return os.open(path, os.O_RDWR | _NO_FOLLOW)

    def write(self, descriptor: int, data: Any) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            done += os.write(descriptor, view[done:])
        return done

    def truncate(self, descriptor: int, size: int) -> None:
        os.ftruncate(descriptor, size)

    def clone(self, source: int, target: int) -> None:
        """Let ``target`` share the blocks of ``source``, where the filesystem can."""
        if fcntl is None:
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
        fcntl.ioctl(target, _FICLONE, source)

    def flush(self, descriptor: int) -> None:
        """Flush to stable storage, as far as the system supports it.

        On macOS only ``F_FULLFSYNC`` reaches the drive. A filesystem that cannot
        flush is accepted; a real input/output error is raised.
        """
        full = getattr(fcntl, "F_FULLFSYNC", None)
        try:
            if full is not None:
                fcntl.fcntl(descriptor, full)
            else:
                os.fsync(descriptor)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise

    def flush_directory(self, path: StrPath) -> None:
        """Flush a directory, so that the renames in it survive a power loss."""
        if os.name == "nt":
            return
        descriptor = os.open(path, os.O_RDONLY)
        try:
            Disk.flush(self, descriptor)
        finally:
            os.close(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def replace(self, source: StrPath, target: StrPath) -> None:
        os.replace(source, target)

    def exchange(self, one: StrPath, other: StrPath) -> None:
        """Swap two names in one step, where the system and the filesystem can."""
        import ctypes

        try:
            rename = ctypes.CDLL(None, use_errno=True).renameat2
        except (OSError, AttributeError, TypeError):
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP)) from None
        if rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def link(self, source: StrPath, target: StrPath) -> None:
        os.link(source, target)

    def symlink(self, target: StrPath, path: StrPath) -> None:
        os.symlink(target, path)

    def unlink(self, path: StrPath) -> None:
        os.unlink(path)

    def mkdir(self, path: StrPath) -> None:
        os.mkdir(path)

    def rmdir(self, path: StrPath) -> None:
        os.rmdir(path)

    def open_lock(self, path: StrPath) -> int:
        """A descriptor of a lock file, created when missing; a link is an error."""
        return os.open(path, os.O_RDWR | os.O_CREAT | _NO_FOLLOW, 0o666)

    def lock(self, descriptor: int, *, shared: bool = False) -> None:
        """Take a lock, exclusive or ``shared``, or raise ``BlockingIOError`` at once."""
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
