"""Every committed record of a run, and of the runs it was resumed from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from nnx.records import NNIterationDataPoint, ResumeStatus
from nnx.store import idps_csv
from nnx.store.committed import checkpoint_record, committed_epoch
from nnx.store.errors import ResumePointError, RunReplacedError
from nnx.store.history_of import iterate_committed, iterate_history
from nnx.store.paths import BEST_POINTER, RunPaths, folder_of, settled
from nnx.store.pointer import locate_run
from nnx.utils.caller import warn_caller
from nnx.utils.yamlio import read_yaml


def iter_history(
    run_id: str, root: str | None = None, *, lineage: bool = False
) -> Iterator[NNIterationDataPoint]:
    """The committed records of a run, in order, without holding them all.

    ``lineage`` first yields those of the run it resumed from, up to the epoch
    it resumed at, and so on back: each epoch once. What cannot be known of a
    parent is said with a ``RuntimeWarning``. Raises ``FileNotFoundError`` for an
    unknown run and ``HistoryCorruptionError`` for a damaged history, and
    ``RunReplacedError`` when the run is replaced between two of its records.
    """

    def known(paths: RunPaths) -> None:
        if not os.path.isfile(paths.run_yaml):
            raise FileNotFoundError(f"there is no run {paths.id!r} in {paths.root}")

    settled(lambda: locate_run(run_id, root), known)
    return _of_one_run(run_id, root, lineage)


def _of_one_run(run_id: str, root: str | None, lineage: bool) -> Iterator[NNIterationDataPoint]:
    """All records of the run that is there; never some of one and some of its successor."""
    for is_last in (False, True):
        paths = locate_run(run_id, root)
        before, begun, failure = folder_of(paths), False, None
        try:
            for record in _with_parents(paths) if lineage else iterate_history(paths):
                begun = True
                yield record
        except (OSError, ValueError) as error:
            failure = error
        if folder_of(locate_run(run_id, root)) == before:
            if failure is not None:
                raise failure
            return
        if begun or is_last:
            raise RunReplacedError(
                f"run {paths.id} was replaced while its records were read; read them again"
            ) from failure


def export_history_csv(
    run_id: str,
    path: str | os.PathLike[str],
    root: str | None = None,
    *,
    lineage: bool = False,
) -> int:
    """Write a run's committed history as the flat table of ``NNRun.save``.

    The number of rows. All records are in memory while the table is built;
    stream :func:`iter_history` for a larger history.
    """
    try:
        records = list(iter_history(run_id, root, lineage=lineage))
    except RunReplacedError:
        records = list(iter_history(run_id, root, lineage=lineage))
    return idps_csv.write(os.fspath(path), records)


@dataclass(frozen=True, slots=True)
class _Prefix:
    """A parent's records that come before a child's."""

    parent: RunPaths
    cut: int  # the last epoch to take
    trusted: bool  # whether the parent's LAST can be read


def _with_parents(paths: RunPaths) -> Iterator[NNIterationDataPoint]:
    """Own records after the parents', which are followed iteratively."""
    chain: list[_Prefix] = []
    seen, child = {paths.id}, paths
    while (prefix := _prefix(child)) is not None:
        if prefix.parent.id in seen:
            _warn(f"the lineage of run {paths.id} returns to {prefix.parent.id}; it starts there")
            break
        seen.add(prefix.parent.id)
        chain.append(prefix)
        child = prefix.parent
    # An ancestor may go no further than any of its descendants allows.
    cut: int | None = None
    segments: list[tuple[_Prefix, int]] = []
    for prefix in chain:
        cut = prefix.cut if cut is None else min(cut, prefix.cut)
        segments.append((prefix, cut))
    for prefix, limit in reversed(segments):
        records = (
            iterate_history(prefix.parent)
            if prefix.trusted
            else iterate_committed(prefix.parent, limit)
        )
        for record in records:
            if record.epoch_idx > limit:
                break
            yield record
    yield from iterate_history(paths)


def _prefix(child: RunPaths) -> _Prefix | None:
    status = _resume_status(child)
    if status is None or status.mode == "fresh" or status.source_run_id is None:
        return None
    source = status.source_run_id
    if source == BEST_POINTER:
        _warn(
            f"run {child.id} resumed through runs/best, which may name another run by now; "
            f"its lineage starts at itself"
        )
        return None
    parent = locate_run(source, child.root)
    if not os.path.isfile(parent.run_yaml):
        _warn(f"run {source}, which {child.id} resumed from, is gone; the lineage starts after it")
        return None
    first = next((record.epoch_idx for record in iterate_history(child)), None)
    branch = status.source_epoch
    trusted = True
    try:
        committed_epoch(parent)
        if branch is None:
            record = checkpoint_record(parent, status.source_checkpoint or "last")
            branch = None if record is None else int(record["epoch_idx"])
    except (ResumePointError, OSError, ValueError):
        branch, trusted = None, False
    if branch is not None:
        return _Prefix(parent, branch if first is None else min(branch, first - 1), trusted)
    if first is None:
        _warn(
            f"the epoch at which run {child.id} left {source} is unknown; "
            f"the lineage starts after {source}"
        )
        return None
    _warn(
        f"the epoch at which run {child.id} left {source} is unknown; "
        f"the epochs of {source} before {first} are used"
    )
    return _Prefix(parent, first - 1, trusted)


def _resume_status(paths: RunPaths) -> ResumeStatus | None:
    if not os.path.exists(paths.metadata):
        return None
    try:
        state = read_yaml(paths.metadata).get("resume")
        return None if state is None else ResumeStatus.from_state(state)
    except (ValueError, TypeError, AttributeError) as error:
        _warn(f"{paths.metadata} is ignored: {error}")
        return None


def _warn(message: str) -> None:
    warn_caller(message, RuntimeWarning)
