"""The decision of each epoch, and its memory of the best value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nnx.errors import NNxError
from nnx.params.component import ComponentSpec
from nnx.params.monitor import MonitorRecord as MonitorRecord
from nnx.params.monitor import MonitorSpec as MonitorSpec
from nnx.params.registered import MetricSpec as MetricSpec
from nnx.utils.caller import warn_caller

COMPONENT = "nnx.monitor"
_IDENTITY = ("metric", "split", "mode", "min_delta")


class MonitorUnavailableError(ValueError, NNxError):
    """A monitored value is missing or non-finite and its policy says "error"."""


class MonitorTracker:
    """Applies a resolved :class:`MonitorSpec` to one value per epoch.

    It is a component: its best value is saved with a run's checkpoints, so that
    a resumed run improves exactly where the uninterrupted one would. With
    ``warn_missing`` the first epoch without a value warns.
    """

    def __init__(self, spec: MonitorSpec, *, warn_missing: bool = False) -> None:
        if spec.mode is None:
            raise ValueError(
                f"the monitor {spec.key} has no direction yet; pass spec.resolve(metrics)"
            )
        self.spec = spec
        self.best: float | None = None
        self._warn_missing = warn_missing

    def observe(self, value: float | None, *, epoch: int) -> MonitorRecord:
        """Decide on this epoch's value.

        A missing value decides nothing; a NaN or infinite one is an epoch
        without improvement. Either raises :class:`MonitorUnavailableError`
        under the policy "error".
        """
        spec = self.spec
        if value is None:
            self._refuse(spec.on_missing, f"has no value in epoch {epoch}")
            if self._warn_missing:
                self._warn_missing = False
                warn_caller(
                    f"the monitor {spec.key} has no value in epoch {epoch}; epochs without one "
                    "decide nothing",
                    RuntimeWarning,
                )
            return MonitorRecord(monitor=spec, value=None, status="missing", improved=False)
        value = float(value)
        if not math.isfinite(value):
            self._refuse(spec.on_nonfinite, f"is {value} in epoch {epoch}")
            return MonitorRecord(monitor=spec, value=value, status="nonfinite", improved=False)
        improved = spec.improved(value, self.best)
        if improved:
            self.best = value
        return MonitorRecord(monitor=spec, value=value, status="ok", improved=improved)

    def component_spec(self) -> ComponentSpec:
        return ComponentSpec(COMPONENT, version=1, required=False)

    def component_state(self) -> dict[str, Any]:
        """The monitor and its best value, ``None`` before the first finite one."""
        return {"monitor": self.spec.state(), "best": self.best}

    def load_component_state(self, state: Mapping[str, Any], *, version: int) -> None:
        problems = self.check_component_state(state, version=version)
        if problems:
            raise ValueError("; ".join(problems))
        best = state["best"]
        self.best = None if best is None else float(best)

    def check_component_state(self, state: Mapping[str, Any], *, version: int) -> list[str]:
        """What keeps ``state`` from continuing here: another monitor, or no state of one."""
        saved, best = state.get("monitor"), state.get("best", self)
        if not isinstance(saved, Mapping) or not isinstance(best, (int, float, type(None))):
            return ["the saved monitor state has no 'monitor' and 'best'"]
        mine = self.spec.state()
        return [
            f"the checkpoint monitored {field}={saved.get(field)!r}, this run monitors "
            f"{field}={mine[field]!r}"
            for field in _IDENTITY
            if saved.get(field) != mine[field]
        ]

    def _refuse(self, policy: str, what: str) -> None:
        if policy == "error":
            raise MonitorUnavailableError(f"the monitor {self.spec.key} {what}")
