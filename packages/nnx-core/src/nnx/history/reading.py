"""Reading a journal: the manifest and the index first, records only when asked for."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from nnx.history.journal import CHAIN_START, JOURNAL_FORMAT, VERSION, chained, chunk_name
from nnx.records import NNIterationDataPoint
from nnx.store.errors import HistoryCorruptionError
from nnx.store.manifest import restore

__all__ = ["HistoryCorruptionError", "Journal"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One entry of the index."""

    number: int
    records: int
    first_epoch: int
    last_epoch: int
    size: int
    sha256: str


@dataclass
class Journal:
    """A journal as it was when opened; later epochs do not show."""

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
            digest = manifest.pop("digest")
            body = json.dumps(manifest, sort_keys=True)
            if manifest["format"] != JOURNAL_FORMAT:
                raise ValueError(f"its format is {manifest['format']!r}")
            if manifest["version"] != VERSION:
                raise ValueError(f"its version is {manifest['version']!r}, not {VERSION}")
            if digest != hashlib.sha256(body.encode()).hexdigest():
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
        return [r for r in rows if last_epoch is None or r["epoch_idx"] <= last_epoch]

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
        chunks, chain = [], CHAIN_START
        try:
            for row in self._prefix("index.jsonl", self.manifest["index_bytes"]).splitlines(True):
                entry = json.loads(row)
                first, last = entry["epochs"]
                chunks.append(
                    Chunk(
                        number=int(entry["chunk"]),
                        records=int(entry["records"]),
                        first_epoch=int(first),
                        last_epoch=int(last),
                        size=int(entry["bytes"]),
                        sha256=str(entry["sha256"]),
                    )
                )
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
