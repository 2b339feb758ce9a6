"""Who may write a run: leases, reservations, overwriting and removal.

Lock order, everywhere: lease -> admission -> best, and lease -> run -> best.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator

from nnx.store import election
from nnx.store.errors import RunBusyError, RunExistsError
from nnx.store.paths import MARKER, RunPaths
from nnx.utils import files as fs
from nnx.utils.folders import make_folder, remove_tree, remove_tree_quietly
from nnx.utils.locks import LockBusyError, held_here, is_held, locked

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
    if (paths.exists() or os.path.lexists(paths.replaced)) and not overwrite:
        raise RunExistsError(paths.id, paths.root)
    _ensure_folder_writable(paths.root)


_fits: set[str] = set()  # the leases that fits of this process hold


def is_fitted_here(paths: RunPaths) -> bool:
    """Whether a fit of this process trains the run, whose history is then the fit's."""
    return os.path.abspath(paths.lease) in _fits


@contextlib.contextmanager
def lease(paths: RunPaths, *, again: bool = False) -> Iterator[None]:
    """Be the only one who writes the run; refuse when somebody does.

    A fit holds its run too: what its callbacks call must not change the run under it,
    unless it says so with ``again``.
    """
    make_folder(os.path.dirname(paths.lease))
    nested = held_here(paths.lease)
    with locked(
        paths.lease, timeout=_GLANCE_SECONDS, what=_what(paths), again=again, error=RunBusyError
    ):
        if not nested:
            end_replacement(paths)
        yield


@contextlib.contextmanager
def writable_lease(
    paths: RunPaths, *, overwrite: bool, until_commit: bool = False
) -> Iterator[None]:
    """Hold the lease and a fresh reservation of the run's directory.

    An existing run is refused, or replaced with ``overwrite``: at once, or, for a fit,
    set aside ``until_commit``, to come back at the end unless a point was committed.
    A reservation in which no run file was written is released at the end.
    """
    ensure_writable(paths, overwrite=overwrite)
    with lease(paths):
        with locked(paths.admission, timeout=_ADMISSION_SECONDS, what=f"the folder {paths.root}"):
            ensure_free(paths, overwrite=overwrite, until_commit=until_commit)
            reserved = not os.path.isdir(paths.dir)
            if reserved:
                fs.disk.mkdir(paths.dir)
        try:
            if until_commit:
                _fits.add(os.path.abspath(paths.lease))
            _write_marker(paths)
            yield
        finally:
            _fits.discard(os.path.abspath(paths.lease))
            if os.path.lexists(paths.replaced):
                with contextlib.suppress(OSError, LockBusyError):  # whoever comes next does it
                    end_replacement(paths)
            elif reserved and not paths.exists():
                remove_tree_quietly(paths.dir)
            else:
                release_if_empty(paths)


def ensure_free(paths: RunPaths, *, overwrite: bool, until_commit: bool = False) -> None:
    """Under lease and admission: remove the old run or set it aside, or refuse it."""
    if paths.exists():
        if not overwrite:
            raise FileExistsError(
                f"run {paths.id} already exists in {paths.root}: another process wrote it meanwhile"
            )
        election.leave(paths)
        if until_commit:
            fs.disk.replace(paths.dir, paths.replaced)
            fs.disk.flush_directory(paths.root)
        else:
            discard(paths)


def end_replacement(paths: RunPaths) -> None:
    """Under the lease: a run that was set aside goes once its replacement has committed.

    Before that it comes back, in place of what there is of the other.
    """
    if not os.path.lexists(paths.replaced):
        return
    with locked(paths.admission, timeout=_ADMISSION_SECONDS, what=f"the folder {paths.root}"):
        if paths.has_point():
            _throw_away(paths, paths.replaced)
            return
        if os.path.isdir(paths.dir):
            _throw_away(paths, paths.dir)
        fs.disk.replace(paths.replaced, paths.dir)
        fs.disk.flush_directory(paths.root)
        election.consider(paths)


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
    _throw_away(paths, paths.dir)


def _throw_away(paths: RunPaths, folder: str) -> None:
    trash = os.path.join(paths.root, f"{TRASH}{paths.id[:100]}-{secrets.token_hex(4)}")
    fs.disk.replace(folder, trash)
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
