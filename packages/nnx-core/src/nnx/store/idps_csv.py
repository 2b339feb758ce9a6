"""``idps.csv``: a run's records as a flat table, appended epoch by epoch.

The columns are the paths of :meth:`NNIterationDataPoint.state`, in the order of
their first appearance, after a running index without a name. An empty cell is
``None`` or absent; floats are written so that they read back exactly.
"""

from __future__ import annotations

import csv
import functools
import io
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from nnx.records import NNIterationDataPoint
from nnx.store.errors import HistoryCorruptionError
from nnx.utils import files as fs
from nnx.utils.flat_rows import Place, place, put
from nnx.utils.flushing import Flushes


def flatten(record: NNIterationDataPoint) -> dict[str, Any]:
    """One row: the plain fields first, then each nested record's."""
    state = record.state()
    row = {key: value for key, value in state.items() if not isinstance(value, dict)}
    for key, value in state.items():
        if isinstance(value, dict):
            _descend(key, value, row)
    return row


def _descend(prefix: str, nested: Mapping[str, Any], row: dict[str, Any]) -> None:
    for key, value in nested.items():
        path = _path(prefix, key)
        if isinstance(value, dict):
            _descend(path, value, row)
        else:
            row[path] = value


@functools.lru_cache(1024)  # every record has the same few
def _path(prefix: str, key: str) -> str:
    return f"{prefix}.{key}"


class CsvHistory:
    """The appended table of one run.

    ``append`` writes an epoch's rows; ``rollback`` takes the last
    append back. Only an epoch that brings a column never seen before rewrites
    the file.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._columns: list[str] = []
        self._rows = 0
        self._size = 0
        self._before: tuple[int, int] | None = None  # (bytes, rows) before the last append

    def append(self, records: Sequence[NNIterationDataPoint], flushes: Flushes) -> None:
        """Write the rows of ``records`` and have them flushed."""
        self._before = (self._size, self._rows)
        if not records:
            return
        rows = [flatten(record) for record in records]
        known = set(self._columns)
        fresh = [c for c in dict.fromkeys(itertools.chain.from_iterable(rows)) if c not in known]
        if fresh:
            self._widen(fresh)
            self._before = (self._size, self._rows)
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(
            [number, *map(row.get, self._columns)] for number, row in enumerate(rows, self._rows)
        )
        data = text.getvalue().encode()
        descriptor = fs.disk.open_append(self.path)
        try:
            # A writer that died, or a failed append, may have left more than we committed.
            if os.fstat(descriptor).st_size != self._size:
                fs.disk.truncate(descriptor, self._size)
            fs.disk.write(descriptor, data)
        except BaseException:
            fs.close_quietly(descriptor)
            raise
        flushes.add(descriptor)
        self._size += len(data)
        self._rows += len(rows)

    def rollback(self) -> None:
        """Forget the rows of the last append."""
        if self._before is None:
            return
        self._size, self._rows = self._before
        self._before = None
        if os.path.exists(self.path):
            with fs.closing(fs.disk.open_append(self.path)) as descriptor:
                fs.disk.truncate(descriptor, self._size)

    def _widen(self, fresh: list[str]) -> None:
        columns = [*self._columns, *fresh]
        # The append that follows flushes this very file, and fails if that fails.
        with fs.atomic_write(self.path, "wb") as stream:
            stream.write(_line(["", *columns]))
            if self._rows:
                with open(self.path, encoding="utf-8", newline="") as old:
                    reader = csv.reader(old)
                    next(reader)
                    for row, _ in zip(reader, range(self._rows)):
                        stream.write(_line([*row, *[""] * len(fresh)]))
            size = stream.tell()
        self._columns, self._size = columns, size


class TableWriter:
    """Every record in memory, each epoch's rows appended to ``idps.csv``."""

    def __init__(self, path: str) -> None:
        self.view: list[NNIterationDataPoint] = []
        self._table = CsvHistory(path)
        self._written = 0
        self._before = 0

    def add(self, record: NNIterationDataPoint) -> None:
        self.view.append(record)

    def replace_last(self, record: NNIterationDataPoint) -> None:
        self.view[-1] = record

    def discard(self) -> None:
        del self.view[self._written :]

    def abandon(self) -> None:
        """Nothing is on the disk before the first commit."""

    def everything(self) -> Sequence[NNIterationDataPoint]:
        return self.view

    def commit(self, flushes: Flushes) -> None:
        self._before = self._written
        self._table.append(self.view[self._written :], flushes)
        self._written = len(self.view)

    def rollback(self) -> None:
        self._table.rollback()
        self._written = self._before


def write(path: str, records: Iterable[NNIterationDataPoint]) -> int:
    """Write a whole table atomically; the number of rows."""
    rows = [flatten(record) for record in records]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with fs.atomic_write(path, "wb") as stream:
        stream.write(_line(["", *columns]))
        for number, row in enumerate(rows):
            stream.write(_line([number, *map(row.get, columns)]))
    return len(rows)


def read(path: str, last_epoch: int | None = None) -> list[NNIterationDataPoint]:
    """The records of a table, up to and with ``last_epoch`` where it is given.

    A row past ``last_epoch``, or torn at the very end of the file after a row
    of ``last_epoch``, belongs to an epoch that was never committed and is left
    out. Any other unreadable row is a ``HistoryCorruptionError``.
    """
    return list(iterate(path, last_epoch))


def iterate(path: str, last_epoch: int | None = None) -> Iterator[NNIterationDataPoint]:
    with open(path, encoding="utf-8", newline="", errors="surrogateescape") as stream:
        lines = _Lines(stream)
        number, epoch = 0, None
        row: list[str] = []
        columns: list[str] | None = None
        try:
            for row in csv.reader(lines, strict=True):
                number += 1
                if columns is None:
                    columns = row
                    plan = [place(column) for column in columns]
                    continue
                if not row:
                    continue
                if last_epoch is not None and _is_past(row, columns, last_epoch):
                    return
                if len(row) != len(columns):
                    raise ValueError(f"it has {len(row)} cells for {len(columns)} columns")
                record = _record(row, plan)
                if last_epoch is not None and lines.torn:
                    raise ValueError("it ends without a line break, so a part of it is missing")
                epoch = record.epoch_idx
                yield record
        except (ValueError, KeyError, csv.Error) as error:
            if isinstance(error, csv.Error):
                row = []  # this one was not read; the last one was
            ends = last_epoch is not None and epoch == last_epoch
            if ends and lines.torn and not _is_within(row, columns):
                return
            raise HistoryCorruptionError(
                f"{path} is corrupted: row {number} cannot be read ({error})"
            ) from error
        if columns is None:
            raise HistoryCorruptionError(
                f"{path} is empty: it has not even the names of its columns. Restore it from a "
                "backup; the checkpoints are not concerned"
            )


class _Lines:
    """The lines of a file that a writer may be appending to."""

    def __init__(self, stream: Iterable[str]) -> None:
        self._stream = stream
        self.torn = False  # whether the line read last was the unfinished end of the file

    def __iter__(self) -> Iterator[str]:
        for line in self._stream:
            self.torn = not line.endswith("\n")
            yield line


def _is_past(row: list[str], columns: list[str], last_epoch: int) -> bool:
    try:
        return int(float(row[columns.index("epoch_idx")])) > last_epoch
    except (ValueError, IndexError):
        return False


def _is_within(row: list[str], columns: list[str] | None) -> bool:
    """Whether a row goes on after its epoch, so that it is known not to be past the last one."""
    columns = columns or []
    return "epoch_idx" in columns and len(row) > columns.index("epoch_idx") + 1


def _record(row: list[str], plan: list[Place]) -> NNIterationDataPoint:
    state: dict[str, Any] = {"train_edp": {}}
    for cell, where in zip(row[1:], plan[1:]):
        if cell != "":
            put(state, where, cell)
    if "selection" in state:
        state["selection"].setdefault("value", None)
    return NNIterationDataPoint.from_state(state)


def _line(cells: Sequence[Any]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode("utf-8", "surrogateescape")
