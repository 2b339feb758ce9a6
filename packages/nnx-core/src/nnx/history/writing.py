"""Writing a history journal: records in chunks, published epoch by epoch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import deque
from collections.abc import Mapping
from typing import Any

from nnx.history.journal import (
    CHAIN_START,
    HistoryJournal,
    RecordWindow,
    chained,
    chunk_name,
    empty_manifest,
    encode_manifest,
    line,
)
from nnx.history.reading import Journal
from nnx.records import NNIterationDataPoint
from nnx.utils import files as fs
from nnx.utils.flushing import Flushes
from nnx.utils.jsonlike import restore


class JournalWriter:
    """The journal of one run while it trains."""

    def __init__(self, folder: str, spec: HistoryJournal) -> None:
        self.folder = folder
        self.spec = spec
        self._window: deque[NNIterationDataPoint] = deque(maxlen=spec.retention)
        self._waiting: list[NNIterationDataPoint] = []
        self._entries: list[bytes] = []  # index lines of this epoch's chunks
        self._unflushed: list[str] = []
        self._epoch: dict[str, Any] | None = None
        self._published = empty_manifest(spec)  # the manifest on disk
        self._previous: dict[str, Any] | None = None  # the one before it
        self._chunks = 0
        self._chain = CHAIN_START
        self.view = RecordWindow(self._window)

    def add(self, record: NNIterationDataPoint) -> None:
        if len(self._waiting) >= self.spec.chunk:
            self._write_chunk()
        self._window.append(record)
        self._waiting.append(record)

    def replace_last(self, record: NNIterationDataPoint) -> None:
        self._window[-1] = self._waiting[-1] = record

    def everything(self) -> list[NNIterationDataPoint]:
        """All records so far, the uncommitted ones included, read back from disk."""
        if not Journal.is_there(self.folder):
            committed: list[NNIterationDataPoint] = []
        else:
            committed = list(Journal.open(self.folder).iterate())
        return [*committed, *self._uncommitted()]

    def _uncommitted(self) -> list[NNIterationDataPoint]:
        found: list[NNIterationDataPoint] = []
        for path in self._unflushed:
            with open(path, "rb") as stream:
                rows = [restore(json.loads(row)) for row in stream.read().splitlines()]
            found += [NNIterationDataPoint.from_state(row) for row in rows]
        return [*found, *self._waiting]

    def commit(self, flushes: Flushes) -> None:
        """Publish the epoch's records; everything is on disk when this returns.

        After an error the caller settles ``flushes``, which hold open files.
        """
        self._previous = self._published
        if not self._waiting and not self._entries:
            return
        last = self._waiting[-1]
        self._write_chunk()
        now = self._published
        index = b"".join(self._entries)
        count = sum(json.loads(entry)["records"] for entry in self._entries)
        summary = line({"epoch_idx": last.epoch_idx, "records": count, "last": last.state()})
        manifest = {
            **now,
            "records": now["records"] + count,
            "chunks": self._chunks,
            "last_epoch": last.epoch_idx,
            "index_bytes": now["index_bytes"] + len(index),
            "index_chain": self._chain,
            "epochs": now["epochs"] + 1,
            "epochs_bytes": now["epochs_bytes"] + len(summary),
        }
        for path in self._unflushed:
            flushes.add(fs.disk.reopen(path))
        self._append("index.jsonl", now["index_bytes"], index, flushes)
        self._append("epochs.jsonl", now["epochs_bytes"], summary, flushes)
        flushes.wait()
        fs.disk.flush_directory(self.folder)
        self._publish(manifest)
        self._published = manifest
        self._entries, self._unflushed = [], []

    def discard(self) -> None:
        """Forget the records since the last commit; the window shows the ones before it."""
        for path in self._unflushed:
            fs.remove_quietly(path)
        self._waiting, self._entries, self._unflushed = [], [], []
        self._chunks = self._published["chunks"]
        self._chain = self._published["index_chain"]
        committed = self.everything()
        self._window.clear()
        self._window.extend(committed)

    def abandon(self) -> None:
        """Take back the chunks of a fit that ends before its first commit."""
        for path in self._unflushed:
            fs.remove_quietly(path)
        with contextlib.suppress(OSError):
            fs.disk.rmdir(self.folder)

    def publish_empty(self) -> None:
        """Publish a journal without records."""
        self._publish(self._published)

    def rollback(self) -> None:
        """Publish the manifest from before the last commit again."""
        if self._previous is None:
            return
        self._published, self._previous = self._previous, None
        self._waiting, self._entries, self._unflushed = [], [], []
        self._chunks = self._published["chunks"]
        self._chain = self._published["index_chain"]
        if os.path.isfile(os.path.join(self.folder, "journal.json")):
            self._publish(self._published)

    def _write_chunk(self) -> None:
        if not self._waiting:
            return
        if not os.path.isdir(self.folder):
            fs.disk.mkdir(self.folder)
            fs.disk.flush_directory(os.path.dirname(self.folder))
        data = b"".join(line(record.state()) for record in self._waiting)
        path = os.path.join(self.folder, chunk_name(self._chunks))
        with contextlib.suppress(FileNotFoundError):
            fs.disk.unlink(path)  # of an epoch that was never committed
        with fs.closing(fs.disk.create(path)) as descriptor:
            fs.disk.write(descriptor, data)
        entry = line(
            {
                "chunk": self._chunks,
                "records": len(self._waiting),
                "epochs": [self._waiting[0].epoch_idx, self._waiting[-1].epoch_idx],
                "bytes": len(data),
                "sha256": hashlib.sha256(data).hexdigest(),
                "previous": self._chain,
            }
        )
        self._chain = chained(self._chain, entry)
        self._entries.append(entry)
        self._unflushed.append(path)
        self._chunks += 1
        self._waiting = []

    def _append(self, name: str, size: int, data: bytes, flushes: Flushes) -> None:
        descriptor = fs.disk.open_append(os.path.join(self.folder, name))
        try:
            if os.fstat(descriptor).st_size != size:
                fs.disk.truncate(descriptor, size)
            fs.disk.write(descriptor, data)
        except BaseException:
            fs.close_quietly(descriptor)
            raise
        flushes.add(descriptor)

    def _publish(self, manifest: Mapping[str, Any]) -> None:
        path = os.path.join(self.folder, "journal.json")
        with fs.atomic_write(path, "wb", strict=True) as stream:
            stream.write(encode_manifest(manifest))
