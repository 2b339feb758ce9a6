"""The committed history of a run, whichever form it has."""

from __future__ import annotations

import os
from collections.abc import Iterator

from nnx.records import NNIterationDataPoint
from nnx.store import idps_csv
from nnx.store.committed import NOTHING, committed_epoch
from nnx.store.paths import RunPaths


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
    if has_journal(paths):
        from nnx.history.reading import Journal

        if last == NOTHING or not Journal.is_there(paths.history):
            return []
        journal = Journal.open(paths.history)
        return journal.tail(journal.retention, last)
    if last == NOTHING:
        return []
    return idps_csv.read(paths.idps_csv, last) if os.path.exists(paths.idps_csv) else None


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
