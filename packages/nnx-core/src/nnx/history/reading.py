"""Reading a journal: the manifest and the index first, records only when asked for."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from nnx.history.journal import (
    CHAIN_START,
    JOURNAL_FORMAT,
    ORIGINAL_CHAIN_START,
    VERSION,
    chained,
    chunk_name,
)
from nnx.records import NNIterationDataPoint
from nnx.store.errors import HistoryCorruptionError
from nnx.utils.jsonlike import restore

__all__ = ["HistoryCorruptionError", "Journal"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One entry of the index."""

    number: int
    records: int
    first_epoch: int
    last_epoch: int
    sha256: str


def _chunk(entry: dict[str, Any]) -> Chunk:
    first, last = entry["epochs"]
    return Chunk(
        number=int(entry["chunk"]),
        records=int(entry["records"]),
        first_epoch=int(first),
        last_epoch=int(last),
        sha256=str(entry["sha256"]),
    )


def _original_chunk(entry: dict[str, Any]) -> Chunk:
    number = int(entry["seq"])
    if entry["file"] != chunk_name(number):
        raise ValueError(f"chunk {number} is called {entry['file']!r}")
    return Chunk(
        number=number,
        records=int(entry["records"]),
        first_epoch=int(entry["first_epoch"]),
        last_epoch=int(entry["last_epoch"]),
        sha256=str(entry["sha256"]),
    )


@dataclass
class Journal:
    """A journal as it was when opened; later epochs do not show.

    Reads those of the original NNx too, whose manifest has no digest, whose
    index has other keys, and whose epoch rows hold no record.
    """

    folder: str
    manifest: dict[str, Any]
    _chunks: list[Chunk] | None = field(default=None, repr=False)

    @staticmethod
    def is_there(folder: str) -> bool:
        return os.path.isfile(os.path.join(folder, "journal.json"))

    @classmethod
    def open(cls, folder: str) -> Journal:
        """Read the manifest; ``HistoryCorruptionError`` when it is missing or damaged."""
        path = os.path.join(folder, "journal.json")
        try:
            with open(path, "rb") as stream:
                manifest = json.loads(stream.read(1 << 20))
            digest = manifest.pop("digest", None)
            body = json.dumps(manifest, sort_keys=True)
            if manifest["format"] != JOURNAL_FORMAT:
                raise ValueError(f"its format is {manifest['format']!r}")
            if manifest["version"] != VERSION:
                raise ValueError(f"its version is {manifest['version']!r}, not {VERSION}")
            if digest is None:
                manifest = {**manifest, "original": True}
            elif digest != hashlib.sha256(body.encode()).hexdigest():
                raise ValueError("its content does not match its digest")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise HistoryCorruptionError(f"{path} cannot be read: {error}") from error
        return cls(folder, manifest)

    @property
    def retention(self) -> int:
        return int(self.manifest["retention"])

    @property
    def records(self) -> int:
        return int(self.manifest["records"])

    @property
    def chunks(self) -> list[Chunk]:
        """The index, checked against the manifest's chain."""
        if self._chunks is None:
            self._chunks = self._read_index()
        return self._chunks

    def iterate(self, last_epoch: int | None = None) -> Iterator[NNIterationDataPoint]:
        """Every committed record in order, one chunk in memory at a time."""
        for chunk in self.chunks:
            if last_epoch is not None and chunk.first_epoch > last_epoch:
                return
            for record in self.read_chunk(chunk):
                if last_epoch is None or record.epoch_idx <= last_epoch:
                    yield record

    def tail(self, count: int, last_epoch: int | None = None) -> list[NNIterationDataPoint]:
        """The last ``count`` committed records, from the chunks that hold them."""
        found: list[NNIterationDataPoint] = []
        for chunk in reversed(self.chunks):
            if len(found) >= count:
                break
            if last_epoch is not None and chunk.first_epoch > last_epoch:
                continue
            records = self.read_chunk(chunk)
            kept = [r for r in records if last_epoch is None or r.epoch_idx <= last_epoch]
            found = kept + found
        return found[len(found) - count :] if len(found) > count else found

    def epochs(self, last_epoch: int | None = None) -> list[dict[str, Any]]:
        """The summary row of every committed epoch."""
        data = self._prefix("epochs.jsonl", self.manifest["epochs_bytes"])
        try:
            rows = [restore(json.loads(row)) for row in data.splitlines()]
        except (ValueError, RecursionError) as error:
            path = os.path.join(self.folder, "epochs.jsonl")
            raise HistoryCorruptionError(f"{path} cannot be read: {error}") from error
        if self._original:
            rows = [{"epoch_idx": r["epoch"], "last": self._last_of(r["epoch"])} for r in rows]
        return [r for r in rows if last_epoch is None or r["epoch_idx"] <= last_epoch]

    @property
    def _original(self) -> bool:
        return bool(self.manifest.get("original"))

    def _last_of(self, epoch: int) -> dict[str, Any]:
        """The state of an epoch's last record."""
        for chunk in reversed(self.chunks):
            if chunk.first_epoch <= epoch <= chunk.last_epoch:
                return [r for r in self.read_chunk(chunk) if r.epoch_idx == epoch][-1].state()
        raise HistoryCorruptionError(f"{self.folder} has no record of its epoch {epoch}")

    def read_chunk(self, chunk: Chunk) -> list[NNIterationDataPoint]:
        path = os.path.join(self.folder, chunk_name(chunk.number))
        try:
            with open(path, "rb") as stream:
                data = stream.read()
        except OSError as error:
            raise HistoryCorruptionError(
                f"{path} is missing or unreadable, though the index lists it: {error}"
            ) from error
        if hashlib.sha256(data).hexdigest() != chunk.sha256:
            raise HistoryCorruptionError(f"{path} does not match its SHA-256 in the index")
        try:
            records = [restore(json.loads(row)) for row in data.splitlines()]
            return [NNIterationDataPoint.from_state(state) for state in records]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise HistoryCorruptionError(f"{path} holds no records: {error!r}") from error

    def _read_index(self) -> list[Chunk]:
        path = os.path.join(self.folder, "index.jsonl")
        chunks, chain = [], ORIGINAL_CHAIN_START if self._original else CHAIN_START
        read = _original_chunk if self._original else _chunk
        try:
            for row in self._prefix("index.jsonl", self.manifest["index_bytes"]).splitlines(True):
                chunks.append(read(json.loads(row)))
                chain = chained(chain, row)
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, HistoryCorruptionError):
                raise
            raise HistoryCorruptionError(f"{path} cannot be read: {error}") from error
        if chain != self.manifest["index_chain"]:
            raise HistoryCorruptionError(
                f"{path} was altered: its hash chain does not end where journal.json says"
            )
        return chunks

    def _prefix(self, name: str, size: int) -> bytes:
        path = os.path.join(self.folder, name)
        try:
            with open(path, "rb") as stream:
                data = stream.read(size)
        except FileNotFoundError:
            data = b""
        if len(data) != size:
            raise HistoryCorruptionError(
                f"{path} is shorter ({len(data)} bytes) than journal.json says ({size})"
            )
        return data
