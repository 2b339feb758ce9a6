"""Two sides, paired by replicate: the signed differences and how they vary."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from nnx.comparison.grouping import GroupSummary, differing_fields, moments, summarize
from nnx.comparison.observations import (
    ComparisonError,
    IncompatibleObservations,
    Metric,
    Observation,
)
from nnx.utils import validation as check

_BLOCK = 1 << 22  # resampled values that are in memory at once


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """A percentile interval of the mean over resampled replicate pairs (Efron, 1979).

    It describes how the mean varies with the seed over these replicates. The draws are
    those of ``numpy.random.default_rng(seed)``; no global stream moves.
    """

    seed: int
    resamples: int = 2000
    level: float = 0.95

    def __post_init__(self) -> None:
        try:
            check.count("Bootstrap", "seed", self.seed, at_least=0)
            check.count("Bootstrap", "resamples", self.resamples)
            check.real("Bootstrap", "level", self.level, above=0, below=1)
        except ValueError as error:
            raise ComparisonError(str(error)) from None

    def interval(self, deltas: Sequence[float]) -> tuple[float, float] | None:
        """Lower and upper end; ``None`` for fewer than two differences."""
        values = np.asarray(deltas, dtype=np.float64)
        if values.ndim != 1 or not bool(np.isfinite(values).all()):
            raise ComparisonError("deltas must be a sequence of finite numbers")
        if len(values) < 2:
            return None
        if bool((values == values[0]).all()):  # no resample can differ
            return float(values[0]), float(values[0])
        draw = np.random.default_rng(self.seed)
        means = np.empty(self.resamples)
        step = max(1, _BLOCK // len(values))
        for start in range(0, self.resamples, step):
            rows = min(step, self.resamples - start)
            chosen = draw.integers(0, len(values), size=(rows, len(values)))
            means[start : start + rows] = values[chosen].mean(axis=1)
        tail = (1.0 - self.level) / 2.0
        low, high = np.quantile(means, [tail, 1.0 - tail])
        return float(low), float(high)

    def state(self) -> dict[str, Any]:
        return {
            "method": "percentile",
            "unit": "replicate",
            "seed": self.seed,
            "resamples": self.resamples,
            "level": self.level,
        }


@dataclass(frozen=True, slots=True)
class Pair:
    """One replicate on both sides; ``delta`` is B - A, ``None`` where a side has no value."""

    replicate: str
    a: str
    b: str
    delta: float | None

    def state(self) -> dict[str, Any]:
        return {"replicate": self.replicate, "a": self.a, "b": self.b, "delta": self.delta}


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """B against A, replicate by replicate; ``pairing`` says what an equal key means.

    A difference is never flipped: of a metric to minimize, a negative one means that B is
    lower. ``n`` counts the finite differences, ``n_nonfinite`` matched pairs whose
    difference overflows.
    """

    a: GroupSummary
    b: GroupSummary
    pairing: str
    bootstrap: Bootstrap | None = None
    pairs: tuple[Pair, ...] = field(init=False)
    unmatched_a: tuple[tuple[str, str], ...] = field(init=False)
    unmatched_b: tuple[tuple[str, str], ...] = field(init=False)
    n: int = field(init=False)
    n_nonfinite: int = field(init=False)
    mean: float | None = field(init=False)
    std: float | None = field(init=False)
    interval: tuple[float, float] | None = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.pairing, str) or not self.pairing.strip():
            raise ComparisonError(
                "pairing must say what an equal replicate key means, such as 'equal seeds give "
                f"equal data order and initial weights'; it is {self.pairing!r}"
            )
        self._check_sides()
        left, right = (_by_replicate(side, name) for side, name in ((self.a, "A"), (self.b, "B")))
        pairs, overflown = [], 0
        for key in sorted(left.keys() & right.keys()):
            one, other = left[key], right[key]
            delta = None
            if one.counts and other.counts:
                assert one.value is not None
                assert other.value is not None
                delta = other.value - one.value
                if not math.isfinite(delta):
                    overflown, delta = overflown + 1, None
            pairs.append(Pair(key, one.id, other.id, delta))
        deltas = [pair.delta for pair in pairs if pair.delta is not None]
        mean, std = moments(deltas)
        interval = None if self.bootstrap is None else self.bootstrap.interval(deltas)
        for name, value in (
            ("pairs", tuple(pairs)),
            ("unmatched_a", tuple((k, left[k].id) for k in sorted(left.keys() - right.keys()))),
            ("unmatched_b", tuple((k, right[k].id) for k in sorted(right.keys() - left.keys()))),
            ("n", len(deltas)),
            ("n_nonfinite", overflown),
            ("mean", mean),
            ("std", std),
            ("interval", interval),
        ):
            object.__setattr__(self, name, value)

    @property
    def metric(self) -> Metric:
        """What both sides measured."""
        return self.a.metric

    @property
    def deltas(self) -> tuple[float, ...]:
        """The finite differences B - A, in the order of the pairs."""
        return tuple(pair.delta for pair in self.pairs if pair.delta is not None)

    def state(self) -> dict[str, Any]:
        return {
            "pairing": self.pairing,
            "a": self.a.state(),
            "b": self.b.state(),
            "bootstrap": None if self.bootstrap is None else self.bootstrap.state(),
            "pairs": [pair.state() for pair in self.pairs],
            "unmatched_a": [list(item) for item in self.unmatched_a],
            "unmatched_b": [list(item) for item in self.unmatched_b],
            "n": self.n,
            "n_nonfinite": self.n_nonfinite,
            "mean": self.mean,
            "std": self.std,
            "interval": None if self.interval is None else list(self.interval),
        }

    def _check_sides(self) -> None:
        for name, side in (("a", self.a), ("b", self.b)):
            if not isinstance(side, GroupSummary):
                raise ComparisonError(f"{name} must be a GroupSummary; compare(...) makes both")
        fields = tuple(f for f in differing_fields((self.a, self.b)) if f != "config")
        if fields:
            shown = "; ".join(
                f"{name}: {_show(getattr(self.a, name))} and {_show(getattr(self.b, name))}"
                for name in fields
            )
            raise IncompatibleObservations(
                f"the sides may differ in their configuration alone, but they do in {shown}",
                fields=fields,
            )


def compare(
    a: Iterable[Observation],
    b: Iterable[Observation],
    *,
    pairing: str,
    bootstrap: Bootstrap | None = None,
) -> PairedComparison:
    """The differences B - A of replicates with equal keys.

    ``pairing`` states what an equal key means: an equal seed alone does not prove the same
    data order or split. Raises :class:`ComparisonError` for a side without observations
    or without unique replicate keys, and :class:`IncompatibleObservations` for a side of
    several populations and for sides that differ in more than their configuration.
    """
    return PairedComparison(summarize(a).pooled(), summarize(b).pooled(), pairing, bootstrap)


def _by_replicate(side: GroupSummary, name: str) -> dict[str, Observation]:
    found: dict[str, Observation] = {}
    for row in side.observations:
        if row.replicate is None:
            raise ComparisonError(
                f"side {name}: {row.id} has no replicate key, so nothing says what it pairs with"
            )
        if row.replicate in found:
            raise ComparisonError(
                f"side {name}: {found[row.replicate].id} and {row.id} have the same replicate key "
                f"{row.replicate!r}"
            )
        found[row.replicate] = row
    return found


def _show(value: Any) -> str:
    return "unknown" if value is None else str(value)
