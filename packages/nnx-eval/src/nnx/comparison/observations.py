"""One value of one attempt, and all that must be equal before it is compared."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from nnx.errors import NNxError
from nnx.params.monitor import MODES
from nnx.utils import validation as check

FORMAT = "nnx.comparison/1"
STATUSES = ("completed", "failed", "cancelled", "running", "unknown")


class ComparisonError(ValueError, NNxError):
    """Observations that cannot be summarized or compared as asked."""


class IncompatibleObservations(ComparisonError):
    """Observations that are not of one population; ``fields`` names what differs."""

    def __init__(self, message: str, *, fields: Sequence[str]) -> None:
        self.fields = tuple(fields)
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Metric:
    """What was measured: its name, which direction is better, its unit."""

    name: str
    direction: str
    unit: str | None = None

    def __post_init__(self) -> None:
        _checked(lambda: check.text("Metric", "name", self.name))
        _checked(lambda: check.choice("Metric", "direction", self.direction, MODES))
        if self.unit is not None:
            _checked(lambda: check.text("Metric", "unit", self.unit))

    def state(self) -> dict[str, Any]:
        return {"name": self.name, "direction": self.direction, "unit": self.unit}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Metric:
        return Metric(**_known("Metric", state, ("name", "direction", "unit")))

    def __str__(self) -> str:
        return f"{self.name} ({self.direction}{f', {self.unit}' if self.unit else ''})"


@dataclass(frozen=True, slots=True)
class Observation:
    """The value of ``metric`` that one attempt of one run gave; unknown facts are ``None``.

    ``split`` names the evaluated data and ``split_id`` identifies it, ``selection`` says by
    which rule the epoch was chosen, ``config`` and ``data`` identify what was trained on what.
    ``replicate`` is what a comparison pairs on, and ``evaluation`` a note of how the value
    was computed. ``value`` is ``None`` when it is not known.
    """

    run_id: str
    metric: Metric
    value: float | None
    split: str
    selection: str
    status: str = "completed"
    attempt_id: str | None = None
    config: str | None = None
    data: str | None = None
    split_id: str | None = None
    replicate: str | None = None
    evaluation: str | None = None

    def __post_init__(self) -> None:
        owner = "Observation"
        for name in ("run_id", "split", "selection"):
            _checked(lambda name=name: check.text(owner, name, getattr(self, name)))
        if not isinstance(self.metric, Metric):
            raise ComparisonError(f"Observation.metric must be a Metric, not {self.metric!r}")
        _checked(lambda: check.choice(owner, "status", self.status, STATUSES))
        for name in _IDENTITIES:
            if getattr(self, name) is not None:
                _checked(lambda name=name: check.text(owner, name, getattr(self, name)))
        value: Any = self.value
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                raise ComparisonError(f"Observation.value must be a number or None, not {value!r}")
            object.__setattr__(self, "value", float(value))

    @property
    def id(self) -> str:
        """The run and, where it is known, the attempt."""
        return self.run_id if self.attempt_id is None else f"{self.run_id}/{self.attempt_id}"

    @property
    def finite(self) -> bool:
        """Whether there is a value, neither NaN nor infinite."""
        return self.value is not None and math.isfinite(self.value)

    @property
    def counts(self) -> bool:
        """Whether it takes part in statistics: completed, with a finite value."""
        return self.status == "completed" and self.finite

    def state(self) -> dict[str, Any]:
        state = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**state, "metric": self.metric.state(), "value": _encoded(self.value)}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Observation:
        values = _known("Observation", state, tuple(f.name for f in fields(Observation)))
        values["metric"] = Metric.from_state(values["metric"])
        values["value"] = _decoded(values.get("value"))
        return Observation(**values)


_IDENTITIES = ("attempt_id", "config", "data", "split_id", "replicate", "evaluation")


def _encoded(value: float | None) -> Any:
    """Strict JSON has no NaN: what is not finite is stored as its name."""
    return value if value is None or math.isfinite(value) else str(value)


def _decoded(value: Any) -> Any:
    return float(value) if value in ("nan", "inf", "-inf") else value


def _known(owner: str, state: Any, names: Sequence[str]) -> dict[str, Any]:
    if not isinstance(state, Mapping):
        raise ComparisonError(f"a stored {owner} must be a mapping, not {state!r}")
    if unknown := sorted(set(state) - set(names)):
        raise ComparisonError(f"a stored {owner} has no {', '.join(unknown)}")
    try:
        return dict(state)
    except TypeError as error:
        raise ComparisonError(str(error)) from None


def _checked(checked: Any) -> None:
    try:
        checked()
    except ValueError as error:
        raise ComparisonError(str(error)) from None
