"""The records of a fit in several processes.

Each process notes its own share of a batch. The shares are exchanged every few
batches, so that all processes hold the records of whole batches, made by the
same code as in one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from nnx.distributed.group import Group
from nnx.records import NNEvaluationDataPoint

if TYPE_CHECKING:
    from nnx.tasks.recorder import EpochRecorder

# Batches between two exchanges; bounds the outputs that wait.
EXCHANGE_EVERY = 32


class RankRecorder:
    """An :class:`EpochRecorder` of whole batches, fed with this process's shares."""

    def __init__(self, group: Group, recorder: EpochRecorder) -> None:
        self._group = group
        self._whole = recorder
        self._held: list[dict[str, Any]] = []

    # Shares are joined by what their losses were divided by, so it is always asked for.
    summarizes = True

    def begin_epoch(self) -> None:
        self._held.clear()
        self._whole.begin_epoch()

    def add(
        self,
        output: torch.Tensor,
        target: torch.Tensor,
        valid: torch.Tensor | None = None,
        *,
        loss: float | None,
        denominator: Any = None,
    ) -> None:
        share = {
            "tensors": [
                None if t is None else t.detach().to("cpu", copy=True)
                for t in (output, target, valid)
            ],
            "loss": loss,
            "denominator": None if denominator is None else float(denominator),
        }
        self._hold(share)

    def add_record(self, record: NNEvaluationDataPoint, *, n_samples: int) -> None:
        self._hold({"record": record.state(), "n_samples": n_samples})

    def take(self, count: int | None = None) -> list[NNEvaluationDataPoint]:
        """The records of whole batches since the last call. All processes call it together."""
        self._exchange()
        return self._whole.take(count)

    def summary(self, **fields: Any) -> NNEvaluationDataPoint | None:
        self._exchange()
        return self._whole.summary(**fields)

    def _hold(self, share: dict[str, Any]) -> None:
        self._held.append(share)
        if len(self._held) == EXCHANGE_EVERY:
            self._exchange()

    def _exchange(self) -> None:
        if not self._held:  # equally many batches everywhere, so nobody holds any
            return
        shares, self._held = self._group.gather(self._held), []
        if len({len(s) for s in shares}) != 1:
            raise ValueError(
                f"the processes trained on different numbers of batches: {[len(s) for s in shares]}"
            )
        for parts in zip(*shares):
            if "record" in parts[0]:
                record, n_samples = merged_record(parts)
                self._whole.add_record(record, n_samples=n_samples)
            else:
                self._add_whole(parts)

    def _add_whole(self, parts: Sequence[Mapping[str, Any]]) -> None:
        output, target = (torch.cat([p["tensors"][i] for p in parts]) for i in (0, 1))
        valid = None
        if any(p["tensors"][2] is not None for p in parts):
            valid = torch.cat(
                [
                    torch.ones_like(p["tensors"][1], dtype=torch.bool)
                    if p["tensors"][2] is None
                    else p["tensors"][2]
                    for p in parts
                ]
            )
        loss, denominator = whole_loss(parts)
        self._whole.add(output, target, valid, loss=loss, denominator=denominator)


def whole_loss(parts: Sequence[Mapping[str, Any]]) -> tuple[float | None, float | None]:
    """The loss of a whole batch and what it is divided by, from its shares'."""
    live = [p for p in parts if p["loss"] is not None]
    if not live:
        return None, parts[0]["denominator"]
    if live[0]["denominator"] is None:  # a summed loss
        return sum(p["loss"] for p in live), None
    weight = sum(p["denominator"] for p in live)
    total = sum(p["loss"] * p["denominator"] for p in live)
    return (total / weight if weight else None), weight


def merged_record(parts: Sequence[Mapping[str, Any]]) -> tuple[NNEvaluationDataPoint, int]:
    """One record of the processes' own records of a batch, weighted by their samples.

    Losses, errors, accuracies and named values are means over samples. F1, recall
    and precision are not, so they are left out.
    """
    records = [NNEvaluationDataPoint.from_state(p["record"]) for p in parts]
    weights = [
        float(p["n_samples"] if r.count is None else r.count) for p, r in zip(parts, records)
    ]
    if len(records) == 1:
        return records[0], parts[0]["n_samples"]

    def mean(values: Sequence[float | None]) -> float | None:
        pairs = [(v, w) for v, w in zip(values, weights) if v is not None and w]
        total = sum(w for _, w in pairs)
        return sum(v * w for v, w in pairs) / total if total else None

    def means(mappings: Sequence[Mapping[str, float]]) -> dict[str, float]:
        names = dict.fromkeys(name for m in mappings for name in m)
        found = {name: mean([m.get(name) for m in mappings]) for name in names}
        return {name: value for name, value in found.items() if value is not None}

    counts = [r.count for r in records if r.count is not None]
    whole = NNEvaluationDataPoint(
        loss=mean([r.loss for r in records]),
        error=mean([r.error for r in records]),
        accuracy=mean([r.accuracy for r in records]),
        extra=means([r.extra for r in records]),
        metrics=means([r.metrics for r in records]),
        kind=records[0].kind,
        count=sum(counts) if counts else None,
        status="ok" if any(r.status == "ok" for r in records) else records[0].status,
    )
    return whole, sum(int(p["n_samples"]) for p in parts)
