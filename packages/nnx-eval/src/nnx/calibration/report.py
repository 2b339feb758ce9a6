"""What a calibrator changed on rows that it was not fitted on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from nnx.utils.artifacts import JsonArtifact
from nnx.utils.jsonlike import freeze_mapping, thaw

from .errors import CalibrationError
from .metrics import CalibrationMetrics

OUTCOMES = ("improved", "worsened", "mixed", "unchanged")
_FIELDS = (
    "calibrator_id", "model_id", "labels", "temperature", "split_id", "calibration_split_id",
    "n_samples", "n_bins", "epsilon", "before", "after", "outcome", "override",
    "train_split_id", "test_split_id",
)  # fmt: skip
_OPTIONAL = ("override", "train_split_id", "test_split_id")


def outcome_of(before: CalibrationMetrics, after: CalibrationMetrics) -> str:
    """ "improved" when neither NLL nor Brier got worse and one got better; or the other words."""
    pairs = ((before.nll, after.nll), (before.brier, after.brier))
    better, worse = any(b > a for b, a in pairs), any(b < a for b, a in pairs)
    return {(True, False): "improved", (False, True): "worsened", (True, True): "mixed"}.get(
        (better, worse), "unchanged"
    )


@dataclass(frozen=True, slots=True)
class CalibrationReport(JsonArtifact):
    """Held-out metrics before and after calibration, side by side."""

    calibrator_id: str
    model_id: str
    labels: tuple[str, ...]
    temperature: float | None
    split_id: str
    calibration_split_id: str
    n_samples: int
    n_bins: int
    epsilon: float | None
    before: CalibrationMetrics
    after: CalibrationMetrics
    outcome: str
    override: Mapping[str, Any] | None = None
    train_split_id: str | None = None
    test_split_id: str | None = None

    FORMAT: ClassVar[str] = "nnx.calibration/1"
    _error: ClassVar[type[ValueError]] = CalibrationError

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", tuple(self.labels))
        if self.override is not None:
            object.__setattr__(self, "override", freeze_mapping(self.override, "override"))
        wanted = outcome_of(self.before, self.after)
        if self.outcome != wanted:
            raise CalibrationError(
                f"a report with these numbers is {wanted!r}, not {self.outcome!r}"
            )

    @property
    def improved(self) -> bool:
        """Whether NLL or Brier got better and neither got worse."""
        return self.outcome == "improved"

    def summary(self) -> str:
        """One sentence with the numbers; of a worsened report also what to do."""
        changes = (
            f"held-out NLL {self.before.nll:.6g} -> {self.after.nll:.6g} and "
            f"Brier {self.before.brier:.6g} -> {self.after.brier:.6g}"
        )
        verb = "left" if self.outcome == "unchanged" else self.outcome
        if self.outcome == "mixed":
            verb = "has mixed effects on"
        text = (
            f"calibration {verb} {changes}{' unchanged' if verb == 'left' else ''} on split "
            f"{self.split_id!r} ({self.n_samples} samples{self._how()})"
        )
        if self.outcome == "worsened":
            text += "; keep the uncalibrated probabilities"
        return text

    def _how(self) -> str:
        return "" if self.temperature is None else f", temperature {self.temperature:.6g}"

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"format": self.FORMAT, "kind": "report"}
        for name in _FIELDS:
            value = getattr(self, name)
            state[name] = value.state() if isinstance(value, CalibrationMetrics) else thaw(value)
        return state

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> CalibrationReport:
        fields = cls._open(state, {name: name not in _OPTIONAL for name in _FIELDS}, kind="report")
        fields["before"] = CalibrationMetrics.from_state(fields["before"])
        fields["after"] = CalibrationMetrics.from_state(fields["after"])
        try:
            return cls(**fields)
        except (TypeError, AttributeError) as error:
            raise CalibrationError(f"this is no calibration report: {error}") from None
