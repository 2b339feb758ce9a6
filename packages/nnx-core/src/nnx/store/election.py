"""``runs/best``: the pointer to the best run among those that can be compared with it.

The holder gives way to a better run of the same task, data and metric, and to one
that stands before it (:class:`~nnx.store.standing.Standing`); no other.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from typing import Any

from nnx.store import manifest, standing
from nnx.store.committed import NOTHING, checkpoint_record, committed_epoch
from nnx.store.paths import PointFiles, RunPaths, run_names
from nnx.store.pointer import best_run_id, point_to
from nnx.store.standing import BEST, Standing
from nnx.utils.locks import locked
from nnx.utils.yamlio import read_yaml


def claim(paths: RunPaths, own: Standing | None) -> None:
    """Let a run that just committed a better BEST, of standing ``own``, claim the pointer.

    Costs a few look-ups while the holder stays as it was and stays ahead, or is
    the run itself.
    """
    holder = best_run_id(paths.root)
    if own is None or holder == paths.id:
        return
    if holder is not None:
        held = RunPaths(paths.root, holder)
        if _still_eligible(held) and not own.beats(_seen[os.path.abspath(held.dir)][1]):
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
            point_to(paths.root, elect(paths.root, incumbent=holder))
            return
        held = RunPaths(paths.root, holder)
        held_standing = standing.of_run(held)
        if held_standing is None or not eligible(held, thorough=False):
            point_to(paths.root, elect(paths.root, incumbent=holder))
            return
        own = standing.of_run(paths)
        if own is not None and own.beats(held_standing) and eligible(paths):
            point_to(paths.root, paths.id)


def leave(paths: RunPaths) -> None:
    """Elect another run if this one, about to be removed, holds the pointer."""
    with locked(paths.best_lock):
        if best_run_id(paths.root) == paths.id:
            point_to(paths.root, elect(paths.root, without=paths.id))


def repair(root: str) -> None:
    """Point to the best run there is, or to none."""
    with locked(os.path.join(root, ".best.lock")):
        point_to(root, elect(root, incumbent=best_run_id(root)))


def elect(root: str, *, without: str | None = None, incumbent: str | None = None) -> str | None:
    """The best eligible run of a root.

    Of those that stand first, the runs that can be compared with the incumbent (or with
    the one to be left out), or else those that are the most alike. Ties keep the
    incumbent, then the lexicographically smallest id. What a run is worth comes from
    manifests; only the winner is looked at closely.
    """
    found = standings(root)
    held = found.get(incumbent or without or "")
    found.pop(without or "", None)
    alike = Counter(one.measure for one in found.values())

    def order(name: str) -> tuple[Any, ...]:
        one = found[name]
        among = held is not None and one.measure == held.measure
        groups = (one.rank, not among, -alike[one.measure], str(one))
        return (*groups, one.value, name != incumbent, name)

    for name in sorted(found, key=order):
        if eligible(RunPaths(root, name)):
            return name
    return None


def standings(root: str) -> dict[str, Standing]:
    """What each run's BEST is worth, by id; a run without one is left out."""
    found = ((name, standing.of_run(RunPaths(root, name))) for name in run_names(root))
    return {name: one for name, one in found if one is not None}


def eligible(paths: RunPaths, *, thorough: bool = True) -> bool:
    """Whether a run may own the pointer.

    It is a real directory with a readable ``run.yaml``, a loadable history, and a BEST
    that has a value and is no later than LAST.
    ``thorough`` also opens the BEST checkpoint and reads the history.
    """
    try:
        if not stat.S_ISDIR(os.lstat(paths.dir).st_mode):
            return False
        read_yaml(paths.run_yaml)
        record = checkpoint_record(paths, BEST)
        committed = committed_epoch(paths)
        if record is None or committed == NOTHING or standing.of_run(paths) is None:
            return False
        if committed is not None and int(record["epoch_idx"]) > committed:
            return False
        if thorough:
            from nnx.store.checkpoint import NNCheckpoint
            from nnx.store.history_of import check_history

            check_history(paths)
            located = manifest.locate(PointFiles(paths.checkpoints, BEST))
            return NNCheckpoint.from_file(located.checkpoint) is not None
    except Exception:  # whatever is wrong with a run, it is no candidate
        return False
    return True


# Run directory -> when its files were found eligible, and its standing then.
_seen: dict[str, tuple[tuple[int, ...], Standing]] = {}


def _still_eligible(paths: RunPaths) -> bool:
    """:func:`eligible` of the holder, looked at again only when its files changed."""
    files = PointFiles(paths.checkpoints, BEST)
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
    value = standing.of_run(paths)
    if value is None or not eligible(paths, thorough=False):
        return False
    _seen[where] = (stamps, value)
    return True
