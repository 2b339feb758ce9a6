"""A name on disk is either the old file or the new file.

Everything here changes the disk through :data:`disk`, one small object, so that
every way in which a disk can fail is tried by replacing it.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from nnx.utils.disk import UNSUPPORTED, Disk, StrPath

# A filesystem that cannot link says one of these; copying is the fallback.
_CANNOT_LINK = UNSUPPORTED | {errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EACCES}
BLOCK = 1 << 18


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
