"""Stop when the watched number no longer improves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nnx.callbacks.base import Callback
from nnx.monitors import MonitorSpec, MonitorTracker
from nnx.params import MetricSpec
from nnx.params.component import ComponentSpec
from nnx.records import SIGNAL_FIELDS, control_signal, field_value
from nnx.utils import validation as check
from nnx.utils.caller import warn_caller

if TYPE_CHECKING:
    from nnx.callbacks.context import CallbackContext as _CallbackContext
    from nnx.records import NNIterationDataPoint

FIELDS = SIGNAL_FIELDS
_DEFAULT_FIELDS = FIELDS[:2]  # validation's: training values never stand in for them


class EarlyStopping(Callback):
    """Stop after ``patience`` epochs without an improvement larger than ``min_delta``.

    ``monitor`` is one of ``FIELDS``, a :class:`~nnx.monitors.MonitorSpec`, or
    ``None``: the first of ``val_edp.error`` and ``val_edp.loss`` that has a
    finite value, kept for the rest of the run. Training values never stand in for
    validation. ``mode`` and ``min_delta`` belong to the spec when there is one.

    An epoch without the watched value does not count toward patience and warns
    once per run; NaN and infinities count as epochs without improvement.
    ``patience=0`` stops at the first epoch that does not improve.

    The best value and the patience counter are the component ``early_stopping``
    (numbered when a run has several), or ``name``.
    """

    rank_behaviour = "every"

    def __init__(
        self,
        monitor: str | MonitorSpec | None = None,
        patience: int = 10,
        min_delta: float = 0.0,
        mode: str = "min",
        name: str | None = None,
    ) -> None:
        owner = "EarlyStopping"
        self.patience = check.count(owner, "patience", patience, at_least=0)
        self.min_delta = check.real(owner, "min_delta", min_delta, at_least=0)
        self.mode = check.choice(owner, "mode", mode, ("min", "max"))
        self.name = None if name is None else check.text(owner, "name", name)
        self.monitor = monitor
        self.monitor_spec: MonitorSpec | None = None
        if isinstance(monitor, MonitorSpec):
            if min_delta != 0 or mode != "min":
                raise ValueError(
                    "EarlyStopping takes min_delta and mode from its MonitorSpec; set them there"
                )
            self.monitor_spec = monitor
        elif monitor is not None:
            _check_field(monitor)
        elif mode == "max":
            raise ValueError(
                'EarlyStopping(mode="max") needs an explicit monitor: the default one is an error '
                "or a loss, which improves downwards"
            )
        self._rule = MonitorSpec("loss", mode=self.mode, min_delta=float(self.min_delta))
        self.best: float | None = None
        self.wait = 0
        self.stopped_epoch: int | None = None
        self._tracker: MonitorTracker | None = None
        self._reset()

    @property
    def selected_monitor(self) -> str | None:
        """The watched field, or the spec's key; ``None`` while the default has not chosen."""
        return self._selected if self.monitor_spec is None else self.monitor_spec.key

    def bind_monitor(self, metrics: Sequence[MetricSpec]) -> None:
        """Take the direction that this run declares; refuse an undeclared metric."""
        if isinstance(self.monitor, MonitorSpec):
            self.monitor_spec = self.monitor.resolve(metrics, owner="EarlyStopping.monitor")

    def on_train_begin(self, ctx: _CallbackContext) -> None:
        self._reset()
        if self.monitor_spec is not None:
            alone = self.monitor_spec != _monitor_of(ctx)  # else the run itself warns
            self._tracker = MonitorTracker(self.monitor_spec, warn_missing=alone)

    def on_epoch_end(self, ctx: _CallbackContext) -> None:
        improved = self._improved(ctx)
        if improved is None:
            return
        self.wait = 0 if improved else self.wait + 1
        if not improved and self.wait >= self.patience:
            self.stopped_epoch = ctx.epoch
            ctx.should_stop = True

    # A checkpointed component ------------------------------------------------------------

    def component_spec(self) -> ComponentSpec:
        return ComponentSpec(
            self.name or "early_stopping", version=1, required=False, numbered=self.name is None
        )

    def component_state(self) -> dict[str, Any]:
        return {
            "monitor": self._identity(),
            "selected": self._selected,
            "best": self.best,
            "wait": self.wait,
        }

    def check_component_state(self, state: Mapping[str, Any], *, version: int) -> list[str]:
        saved, mine = state.get("monitor"), self._identity()
        if not isinstance(saved, Mapping):
            return ["the saved state names no monitor"]
        return [
            f"saved with {key}={saved.get(key)!r}, this EarlyStopping has {key}={mine.get(key)!r}"
            for key in ("metric", "split", "mode", "min_delta")
            if saved.get(key) != mine.get(key)
        ]

    def load_component_state(self, state: Mapping[str, Any], *, version: int) -> None:
        self._selected = state["selected"]
        self.best = state["best"]
        self.wait = int(state["wait"])
        if self._tracker is not None:
            self._tracker.best = self.best

    # -------------------------------------------------------------------------------------

    def _reset(self) -> None:
        self.best, self.wait, self.stopped_epoch = None, 0, None
        self._selected = self.monitor if isinstance(self.monitor, str) else None
        self._tracker = None
        self._warned = False

    def _improved(self, ctx: _CallbackContext) -> bool | None:
        """Whether the epoch improved; ``None`` when it does not count."""
        idp = ctx.idp
        assert idp is not None
        if self._tracker is not None and self.monitor_spec is not None:
            value = self.monitor_spec.value(train=idp.train_summary, val=idp.val_edp)
            record = self._tracker.observe(value, epoch=ctx.epoch)
            if record.improved:
                self.best = record.value
            return None if record.status == "missing" else record.improved
        value = self._read(idp)
        if value is None:
            self._warn_missing(idp)
            return None
        improved = self._rule.improved(value, self.best)
        if improved:
            self.best = value
        return improved

    def _read(self, idp: NNIterationDataPoint) -> float | None:
        """The watched value, choosing the default field at its first finite value."""
        if self._selected is not None:
            return field_value(idp, self._selected)
        signal = control_signal(idp, _DEFAULT_FIELDS)
        self._selected = signal.source
        return math.nan if signal.value is None and signal.rejected else signal.value

    def _warn_missing(self, idp: NNIterationDataPoint) -> None:
        if self._warned:
            return
        self._warned = True
        watched = self._selected or " or ".join(_DEFAULT_FIELDS)
        record = watched.partition(".")[0]
        missing = f"{record} has no such value"
        if getattr(idp, record) is None:
            missing = f"there is no {record}"
            if record == "val_edp":
                missing += " (no validation loader?)"
        warn_caller(
            f"EarlyStopping watches {watched}, but {missing}; epochs without it do not count "
            "toward patience",
            RuntimeWarning,
        )

    def _identity(self) -> dict[str, Any]:
        """What must agree for one session's best value to mean something in the next."""
        spec = self.monitor_spec
        if spec is not None:
            return spec.state()
        return {"metric": self.monitor, "mode": self.mode, "min_delta": self.min_delta}


def _monitor_of(ctx: _CallbackContext) -> MonitorSpec | None:
    """What the run itself watches, if it watches anything by name."""
    run = getattr(ctx, "run", None)
    if run is None:
        return None
    params = run.train if run.trainer is None else run.trainer
    return None if params.monitor is None else params.monitor.resolve(params.metrics)


def _check_field(monitor: Any) -> None:
    if monitor not in FIELDS:
        raise ValueError(
            f"EarlyStopping.monitor must be one of {', '.join(FIELDS)}, a MonitorSpec or None, not "
            f"{check.show(monitor)}. Accuracy, f1 and declared metrics are watched with "
            "MonitorSpec(metric)."
        )
