"""The committed history of a run, whichever form it has."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from nnx.records import NNIterationDataPoint
from nnx.store import idps_csv
from nnx.store.committed import NOTHING, committed_end
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
    last, end = committed_end(paths)
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
        records = journal.tail(journal.retention, last)
    elif last == NOTHING:
        return []
    elif not os.path.exists(paths.idps_csv):
        return None
    else:
        records = idps_csv.read(paths.idps_csv, last)
    _check_end(paths, records[-1] if records else None, end)
    return records


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
    last, end = committed_end(paths)
    record = None
    for record in iterate_committed(paths, last):
        yield record
    if last != NOTHING and (has_journal(paths) or os.path.exists(paths.idps_csv)):
        _check_end(paths, record, end)


def _check_end(
    paths: RunPaths, record: NNIterationDataPoint | None, end: Mapping[str, Any] | None
) -> None:
    """Refuse a history that ends before the record that LAST committed."""
    if end is None:
        return
    wanted = (int(end["epoch_idx"]), int(end["iter_idx"]))
    if record is not None and (record.epoch_idx, record.iter_idx) >= wanted:
        return
    where = paths.history if has_journal(paths) else paths.idps_csv
    ends = "has no record" if record is None else f"ends at epoch {record.epoch_idx}"
    if record is not None and record.epoch_idx == wanted[0]:
        ends += f", batch {record.batch_idx}"
    raise HistoryCorruptionError(
        f"{where} is cut off: it {ends}, but LAST committed epoch {wanted[0]} up to batch "
        f"{end['batch_idx']}. Restore it from a backup; the checkpoints are not concerned"
    )


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
