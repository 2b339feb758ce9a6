"""What a search may spend, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from nnx.utils import validation as check


@dataclass(frozen=True, slots=True)
class SearchBudget:
    """How many trials, how many committed updates each, and for how many seconds.

    Every trial counts: completed, failed, pruned, and one that a crashed process left. A
    deadline starts no trial once it has passed, and stops a running one at its next update
    or epoch.
    """

    trials: int
    updates_per_trial: int | None = None
    deadline_seconds: float | None = None

    def __post_init__(self) -> None:
        check.count("SearchBudget", "trials", self.trials)
        if self.updates_per_trial is not None:
            check.count("SearchBudget", "updates_per_trial", self.updates_per_trial)
        if self.deadline_seconds is not None:
            check.real("SearchBudget", "deadline_seconds", self.deadline_seconds, above=0)


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """One trial: what was tried, how it ended, what it cost, and where its run is.

    ``state`` is "completed", "pruned", "failed" or "orphaned". ``reason`` is "completed",
    "update_cap", "deadline", "stopped", "pruned", "nonfinite", "missing", "no_epoch", "error",
    "configuration", "cancelled", "reused" or "orphaned". ``monitor_value`` is that of the epoch
    that BEST holds, ``observations`` the ``(epoch, value)`` pairs that the pruner saw.
    """

    number: int
    params: Mapping[str, Any]
    state: str
    reason: str
    monitor_value: float | None = None
    epochs: int = 0
    updates: int = 0
    seconds: float = 0.0
    overrun_seconds: float | None = None
    observations: tuple[tuple[int, float], ...] = ()
    attempt_id: str | None = None
    run_id: str | None = None
    checkpoint: str | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", MappingProxyType(dict(self.params)))
        pairs = tuple((int(epoch), float(value)) for epoch, value in self.observations)
        object.__setattr__(self, "observations", pairs)

    def attributes(self) -> dict[str, Any]:
        """What a storage keeps of the outcome beside Optuna's own facts."""
        skipped = ("number", "params")
        state = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in skipped}
        return {**state, "observations": [list(pair) for pair in self.observations]}


def _nothing() -> Mapping[int, Any]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Every trial of a study, and the completed one with the best finite value.

    ``asked`` is how many trials count against the budget, ``stop_reason`` "budget", "deadline"
    or "exhausted". ``trial_runs`` holds the runs that this call trained, by trial number.
    """

    study_name: str
    outcomes: tuple[TrialOutcome, ...]
    best: TrialOutcome | None
    asked: int
    stop_reason: str
    direction: str
    monitor: str
    deadline_overrun_seconds: float | None = None
    trial_runs: Mapping[int, Any] = field(default_factory=_nothing)
