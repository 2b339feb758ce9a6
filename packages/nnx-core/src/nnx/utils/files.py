"""A name on disk is either the old file or the new file."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

# A filesystem that cannot flush says one of these; anything else is a real failure.
_UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.ENOTTY}


def flush_to_disk(descriptor: int) -> None:
    """Flush one descriptor to stable storage, as far as the system supports it."""
    try:
        try:
            import fcntl

            full = getattr(fcntl, "F_FULLFSYNC", None)
        except ImportError:
            full = None
        if full is not None:
            fcntl.fcntl(descriptor, full)
        else:
            os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise


def flush_directory(path: str | os.PathLike[str]) -> None:
    """Flush a directory, so that the renames in it survive a power loss."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        flush_to_disk(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def atomic_write(
    path: str | os.PathLike[str], mode: str = "w", *, durable: bool = True
) -> Iterator[IO[Any]]:
    """Open a temporary file beside ``path`` and rename it into place on success.

    On any error the temporary file is removed and the first error is raised;
    ``path`` then still holds what it held. ``durable`` flushes the file and its
    directory.
    """
    target = Path(path).resolve()
    descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        kwargs: dict[str, Any] = {} if "b" in mode else {"encoding": "utf-8", "newline": ""}
        with os.fdopen(descriptor, mode, **kwargs) as stream:
            yield stream
            stream.flush()
            if durable:
                flush_to_disk(stream.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if durable:
        flush_directory(target.parent)


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
