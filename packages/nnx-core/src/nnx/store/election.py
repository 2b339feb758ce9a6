"""``runs/best``: the pointer to the run with the lowest committed error."""

from __future__ import annotations

import contextlib
import math
import os
import stat
from collections.abc import Mapping
from typing import Any

from nnx.records import NNIterationDataPoint
from nnx.store import manifest
from nnx.store.committed import NOTHING, checkpoint_record, committed_epoch
from nnx.store.paths import BEST_POINTER, PointFiles, RunPaths, check_run_id, runs_root
from nnx.store.yamlio import read_yaml
from nnx.utils import files as fs
from nnx.utils.locks import locked

POINTER_FILE = "POINTER.txt"
_BEST = "best"  # the checkpoint tag
_ORDER = (("val_edp", "error"), ("val_edp", "loss"), ("train_edp", "error"), ("train_edp", "loss"))


def score(record: NNIterationDataPoint | Mapping[str, Any]) -> float:
    """How good an epoch is, lower is better: its first finite value.

    In order: validation error, validation loss, training error, training loss
    (of the epoch's last batch). Without any, +inf.
    """
    state = record.state() if isinstance(record, NNIterationDataPoint) else record
    for part, name in _ORDER:
        value = (state.get(part) or {}).get(name)
        if value is not None and math.isfinite(value):
            return float(value)
    return math.inf


def best_run_id(root: str | os.PathLike[str] | None = None) -> str | None:
    """The run that the pointer names, if that run is there."""
    folder = runs_root(root)
    pointer = os.path.join(folder, BEST_POINTER)
    try:
        if os.path.islink(pointer):
            target = os.readlink(pointer)
        elif os.path.isdir(pointer):
            with open(os.path.join(pointer, POINTER_FILE), encoding="utf-8") as stream:
                target = stream.read(4096).strip()
        else:
            return None
        name = check_run_id(os.path.basename(target.replace("\\", "/").rstrip("/")))
    except (OSError, ValueError):
        return None
    where = os.path.join(folder, name)
    if os.path.islink(where) or not os.path.isdir(where):
        return None
    beside = target == name  # the pointer as it is written here: it cannot lead elsewhere
    if not beside and os.path.islink(pointer) and not _same(pointer, where):
        return None
    return name


def _same(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def bettered(paths: RunPaths, own: float) -> None:
    """Let a run that just committed a better BEST, of score ``own``, claim the pointer.

    Costs a few look-ups while the holder stays as it was and stays ahead, or is
    the run itself.
    """
    holder = best_run_id(paths.root)
    if holder == paths.id:
        return
    if holder is not None:
        held = RunPaths(paths.root, holder)
        if _still_eligible(held) and _seen[os.path.abspath(held.dir)][1] <= own:
            return
    consider(paths, improved=True)


def consider(paths: RunPaths, *, improved: bool = False) -> None:
    """Let a run whose BEST is committed claim the pointer if it is the best.

    The run is compared with the one that holds the pointer; all runs are read
    only when that one is no candidate any more. ``improved`` says that a holder
    has bettered itself, so nobody else can have become the best.
    """
    with locked(paths.best_lock):
        holder = best_run_id(paths.root)
        if holder == paths.id and improved:
            return
        if holder is None or holder == paths.id:
            _point(paths.root, elect(paths.root, incumbent=holder))
            return
        held = RunPaths(paths.root, holder)
        held_score = _quick_score(held)
        if held_score is None or not eligible(held, thorough=False):
            _point(paths.root, elect(paths.root, incumbent=holder))
            return
        own = _quick_score(paths)
        if own is not None and own < held_score and eligible(paths):
            _point(paths.root, paths.id)


def leave(paths: RunPaths) -> None:
    """Elect another run if this one, about to be removed, holds the pointer."""
    with locked(paths.best_lock):
        if best_run_id(paths.root) == paths.id:
            _point(paths.root, elect(paths.root, without=paths.id))


def repair(root: str) -> None:
    """Point to the best run there is, or to none."""
    with locked(os.path.join(root, ".best.lock")):
        _point(root, elect(root, incumbent=best_run_id(root)))


def elect(root: str, *, without: str | None = None, incumbent: str | None = None) -> str | None:
    """The best eligible run of a root.

    Ties keep the incumbent, then the lexicographically smallest id. Scores come
    from manifests; only the winner is looked at closely.
    """
    scored = []
    for name in run_names(root):
        if name == without:
            continue
        value = _quick_score(RunPaths(root, name))
        if value is not None:
            scored.append((value, name != incumbent, name))
    for _, _, name in sorted(scored):
        if eligible(RunPaths(root, name)):
            return name
    return None


def run_names(root: str) -> list[str]:
    """The run directories under a root, sorted; links, files and hidden names are none."""
    try:
        with os.scandir(root) as entries:
            return sorted(
                e.name
                for e in entries
                if e.name != BEST_POINTER
                and not e.name.startswith(".")
                and e.is_dir(follow_symlinks=False)
            )
    except (FileNotFoundError, NotADirectoryError):
        return []


def eligible(paths: RunPaths, *, thorough: bool = True) -> bool:
    """Whether a run may own the pointer.

    It is a real directory with a readable ``run.yaml`` that ranks BEST without
    a named monitor, a loadable history, and a BEST no later than LAST.
    ``thorough`` also opens the BEST checkpoint and reads the history.
    """
    try:
        if not stat.S_ISDIR(os.lstat(paths.dir).st_mode):
            return False
        config = read_yaml(paths.run_yaml)
        if any((config.get(part) or {}).get("monitor") for part in ("train", "trainer")):
            return False
        record = checkpoint_record(paths, _BEST)
        committed = committed_epoch(paths)
        if record is None or committed == NOTHING:
            return False
        if committed is not None and int(record["epoch_idx"]) > committed:
            return False
        if thorough:
            from nnx.store.checkpoint import NNCheckpoint
            from nnx.store.history_of import check_history

            check_history(paths)
            located = manifest.locate(PointFiles(paths.checkpoints, _BEST))
            return NNCheckpoint.from_file(located.checkpoint) is not None
    except Exception:  # whatever is wrong with a run, it is no candidate
        return False
    return True


# Run directory -> when its files were found eligible, and its score then.
_seen: dict[str, tuple[tuple[int, ...], float]] = {}


def _still_eligible(paths: RunPaths) -> bool:
    """:func:`eligible` of the holder, looked at again only when its files changed."""
    files = PointFiles(paths.checkpoints, _BEST)
    try:
        stamps = tuple(
            os.stat(path).st_mtime_ns
            for path in (paths.run_yaml, files.checkpoint, files.manifest, paths.checkpoints)
        )
    except OSError:
        return False
    where = os.path.abspath(paths.dir)
    known = _seen.get(where)
    if known is not None and known[0] == stamps:
        return True
    value = _quick_score(paths)
    if value is None or not eligible(paths, thorough=False):
        return False
    _seen[where] = (stamps, value)
    return True


def _quick_score(paths: RunPaths) -> float | None:
    try:
        record = checkpoint_record(paths, _BEST)
        return None if record is None else score(record)
    except Exception:
        return None


def _point(root: str, run_id: str | None) -> None:
    if run_id == best_run_id(root) and run_id is not None:
        return
    pointer = os.path.join(root, BEST_POINTER)
    if run_id is None:
        _remove(pointer)
        return
    temporary = fs.temporary_name(pointer)
    try:
        fs.disk.symlink(run_id, temporary)
    except (OSError, NotImplementedError):
        _point_by_file(pointer, os.path.join(root, run_id))
        return
    try:
        if os.path.isdir(pointer) and not os.path.islink(pointer):
            _remove(pointer)
        fs.disk.replace(temporary, pointer)
    except BaseException:
        fs.remove_quietly(temporary)
        raise


def _point_by_file(pointer: str, target: str) -> None:
    """Where symbolic links cannot be made: a directory that holds the path."""
    if os.path.islink(pointer):
        fs.disk.unlink(pointer)
    if not os.path.isdir(pointer):
        fs.disk.mkdir(pointer)
    with fs.atomic_write(os.path.join(pointer, POINTER_FILE)) as stream:
        stream.write(target.replace(os.sep, "/") + "\n")


def _remove(pointer: str) -> None:
    if os.path.islink(pointer):
        fs.disk.unlink(pointer)
    elif os.path.isdir(pointer):
        with contextlib.suppress(FileNotFoundError):
            fs.disk.unlink(os.path.join(pointer, POINTER_FILE))
        fs.disk.rmdir(pointer)
