"""The records of an epoch's batches, from the loop to the run's writer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nnx.records import NNIterationDataPoint

if TYPE_CHECKING:
    from nnx.store.writer import RunWriter
    from nnx.tasks.recorder import EpochRecorder


class Rows:
    """What waits to be a record: batches are counted here, their scores in the recorder.

    ``at_most`` bounds what waits; ``keep`` is for runs that write points inside an epoch,
    which hold its records so far.
    """

    def __init__(self, recorder: EpochRecorder, *, at_most: int | None, keep: bool) -> None:
        self.writer: RunWriter = None  # type: ignore[assignment]  # until the run is reserved
        self._recorder = recorder
        self._at_most = at_most
        self._keep = keep
        self._waiting: list[tuple[Any, int, int, int, int | None]] = []
        self._epoch: list[NNIterationDataPoint] = []

    def add(self, lr: Any, step: int, epoch: int, batch: int, updates: int | None) -> None:
        """Count one batch; its scores are in the recorder."""
        self._waiting.append((lr, step, epoch, batch, updates))
        if len(self._waiting) == self._at_most:
            self.flush()

    def flush(self) -> None:
        """Make the records of the batches since the last flush."""
        rows, self._waiting = self._waiting, []
        if not rows:
            return
        # A hook that reads in the middle of a batch finds its scores there already, its row not.
        scores = self._recorder.take(len(rows))
        records = [
            NNIterationDataPoint(
                lr=float(lr),
                iter_idx=step,
                epoch_idx=epoch,
                batch_idx=batch,
                train_edp=edp,
                update_count=updates,
            )
            for (lr, step, epoch, batch, updates), edp in zip(rows, scores)
        ]
        self.writer.extend(records)
        if self._keep:
            self._epoch += records

    def amend_update_count(self, count: int | None) -> None:
        """The last batch's window was closed after it was recorded: count that update."""
        self.flush()
        last = self.writer.idps[-1]
        if last.update_count != count:
            self.writer.replace_last(replace(last, update_count=count))

    def of_epoch(self) -> list[NNIterationDataPoint]:
        """The records of the epoch in progress, for a point inside it."""
        self.flush()
        return list(self._epoch)

    def begin_epoch(self, records: Sequence[NNIterationDataPoint] = ()) -> None:
        """Start an epoch, which a resume may have some ``records`` of."""
        self._epoch = list(records)
        if records:
            self.writer.extend(records)

    def discard(self) -> None:
        """Drop the epoch's records."""
        self._waiting.clear()
        self._recorder.take()
        self.writer.discard_epoch()
