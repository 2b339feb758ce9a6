"""The one number that a run watches, and the rule that decides "better"."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from nnx.params.base import Params, StateField, always, check_keys, put
from nnx.params.registered import MetricSpec
from nnx.utils import validation as check

# Watched without being declared, and the direction each gets.
BUILT_IN = {"loss": "min", "error": "min"}
MODES = ("min", "max")
POLICIES = ("skip", "error")
STATUSES = ("ok", "missing", "nonfinite")


@dataclass(frozen=True, slots=True)
class MonitorSpec(Params):
    """Which metric, on which split, in which direction, improving by how much.

    ``mode=None`` takes the metric's natural direction: at once for "loss" and
    "error", from its registration (:meth:`resolve`) for a declared metric.
    """

    metric: str = "loss"
    split: str = "val"
    mode: str | None = None
    min_delta: float = 0.0
    on_missing: str = "skip"
    on_nonfinite: str = "skip"

    _STATE: ClassVar[tuple[StateField, ...]] = (
        always("metric"),
        always("split"),
        always("mode"),
        always("min_delta"),
        always("on_missing"),
        always("on_nonfinite"),
    )

    def __post_init__(self) -> None:
        owner = "MonitorSpec"
        mode = self.mode
        put(
            self,
            metric=check.text(owner, "metric", self.metric),
            split=check.choice(owner, "split", self.split, ("val", "train")),
            mode=BUILT_IN.get(self.metric)
            if mode is None
            else check.choice(owner, "mode", mode, MODES),
            min_delta=check.real(owner, "min_delta", self.min_delta, at_least=0),
            on_missing=check.choice(owner, "on_missing", self.on_missing, POLICIES),
            on_nonfinite=check.choice(owner, "on_nonfinite", self.on_nonfinite, POLICIES),
        )

    @property
    def key(self) -> str:
        """``"val.nll"``: what loggers call it."""
        return f"{self.split}.{self.metric}"

    def check_names(self, metrics: Sequence[MetricSpec], owner: str = "monitor") -> None:
        """Raise unless the metric is "loss", "error" or one of the declared ``metrics``."""
        labels = [metric.label for metric in metrics]
        if self.metric in BUILT_IN and self.metric in labels:
            raise ValueError(
                f"{owner} watches {self.metric!r}, which is both the run's own and the name of a "
                "declared metric; give the metric another name (MetricSpec(..., name=...))"
            )
        if self.metric in BUILT_IN or self.metric in labels:
            return
        known = (*BUILT_IN, *labels)
        raise ValueError(
            f"{owner} watches {self.metric!r}, which is not declared{check.close(self.metric, known)}"
            f" (known: {', '.join(known)}). Declare it: metrics=[MetricSpec({self.metric!r})]"
        )

    def resolve(self, metrics: Sequence[MetricSpec], owner: str = "monitor") -> MonitorSpec:
        """The same monitor with its direction filled in."""
        self.check_names(metrics, owner)
        if self.mode is not None:
            return self
        declared = next(metric for metric in metrics if metric.label == self.metric)
        return MonitorSpec(**{**self.state(), "mode": declared.mode})

    def improved(self, current: float, best: float | None) -> bool:
        """Whether ``current`` beats ``best`` by more than ``min_delta``.

        The first finite value improves; a tie and a non-finite value never do.
        """
        if not math.isfinite(current):
            return False
        if best is None:
            return True
        if self.mode is None:
            raise ValueError(f"the monitor {self.key} has no direction yet; resolve(metrics) first")
        if self.mode == "min":
            return current < best - self.min_delta
        return current > best + self.min_delta

    def value(self, *, train: Any, val: Any) -> float | None:
        """The watched number in an epoch's two records; ``None`` when there is none.

        A record whose loss is NaN or infinite is of a model that diverged, whatever its
        other scores say: its loss is given in their place.
        """
        record = val if self.split == "val" else train
        if record is None:
            return None
        if self.metric in BUILT_IN:
            value = getattr(record, self.metric)
        else:
            value = record.metrics.get(self.metric)
        if value is not None and record.loss is not None and not math.isfinite(record.loss):
            return record.loss
        return value


@dataclass(frozen=True, slots=True)
class MonitorRecord:
    """One epoch's decision."""

    monitor: MonitorSpec
    value: float | None
    status: str
    improved: bool

    def __post_init__(self) -> None:
        check.instance("MonitorRecord", "monitor", self.monitor, MonitorSpec)
        check.choice("MonitorRecord", "status", self.status, STATUSES)
        put(self, improved=check.flag("MonitorRecord", "improved", self.improved))

    def state(self) -> dict[str, Any]:
        return {
            "monitor": self.monitor.state(),
            "value": self.value,
            "status": self.status,
            "improved": self.improved,
        }

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> MonitorRecord:
        check_keys("MonitorRecord", state, ("monitor", "value", "status", "improved"))
        return MonitorRecord(
            monitor=MonitorSpec.from_state(state["monitor"]),
            value=state.get("value"),
            status=state["status"],
            improved=state["improved"],
        )
