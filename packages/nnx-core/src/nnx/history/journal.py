"""The form of a history journal, and what a user says of it.

``history/`` holds ``chunk-<n>.jsonl`` (immutable, one record a line),
``index.jsonl`` (one hash-chained line per chunk), ``epochs.jsonl`` (one summary
per epoch) and ``journal.json``, the manifest that says how much of them counts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from nnx.records import NNIterationDataPoint
from nnx.utils import validation as check
from nnx.utils.jsonlike import finite

JOURNAL_FORMAT = "nnx.history-journal"
VERSION = 1
CHAIN_START = hashlib.sha256(JOURNAL_FORMAT.encode()).hexdigest()
ORIGINAL_CHAIN_START = "0" * 64  # in journals of the original NNx


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryJournal:
    """Keep only the last ``retention`` records in memory and append the rest to disk.

    A chunk file holds up to ``chunk_size`` records, at most ``retention`` (by
    default 250, or ``retention`` where that is less).
    """

    retention: int = 1000
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        owner = "HistoryJournal"
        retention = check.count(owner, "retention", self.retention)
        object.__setattr__(self, "retention", retention)
        if self.chunk_size is not None:
            size = check.count(owner, "chunk_size", self.chunk_size)
            if size > retention:
                raise ValueError(
                    f"HistoryJournal.chunk_size must be at most retention ({retention}), "
                    f"not {size}: records waiting for their chunk must stay in memory"
                )
            object.__setattr__(self, "chunk_size", size)

    @property
    def chunk(self) -> int:
        """The records in a full chunk."""
        return min(250, self.retention) if self.chunk_size is None else self.chunk_size


class RecordWindow(Sequence[NNIterationDataPoint]):
    """A live, read-only view of records."""

    def __init__(self, records: Sequence[NNIterationDataPoint]) -> None:
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, index: int) -> NNIterationDataPoint: ...
    @overload
    def __getitem__(self, index: slice) -> list[NNIterationDataPoint]: ...
    def __getitem__(self, index: Any) -> Any:
        return list(self._records)[index] if isinstance(index, slice) else self._records[index]

    def __iter__(self) -> Iterator[NNIterationDataPoint]:
        return iter(self._records)

    def __reversed__(self) -> Iterator[NNIterationDataPoint]:
        return reversed(self._records)

    def __repr__(self) -> str:
        return f"RecordWindow({len(self._records)} records)"


def chunk_name(number: int) -> str:
    return f"chunk-{number:08d}.jsonl"


def line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(finite(value), separators=(",", ":")).encode() + b"\n"


def chained(previous: str, data: bytes) -> str:
    """The link after a line of the index."""
    return hashlib.sha256(previous.encode() + data).hexdigest()


def empty_manifest(spec: HistoryJournal) -> dict[str, Any]:
    """The manifest of a journal without records."""
    return {
        "format": JOURNAL_FORMAT,
        "version": VERSION,
        "retention": spec.retention,
        "chunk_size": spec.chunk,
        "records": 0,
        "chunks": 0,
        "last_epoch": None,
        "index_bytes": 0,
        "index_chain": CHAIN_START,
        "epochs": 0,
        "epochs_bytes": 0,
    }


def encode_manifest(manifest: Mapping[str, Any]) -> bytes:
    """The bytes of ``journal.json``, its digest among them."""
    body = json.dumps(manifest, sort_keys=True)
    digest = hashlib.sha256(body.encode()).hexdigest()
    return json.dumps({**manifest, "digest": digest}, sort_keys=True, indent=1).encode()
