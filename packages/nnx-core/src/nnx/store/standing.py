"""What a run's BEST is worth, and with which other runs' BEST it can be compared."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nnx.params.loss import loss_id, spell_loss
from nnx.records import NNIterationDataPoint, control_signal
from nnx.store import manifest
from nnx.store.committed import checkpoint_record
from nnx.store.paths import PointFiles, RunPaths
from nnx.utils.yamlio import read_yaml

BEST = "best"  # the checkpoint tag
_REGRESSION = (
    "mean_squared_error", "mean_absolute_error", "l1", "smooth_l1", "huber", "poisson",
    "gaussian_nll",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The value of a BEST, lower is better, and what it is a value of.

    Values are compared only where ``task``, ``data`` and ``metric`` are equal.
    ``rank`` orders what cannot be compared: a validated run stands before one that a
    named monitor judges, and that one before a run that knows its training alone.
    """

    value: float
    rank: int
    task: str
    data: str | None
    metric: str

    @property
    def measure(self) -> tuple[str, str | None, str]:
        """What must be equal for two values to be compared."""
        return self.task, self.data, self.metric

    def beats(self, other: Standing) -> bool:
        """Whether this one takes the pointer from ``other``."""
        if self.rank != other.rank:
            return self.rank < other.rank
        return self.measure == other.measure and self.value < other.value

    def __str__(self) -> str:
        data = "" if self.data is None else f" on {self.data}"
        return f"{self.metric} of {self.task}{data}"


def score(record: NNIterationDataPoint | Mapping[str, Any]) -> float:
    """How good an epoch is without a named monitor, lower is better: its control signal.

    +inf for an epoch without one, and for one whose loss is not finite.
    """
    return control_signal(_point(record)).score


def shown(record: NNIterationDataPoint) -> float:
    """The number that a BEST was chosen by: its monitor's value, else its score."""
    if record.selection is not None and record.selection.value is not None:
        return record.selection.value
    return score(record)


def grounds(config: Mapping[str, Any], *, val_loader: Any = None) -> dict[str, Any]:
    """What a run's configuration says of its task, its data and its monitor.

    ``val_loader`` may have a ``data_id`` of its own: what names the rows it validates
    on, and nothing else of the training that the run's ``data_id`` tells apart.
    """
    parts = [config.get(part) or {} for part in ("trainer", "train")]
    monitor = next((p["monitor"] for p in parts if p.get("monitor")), None)
    found = {
        "task": _task(config),
        "loss": spell_loss((config.get("model") or {}).get("loss")),
        "data": next((p["data_id"] for p in parts if p.get("data_id")), None),
        "monitor": None if monitor is None else _monitor(monitor, parts),
    }
    validation = getattr(val_loader, "data_id", None)
    return found if validation is None else {**found, "validation": str(validation)}


def of_record(
    record: NNIterationDataPoint | Mapping[str, Any], known: Mapping[str, Any]
) -> Standing | None:
    """The standing of an epoch under the :func:`grounds` of its run; ``None`` without a value."""
    idp = _point(record)
    task, data, validation = known["task"], known["data"], known.get("validation")
    if known["monitor"] is not None:
        selection = idp.selection
        if selection is None or selection.value is None or not math.isfinite(selection.value):
            return None
        value = -selection.value if selection.monitor.mode == "max" else selection.value
        if selection.monitor.split == "val":
            data = validation or data
        return Standing(value=value, rank=1, task=task, data=data, metric=known["monitor"])
    signal = control_signal(idp)
    if signal.value is None or signal.source is None or signal.diverged:
        return None
    split, _, name = signal.source.partition("_edp.")
    metric = f"{split}.{name}" + (f" ({known['loss']})" if name == "loss" else "")
    rank = 0 if split == "val" else 2
    if split == "val":
        data = validation or data
    return Standing(value=signal.value, rank=rank, task=task, data=data, metric=metric)


def of_run(paths: RunPaths) -> Standing | None:
    """The standing of a run's BEST, as cheaply as it can be read; ``None`` without any."""
    try:
        record = checkpoint_record(paths, BEST)
        if record is None:
            return None
        found = manifest.locate(PointFiles(paths.checkpoints, BEST)).manifest
        known = ((found or {}).get("run") or {}).get("grounds")
        return of_record(record, known or grounds(read_yaml(paths.run_yaml)))
    except Exception:  # whatever is wrong with a run, it has no standing
        return None


def _point(record: NNIterationDataPoint | Mapping[str, Any]) -> NNIterationDataPoint:
    if isinstance(record, NNIterationDataPoint):
        return record
    return NNIterationDataPoint.from_state(record)


def _task(config: Mapping[str, Any]) -> str:
    """The declared task and its outputs; else what the loss and the width of the net say."""
    model = config.get("model") or {}
    task = model.get("task")
    if isinstance(task, Mapping):
        names = task.get("labels")
        outputs = task.get("num_outputs") or (len(names) if isinstance(names, list) else None)
        kind = str(task.get("kind"))
    else:
        outputs = None
        kind = "regression" if loss_id(model.get("loss")) in _REGRESSION else "classification"
    outputs = outputs or (config.get("net") or {}).get("output_dim")
    return kind if outputs is None else f"{kind}/{outputs}"


def _monitor(monitor: Mapping[str, Any], parts: list[Mapping[str, Any]]) -> str:
    """A monitor by split, metric and direction, with the declaration of its metric."""
    name = monitor.get("metric")
    declared = [m for part in parts for m in part.get("metrics") or () if _label(m) == name]
    text = f"{monitor.get('split')}.{name}"
    if monitor.get("mode"):
        text += f" ({monitor['mode']})"
    if declared:
        text += f" {json.dumps(declared[0], sort_keys=True)}"
    return f"monitor {text}"


def _label(metric: Any) -> Any:
    return (metric.get("name") or metric.get("id")) if isinstance(metric, Mapping) else None
