"""Moving a run's ``idps.csv`` into a journal."""

from __future__ import annotations

import csv
import itertools
import os

from nnx.history.journal import HistoryJournal, line
from nnx.history.reading import Journal
from nnx.history.writing import JournalWriter
from nnx.store import idps_csv, lease
from nnx.store.committed import NOTHING, committed_epoch
from nnx.store.errors import HistoryCorruptionError, RunBusyError
from nnx.store.paths import BEST_POINTER, RunPaths
from nnx.utils import files as fs
from nnx.utils.flushing import Flushes
from nnx.utils.folders import remove_tree, remove_tree_quietly
from nnx.utils.locks import locked


def migrate_history(
    run_id: str,
    root: str | None = None,
    *,
    spec: HistoryJournal | None = None,
    discard_uncommitted: bool = False,
) -> None:
    """Replace a run's table by a journal with the same records; the id stays.

    The journal is built aside, read back and compared, published in one step,
    and only then is the table removed; an interrupted migration is simply run
    again. Refuses a run being trained, the ``best`` pointer, and a table with
    rows past LAST's epoch unless ``discard_uncommitted`` gives them up.
    """
    if run_id == BEST_POINTER:
        raise ValueError("migrate a run by its own id; runs/best is a pointer")
    paths = RunPaths.of(run_id, root)
    if not os.path.isfile(paths.run_yaml):
        raise FileNotFoundError(f"there is no run {paths.id!r} in {paths.root}")
    with (
        lease.lease(paths),
        locked(paths.lock, timeout=120, what=f"run {paths.id}", error=RunBusyError),
    ):
        if not Journal.is_there(paths.history):
            if not os.path.exists(paths.idps_csv):
                raise FileNotFoundError(f"{paths.idps_csv} is not there: nothing to migrate")
            _build(paths, spec or HistoryJournal(), discard_uncommitted)
        if os.path.exists(paths.idps_csv):
            Journal.open(paths.history)
            fs.disk.unlink(paths.idps_csv)
            fs.disk.flush_directory(paths.dir)


def _build(paths: RunPaths, spec: HistoryJournal, discard_uncommitted: bool) -> None:
    last = committed_epoch(paths)
    records = [] if last == NOTHING else idps_csv.read(paths.idps_csv, last)
    extra = _rows(paths.idps_csv) - len(records)
    if extra and not discard_uncommitted:
        raise ValueError(
            f"{paths.idps_csv} holds {extra} row(s) that LAST never committed. Readers hide "
            f"them, a migration would delete them: pass discard_uncommitted=True to allow that."
        )
    staging = fs.temporary_name(paths.history)
    flushes = Flushes()
    try:
        fs.disk.mkdir(staging)
        writer = JournalWriter(staging, spec)
        for _, epoch in itertools.groupby(records, key=lambda record: record.epoch_idx):
            for record in epoch:
                writer.add(record)
            writer.commit(flushes)
        if not records:
            writer.publish_empty()
        copied = Journal.open(staging).iterate()
        if [line(r.state()) for r in copied] != [line(r.state()) for r in records]:
            raise HistoryCorruptionError(
                f"the journal of run {paths.id} does not read back as its table; "
                f"nothing was changed"
            )
        if os.path.isdir(paths.history):
            remove_tree(paths.history)  # never published: it has no manifest
        fs.disk.replace(staging, paths.history)
        fs.disk.flush_directory(paths.dir)
    except BaseException:
        flushes.settle()
        remove_tree_quietly(staging)
        raise


def _rows(path: str) -> int:
    with open(path, encoding="utf-8", newline="", errors="surrogateescape") as stream:
        return max(0, sum(1 for row in csv.reader(stream) if row) - 1)
