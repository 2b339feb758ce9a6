"""Who may write a run: leases, reservations, overwriting and removal.

Lock order, everywhere: lease -> admission -> best, and lease -> run -> best.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator

from nnx.store import election
from nnx.store.errors import RunBusyError
from nnx.store.paths import MARKER, RunPaths
from nnx.utils import files as fs
from nnx.utils.folders import make_folder, remove_tree, remove_tree_quietly
from nnx.utils.locks import is_held, locked

TRASH = ".trash-"
_QUIET = {MARKER, ".run.lock"}  # what a reservation holds before the first run file
_ADMISSION_SECONDS = 120.0
_GLANCE_SECONDS = 0.2  # who looks whether a run is being trained holds its lease for an instant


def ensure_writable(paths: RunPaths, *, overwrite: bool) -> None:
    """Refuse a run that exists, is being trained, or cannot be written; touch nothing."""
    if os.path.islink(paths.dir) or (os.path.lexists(paths.dir) and not os.path.isdir(paths.dir)):
        raise FileExistsError(f"{paths.dir} is in the way: it is not a run directory")
    if is_held(paths.lease):
        raise RunBusyError(_busy(paths))
    if paths.exists() and not overwrite:
        raise FileExistsError(
            f"run {paths.id} already exists in {paths.root}. Give the new one a salt= or a "
            f"data_id, or replace the old one with overwrite_existing=True."
        )
    _ensure_folder_writable(paths.root)


@contextlib.contextmanager
def lease(paths: RunPaths) -> Iterator[None]:
    """Be the only process that writes the run; refuse when one does."""
    make_folder(os.path.dirname(paths.lease))
    with locked(paths.lease, timeout=_GLANCE_SECONDS, what=_what(paths), error=RunBusyError):
        yield


@contextlib.contextmanager
def writable_lease(paths: RunPaths, *, overwrite: bool) -> Iterator[None]:
    """Hold the lease and a fresh reservation of the run's directory.

    An existing run is refused, or replaced with ``overwrite``. A reservation in
    which no run file was written is released at the end.
    """
    ensure_writable(paths, overwrite=overwrite)
    with lease(paths):
        with locked(paths.admission, timeout=_ADMISSION_SECONDS, what=f"the folder {paths.root}"):
            ensure_free(paths, overwrite=overwrite)
            reserved = not os.path.isdir(paths.dir)
            if reserved:
                fs.disk.mkdir(paths.dir)
        try:
            _write_marker(paths)
            yield
        finally:
            if reserved and not paths.exists():
                remove_tree_quietly(paths.dir)
            else:
                release_if_empty(paths)


def ensure_free(paths: RunPaths, *, overwrite: bool) -> None:
    """Under lease and admission: remove the old run, or refuse it."""
    if paths.exists():
        if not overwrite:
            raise FileExistsError(
                f"run {paths.id} already exists in {paths.root}: another process wrote it meanwhile"
            )
        election.leave(paths)
        discard(paths)


def remove(paths: RunPaths) -> None:
    """Delete a run that nobody trains; ``runs/best`` moves on first."""
    if os.path.islink(paths.dir) or not os.path.isdir(paths.dir):
        raise FileNotFoundError(f"there is no run {paths.id!r} in {paths.root}")
    with (
        lease(paths),
        locked(paths.admission, timeout=_ADMISSION_SECONDS, what=f"the folder {paths.root}"),
    ):
        election.leave(paths)
        discard(paths)


def discard(paths: RunPaths) -> None:
    """Take a run out of sight in one step, then delete it."""
    trash = os.path.join(paths.root, f"{TRASH}{paths.id[:100]}-{secrets.token_hex(4)}")
    fs.disk.replace(paths.dir, trash)
    remove_tree(trash)


def release_if_empty(paths: RunPaths) -> None:
    """Give up a reservation that holds no run file."""
    with contextlib.suppress(OSError):
        names = set(os.listdir(paths.dir))
        if names <= _QUIET:
            for name in names:
                fs.disk.unlink(os.path.join(paths.dir, name))
            fs.disk.rmdir(paths.dir)


def _write_marker(paths: RunPaths) -> None:
    if not os.path.exists(paths.marker):
        with fs.atomic_write(paths.marker, durable=False) as stream:
            stream.write("An epoch of this run is committed once checkpoints/last.pt holds it.\n")


def _ensure_folder_writable(folder: str) -> None:
    where = os.path.abspath(folder)
    while not os.path.lexists(where):
        where = os.path.dirname(where)
    if not os.path.isdir(where):
        raise NotADirectoryError(f"{where} is not a directory, so no run can be kept in {folder}")
    if not os.access(where, os.W_OK | os.X_OK):
        raise PermissionError(f"{where} is not writable, so no run can be kept in {folder}")


def _what(paths: RunPaths) -> str:
    return f"run {paths.id} in {paths.root}"


def _busy(paths: RunPaths) -> str:
    return f"{_what(paths)} is being trained by another process (lock {paths.lease})"
