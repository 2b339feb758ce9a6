"""The committed history of a run, whichever form it has."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from nnx.records import NNIterationDataPoint
from nnx.store import idps_csv
from nnx.store.committed import NOTHING, committed_epoch
from nnx.store.errors import HistoryCorruptionError
from nnx.store.paths import RunPaths
from nnx.utils.caller import warn_caller


def has_journal(paths: RunPaths) -> bool:
    """Whether the history is a journal.

    A journal without its manifest beside a table is an unfinished migration:
    the table still counts.
    """
    if os.path.isfile(os.path.join(paths.history, "journal.json")):
        return True
    return os.path.isdir(paths.history) and not os.path.exists(paths.idps_csv)


def read_history(paths: RunPaths) -> list[NNIterationDataPoint] | None:
    """The records that ``NNRun.load`` shows: all of a table, the tail of a journal.

    ``None`` when no history was ever written.
    """
    last = committed_epoch(paths)
    if last == NOTHING and lost_last(paths):
        warn_caller(
            f"{paths.dir} has no checkpoints/last.pt, which says how far its history counts; "
            f"nothing of it is shown. It holds more than one epoch, so there was one: restore it, "
            f"or remove {paths.marker} to see every recorded row",
            RuntimeWarning,
        )
    if has_journal(paths):
        from nnx.history.reading import Journal

        if last == NOTHING or not Journal.is_there(paths.history):
            return []
        journal = Journal.open(paths.history)
        return journal.tail(journal.retention, last)
    if last == NOTHING:
        return []
    return idps_csv.read(paths.idps_csv, last) if os.path.exists(paths.idps_csv) else None


def lost_last(paths: RunPaths) -> bool:
    """Whether a history without LAST had one: the first epoch commits it, a second follows."""
    if has_journal(paths):
        from nnx.history.reading import Journal

        return (
            Journal.is_there(paths.history) and Journal.open(paths.history).manifest["epochs"] > 1
        )
    epochs: set[int] = set()
    with contextlib.suppress(HistoryCorruptionError, OSError):  # the last row may be torn
        for record in idps_csv.iterate(paths.idps_csv):
            epochs.add(record.epoch_idx)
            if len(epochs) > 1:
                return True
    return False


def check_history(paths: RunPaths) -> None:
    """Raise unless the history can be loaded; of a journal, only the index is read."""
    if has_journal(paths):
        from nnx.history.reading import Journal

        if Journal.is_there(paths.history):
            assert Journal.open(paths.history).chunks is not None
    else:
        read_history(paths)


def iterate_history(paths: RunPaths) -> Iterator[NNIterationDataPoint]:
    """Every committed record, a chunk or a row at a time."""
    return iterate_committed(paths, committed_epoch(paths))


def iterate_committed(paths: RunPaths, last: int | None) -> Iterator[NNIterationDataPoint]:
    """The records up to and with epoch ``last``; all of them for ``None``."""
    if last == NOTHING:
        return
    if has_journal(paths):
        from nnx.history.reading import Journal

        if Journal.is_there(paths.history):
            yield from Journal.open(paths.history).iterate(last)
    elif os.path.exists(paths.idps_csv):
        yield from idps_csv.iterate(paths.idps_csv, last)
