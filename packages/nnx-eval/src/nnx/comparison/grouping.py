"""Observations that may be pooled, and what they say together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nnx.comparison.observations import (
    ComparisonError,
    IncompatibleObservations,
    Metric,
    Observation,
)

# What observations must share to be pooled, and all but the first are identities.
POOLED_BY = ("metric", "split", "selection", "config", "data", "split_id")
_MAY_BE_UNKNOWN = ("config", "data", "split_id")


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """Attempts that differ in nothing but chance, and the mean of those that count.

    ``n`` counts completed attempts with a finite value; ``n_failed`` those that did not
    complete, ``n_nonfinite`` those that completed without a finite value. ``std`` has the
    denominator ``n - 1``. A statistic that is not defined is ``None``.
    """

    metric: Metric
    split: str
    selection: str
    config: str | None
    data: str | None
    split_id: str | None
    observations: tuple[Observation, ...]
    n: int = field(init=False)
    n_attempts: int = field(init=False)
    n_failed: int = field(init=False)
    n_nonfinite: int = field(init=False)
    mean: float | None = field(init=False)
    std: float | None = field(init=False)

    def __post_init__(self) -> None:
        rows = tuple(sorted(self.observations, key=_order))
        values = [float(row.value) for row in rows if row.counts and row.value is not None]
        mean, std = moments(values)
        for name, value in (
            ("observations", rows),
            ("n", len(values)),
            ("n_attempts", len(rows)),
            ("n_failed", sum(row.status != "completed" for row in rows)),
            ("n_nonfinite", sum(row.status == "completed" and not row.finite for row in rows)),
            ("mean", mean),
            ("std", std),
        ):
            object.__setattr__(self, name, value)

    @property
    def unknown(self) -> tuple[str, ...]:
        """The identities that nobody recorded."""
        return tuple(name for name in _MAY_BE_UNKNOWN if getattr(self, name) is None)

    def label(self) -> str:
        """One line that names the group."""
        parts = [f"{self.metric} on {self.split}, {self.selection}"]
        for name in _MAY_BE_UNKNOWN:
            value = getattr(self, name)
            parts.append(f"{name} {'unknown' if value is None else value[:12]}")
        return ", ".join(parts)

    def state(self) -> dict[str, Any]:
        return {
            "metric": self.metric.state(),
            **{name: getattr(self, name) for name in POOLED_BY[1:]},
            "observations": [row.id for row in self.observations],
            **{name: getattr(self, name) for name in _STATISTICS},
        }


_STATISTICS = ("n", "n_attempts", "n_failed", "n_nonfinite", "mean", "std")


@dataclass(frozen=True, slots=True)
class Summary:
    """One group for each combination of what may not be pooled."""

    groups: tuple[GroupSummary, ...]

    @property
    def observations(self) -> tuple[Observation, ...]:
        """All observations, group by group."""
        return tuple(row for group in self.groups for row in group.observations)

    @property
    def differing(self) -> tuple[str, ...]:
        """The fields in which the groups differ."""
        return differing_fields(self.groups)

    def pooled(self) -> GroupSummary:
        """The one group; :class:`IncompatibleObservations` when there are several."""
        if not self.groups:
            raise ComparisonError("there is no observation to pool")
        if len(self.groups) > 1:
            raise IncompatibleObservations(
                f"the observations are of {len(self.groups)} populations: they differ in "
                f"{', '.join(self.differing)}",
                fields=self.differing,
            )
        return self.groups[0]

    def state(self) -> dict[str, Any]:
        return {
            "groups": [group.state() for group in self.groups],
            "differing": list(self.differing),
        }


def summarize(observations: Iterable[Observation]) -> Summary:
    """Pool what may be pooled; a failed or non-finite attempt is counted, never dropped.

    Raises :class:`ComparisonError` for an attempt that is there twice for one metric.
    """
    rows = list(observations)
    seen: set[tuple[str, Metric]] = set()
    groups: dict[tuple[Any, ...], list[Observation]] = {}
    for row in rows:
        if not isinstance(row, Observation):
            raise ComparisonError(f"summarize takes Observation values, not {row!r}")
        key = (row.id, row.metric)
        if key in seen:
            raise ComparisonError(
                f"the attempt {row.id} is there twice for {row.metric.name}: one attempt gives one "
                "observation. Summarize its splits or selection rules separately"
            )
        seen.add(key)
        groups.setdefault(tuple(getattr(row, name) for name in POOLED_BY), []).append(row)
    found = [
        GroupSummary(**dict(zip(POOLED_BY, key)), observations=tuple(members))
        for key, members in groups.items()
    ]
    return Summary(tuple(sorted(found, key=group_order)))


def differing_fields(groups: Sequence[Any]) -> tuple[str, ...]:
    """The fields of :data:`POOLED_BY` in which ``groups`` differ."""
    return tuple(name for name in POOLED_BY if len({getattr(g, name) for g in groups}) > 1)


def moments(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean and standard deviation (denominator ``n - 1``); ``None`` where not defined."""
    count = len(values)
    if count == 0:
        return None, None
    scale = max(map(abs, values)) or 1.0
    if not math.isfinite(scale * count):  # sums of such numbers overflow
        shares = [value / scale for value in values]
        mean, std = moments(shares)
        assert mean is not None
        return mean * scale, None if std is None else std * scale
    mean = math.fsum(values) / count
    if count == 1:
        return mean, None
    apart = [(value - mean) / scale for value in values]
    # The mean is rounded; what the deviations still sum to takes that out again.
    rest = math.fsum(apart) ** 2 / count
    square = max(0.0, math.fsum(share**2 for share in apart) - rest)
    return mean, math.sqrt(square / (count - 1)) * scale


def group_order(group: GroupSummary) -> tuple[str, ...]:
    """Groups are listed by what they are, not by who came first."""
    metric = group.metric
    texts = (metric.name, metric.direction, metric.unit or "")
    return (*texts, *(getattr(group, name) or "" for name in POOLED_BY[1:]))


def _order(row: Observation) -> tuple[str, ...]:
    return (row.replicate or "", row.id)
