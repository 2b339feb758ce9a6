"""What killed processes left behind, and its removal."""

from __future__ import annotations

import contextlib
import csv
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nnx.store import election, idps_csv, lease, manifest, shards
from nnx.store.commit import drop_old_sidecars, is_complete, remove_point, settle
from nnx.store.committed import NOTHING, committed_epoch
from nnx.store.errors import HistoryCorruptionError, ResumePointError, RunBusyError
from nnx.store.history_of import has_journal, lost_last
from nnx.store.paths import (
    BEST_POINTER,
    MARKER,
    REPLACED,
    STEP,
    PointFiles,
    RunPaths,
    run_names,
    runs_root,
)
from nnx.store.pointer import best_run_id
from nnx.store.points import step_is_newer, written_tags
from nnx.utils import files as fs
from nnx.utils.folders import remove_tree
from nnx.utils.locks import is_held, locked


@dataclass(frozen=True, slots=True)
class Leftover:
    """One thing nobody needs any more (or that waits to be completed), and why."""

    path: str
    reason: str
    clean: Callable[[], object]
    verb: str = "remove"  # or "complete", "restore", "update"


def collect(root: str | None = None, *, dry_run: bool = False) -> list[Leftover]:
    """Remove every leftover under a runs folder; what was (or would be) removed.

    A run that is being trained is passed over. Committed epochs are never
    touched: a point whose writer died between two renames is completed. A dry
    run writes nothing, not even a lock file.
    """
    folder = runs_root(root)
    if not os.path.isdir(folder):
        return []
    done = list(_root_leftovers(folder))
    if done and not dry_run:
        # Under these locks nobody else is moving the pointer or removing a run.
        with (
            locked(os.path.join(folder, ".admission.lock")),
            locked(os.path.join(folder, ".best.lock")),
        ):
            done = _cleaned(_root_leftovers(folder))
    for name in sorted(os.listdir(folder)):
        if name.startswith(REPLACED):
            done += _end_replacement(RunPaths(folder, name.removeprefix(REPLACED)), dry_run)
    for name in run_names(folder):
        done += _collect_run(RunPaths(folder, name), dry_run)
    holder = best_run_id(folder)
    if election.elect(folder, incumbent=holder) != holder or _dangles(folder, holder):
        pointer = os.path.join(folder, BEST_POINTER)
        reason = "points to no run" if holder is None else "does not point to the best run"
        done.append(Leftover(pointer, reason, lambda: None, "update"))
        if not dry_run:
            election.repair(folder)
    return done


def _dangles(folder: str, holder: str | None) -> bool:
    return holder is None and os.path.lexists(os.path.join(folder, BEST_POINTER))


def _end_replacement(paths: RunPaths, dry_run: bool) -> list[Leftover]:
    """A run that a killed process was replacing comes back, or goes if it was replaced."""
    if is_held(paths.lease):
        return []
    reason, verb = "a run that was replaced", "remove"
    if not paths.has_point():
        reason, verb = "a run whose replacement never committed anything", "restore"
    if not dry_run:
        with contextlib.suppress(RunBusyError), lease.lease(paths):
            pass  # whoever holds a run has seen to this
    return [Leftover(paths.replaced, reason, lambda: None, verb)]


def _collect_run(paths: RunPaths, dry_run: bool) -> list[Leftover]:
    if is_held(paths.lease):
        return []
    try:
        found = list(_run_leftovers(paths))
        if dry_run or not found:
            return found
        with lease.lease(paths):
            return _cleaned(_run_leftovers(paths))
    except (RunBusyError, FileNotFoundError):
        return []  # somebody trains it, or removed it, since


def _cleaned(leftovers: Iterator[Leftover]) -> list[Leftover]:
    done = []
    for leftover in leftovers:
        leftover.clean()
        done.append(leftover)
    return done


def _root_leftovers(folder: str) -> Iterator[Leftover]:
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        path = os.path.join(folder, name)
        if name.startswith(lease.TRASH):
            yield Leftover(path, "a run whose removal was interrupted", _remover(path))
        elif fs.is_temporary_name(name):
            yield Leftover(path, "a file that was never finished", _remover(path))


def _run_leftovers(paths: RunPaths) -> Iterator[Leftover]:
    if not paths.exists():
        if _is_reservation(paths):
            yield Leftover(paths.dir, "a reservation without a run", _remover(paths.dir))
        return
    for folder in (paths.dir, paths.history):
        for path in _temporaries(folder):
            yield Leftover(path, "a file that was never finished", _remover(path))
    for path in _temporaries(paths.checkpoints):
        # A checkpoint may be saved without the run's lease, under its tag's lock.
        tag = os.path.basename(path)[1:].split(".pt")[0]
        clean = _locked_remover(PointFiles(paths.checkpoints, tag), path, orphan=False)
        yield Leftover(path, "a file that was never finished", clean)
    yield from _point_leftovers(paths)
    yield from _history_leftovers(paths)


def _is_reservation(paths: RunPaths) -> bool:
    """Whether a directory without a run file is ours: it has the marker, or nothing else's."""
    if os.path.islink(paths.dir):
        return False
    names = os.listdir(paths.dir)
    return MARKER in names or all(n == ".run.lock" or fs.is_temporary_name(n) for n in names)


def _temporaries(folder: str) -> list[str]:
    if os.path.islink(folder) or not os.path.isdir(folder):
        return []
    names = sorted(name for name in os.listdir(folder) if fs.is_temporary_name(name))
    return [os.path.join(folder, name) for name in names]


def _point_leftovers(paths: RunPaths) -> Iterator[Leftover]:
    if not os.path.isdir(paths.checkpoints):
        return
    names = os.listdir(paths.checkpoints)
    staged = {n.split(".pt.")[0] for n in names if n.endswith(".staged") and ".pt." in n}
    for tag in sorted(staged):
        files = PointFiles(paths.checkpoints, tag)
        verb = "complete" if is_complete(files) else "remove"
        yield Leftover(files.staged, "a point whose writer died", _under_lock(files, settle), verb)
    states = {n.split(".pt.opt.")[0] for n in names if ".pt.opt." in n}
    states |= {n.removesuffix(".dcp") for n in names if n.endswith(".dcp")}
    for tag in sorted(states | set(written_tags(paths))):
        files = PointFiles(paths.checkpoints, tag)
        for path in _orphans(files):
            clean = _locked_remover(files, path, orphan=True)
            yield Leftover(path, "training state of no checkpoint", clean)
        if os.path.isdir(files.shards_folder) and not os.listdir(files.shards_folder):
            yield Leftover(
                files.shards_folder, "tensors of no checkpoint", _remover(files.shards_folder)
            )
    with contextlib.suppress(ResumePointError):
        step = PointFiles(paths.checkpoints, STEP)
        if os.path.exists(step.checkpoint) and not step_is_newer(paths):
            yield Leftover(
                step.checkpoint, "a point inside an epoch that is committed", _point_remover(step)
            )


def _orphans(files: PointFiles) -> list[str]:
    """Sidecars and sharded tensors that neither the live nor the staged manifest names."""
    try:
        known = [manifest.read(p) for p in (files.manifest, files.staged_manifest)]
    except ResumePointError:
        return []
    named = {name for document in known if document is not None for name in document["files"]}
    if not named and os.path.exists(files.checkpoint):
        return []  # written before manifests
    documents = [document for document in known if document is not None]
    return [path for path in files.sidecars() if os.path.basename(path) not in named] + [
        path
        for path in files.shard_generations()
        if not any(files.names_shards(document, path) for document in documents)
    ]


def _history_leftovers(paths: RunPaths) -> Iterator[Leftover]:
    try:
        last = committed_epoch(paths)
    except (ResumePointError, OSError):
        return
    if os.path.isdir(paths.history) and not os.path.islink(paths.history):
        yield from _journal_leftovers(paths)
    if last is not None and not has_journal(paths) and os.path.exists(paths.idps_csv):
        with contextlib.suppress(HistoryCorruptionError, OSError, UnicodeDecodeError):
            records = [] if last == NOTHING else idps_csv.read(paths.idps_csv, last)
            with open(paths.idps_csv, encoding="utf-8", newline="") as stream:
                rows = sum(1 for row in csv.reader(stream) if row) - 1
            if rows > len(records) and (records or not lost_last(paths)):
                yield Leftover(
                    paths.idps_csv,
                    "rows of an epoch that was never committed",
                    lambda: idps_csv.write(paths.idps_csv, records),
                )


def _journal_leftovers(paths: RunPaths) -> Iterator[Leftover]:
    from nnx.history.journal import chunk_name
    from nnx.history.reading import Journal

    if not Journal.is_there(paths.history):
        return
    with contextlib.suppress(HistoryCorruptionError):
        count = Journal.open(paths.history).manifest["chunks"]
        number = count
        while os.path.exists(path := os.path.join(paths.history, chunk_name(number))):
            yield Leftover(path, "records of an epoch that was never committed", _remover(path))
            number += 1


def _under_lock(files: PointFiles, act: Callable[[PointFiles], object]) -> Callable[[], None]:
    def clean() -> None:
        with locked(files.lock, timeout=120):
            act(files)
            drop_old_sidecars(files)

    return clean


def _locked_remover(files: PointFiles, path: str, *, orphan: bool) -> Callable[[], None]:
    """Remove a file of a tag under its lock, if an ``orphan`` still is one then."""

    def clean() -> None:
        with locked(files.lock, timeout=120):
            if not orphan or path in _orphans(files):
                if os.path.dirname(path) == files.shards_folder:
                    shards.remove(path)
                else:
                    fs.remove_quietly(path)

    return clean


def _point_remover(files: PointFiles) -> Callable[[], None]:
    def clean() -> None:
        with locked(files.lock, timeout=120):
            remove_point(files)

    return clean


def _remover(path: str) -> Callable[[], None]:
    def clean() -> None:
        if os.path.isdir(path) and not os.path.islink(path):
            remove_tree(path)
        else:
            with contextlib.suppress(FileNotFoundError):
                fs.disk.unlink(path)

    return clean
