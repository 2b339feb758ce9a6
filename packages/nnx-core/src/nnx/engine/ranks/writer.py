"""The files of a fit in several processes, of which one writes."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nnx.distributed.group import Group
    from nnx.history import HistoryJournal
    from nnx.records import NNIterationDataPoint
    from nnx.store import NNRun
    from nnx.store.writer import RunWriter


class RankWriter:
    """The run's writer as every process sees it; only one of them has files behind it."""

    def __init__(
        self, group: Group, inner: RunWriter | None, run: NNRun, history: HistoryJournal | None
    ) -> None:
        self._group = group
        self._inner = inner
        self._run = run
        self._records: Any = [] if history is None else deque(maxlen=history.retention)
        self._committed: list[NNIterationDataPoint] = []

    @property
    def run(self) -> NNRun:
        return self._run if self._inner is None else self._inner.run

    @run.setter
    def run(self, value: NNRun) -> None:
        self._run = value
        if self._inner is not None:
            self._inner.run = value

    @property
    def idps(self) -> Sequence[NNIterationDataPoint]:
        return self._records if self._inner is None else self._inner.idps

    def extend(self, records: Iterable[NNIterationDataPoint]) -> None:
        if self._inner is None:
            self._records.extend(records)
        else:
            self._inner.extend(records)

    def replace_last(self, record: NNIterationDataPoint) -> None:
        if self._inner is None:
            self._records[-1] = record
        else:
            self._inner.replace_last(record)

    def discard_epoch(self) -> None:
        if self._inner is None:
            self._records.clear()
            self._records.extend(self._committed)
        else:
            self._inner.discard_epoch()

    @contextlib.contextmanager
    def full_history(self) -> Iterator[Sequence[NNIterationDataPoint]]:
        if self._inner is not None:
            with self._inner.full_history() as records:
                yield records
        else:
            yield self._records

    def commit_epoch(self, checkpoint: Any, training_state: Any, **options: Any) -> None:
        """Commit in the writer; what became of it is known everywhere when this returns."""
        self._group.from_writer(
            lambda: self._write("commit_epoch", checkpoint, training_state, **options)
        )
        if self._inner is None:
            self._committed = list(self._records)

    def refresh_last(self, checkpoint: Any, training_state: Any, **options: Any) -> None:
        self._group.from_writer(
            lambda: self._write("refresh_last", checkpoint, training_state, **options)
        )

    def finish(self) -> NNRun:
        self._group.from_writer(lambda: None)
        if self._inner is not None:
            self._run = self._inner.finish()
        where = self._group.from_writer(lambda: (self._run.history, self._run.provenance))
        if self._inner is not None:
            return self._run
        return replace(self._run, idps=list(self._records), history=where[0], provenance=where[1])

    def _write(self, name: str, *args: Any, **options: Any) -> None:
        getattr(self._inner, name)(*args, **options)
