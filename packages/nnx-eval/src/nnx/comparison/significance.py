"""Tests on paired differences, and corrections for many of them. NumPy alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from nnx.comparison.grouping import moments
from nnx.comparison.observations import ComparisonError

CORRECTIONS = ("holm", "benjamini-hochberg")
_EXACT = 16  # up to so many differences, all their signs are tried


@dataclass(frozen=True, slots=True)
class TestResult:
    """A two-sided p-value; ``None`` where the data cannot decide, and ``note`` says why."""

    __test__ = False  # no test of pytest's

    method: str
    n: int
    statistic: float | None
    p_value: float | None
    note: str | None = None


def paired_t(deltas: Sequence[float]) -> TestResult:
    """Student's t of the mean difference against 0; assumes differences that are about normal."""
    values = _values(deltas)
    mean, std = moments(values)
    count = len(values)
    if mean is None or std is None:
        return TestResult("paired t", count, None, None, "needs two differences or more")
    if std == 0:
        note = "all differences are equal, so their spread says nothing"
        return TestResult("paired t", count, None, None if mean else 1.0, note)
    statistic = mean / (std / math.sqrt(count))
    return TestResult("paired t", count, statistic, 2 * t_tail(abs(statistic), count - 1))


def t_interval(deltas: Sequence[float], level: float = 0.95) -> tuple[float, float] | None:
    """The interval of the mean difference by Student's t; ``None`` for fewer than two."""
    values = _values(deltas)
    mean, std = moments(values)
    if mean is None or std is None:
        return None
    half = t_quantile((1 + level) / 2, len(values) - 1) * std / math.sqrt(len(values))
    return mean - half, mean + half


def wilcoxon(deltas: Sequence[float]) -> TestResult:
    """The signed-rank test (Wilcoxon, 1945), exact, with mid-ranks; zero differences are left out."""
    values = np.array([value for value in _values(deltas) if value != 0])
    count = len(values)
    if count == 0:
        return TestResult("wilcoxon", 0, None, 1.0, "no difference is other than 0")
    _, place, many = np.unique(np.abs(values), return_inverse=True, return_counts=True)
    ends = np.cumsum(many)
    doubled = (2 * ends - many + 1)[place]  # twice the mid-rank is whole
    positive = int(doubled[values > 0].sum())
    ways = np.zeros(int(doubled.sum()) + 1)
    ways[0] = 1.0
    for rank in doubled:  # the distribution of the rank sum under random signs
        shifted = np.zeros_like(ways)
        shifted[rank:] = ways[: len(ways) - rank]
        ways = (ways + shifted) / 2
    smaller = min(positive, len(ways) - 1 - positive)
    p_value = min(1.0, 2 * float(ways[: smaller + 1].sum()))
    return TestResult("wilcoxon", count, positive / 2, p_value)


def permutation(deltas: Sequence[float], *, resamples: int = 10_000, seed: int = 0) -> TestResult:
    """How often random signs of the differences give a mean as far from 0 (Fisher, 1935).

    Exact over all signs of up to 16 differences; of more, over ``resamples`` drawn ones and
    the observed, so that the p-value is never 0.
    """
    values = np.array(_values(deltas))
    count = len(values)
    if count == 0:
        return TestResult("permutation", 0, None, None, "there is no difference")
    observed = abs(float(values.sum()))
    least = observed * (1 - 1e-12)  # sums in another order differ by rounding
    if count <= _EXACT:
        sums = np.zeros(1)
        for value in values:
            sums = np.concatenate([sums + value, sums - value])
        p_value = float((np.abs(sums) >= least).mean())
    else:
        draw = np.random.default_rng(seed)
        found = 1
        for start in range(0, resamples, 1000):
            signs = draw.integers(0, 2, (min(1000, resamples - start), count)) * 2 - 1
            found += int((np.abs(signs @ values) >= least).sum())
        p_value = found / (resamples + 1)
    return TestResult("permutation", count, float(values.mean()), p_value)


def mcnemar(correct_a: Sequence[bool], correct_b: Sequence[bool]) -> TestResult:
    """Which of two classifiers is right on the items where one is: McNemar's mid-p test.

    ``correct_a`` and ``correct_b`` are about the same items in the same order (Fagerland et
    al., 2013). The statistic is the number of items on which B alone is right.
    """
    left, right = np.asarray(correct_a, dtype=bool), np.asarray(correct_b, dtype=bool)
    if left.ndim != 1 or left.shape != right.shape:
        raise ComparisonError(
            f"the two sides must be right or wrong about the same items, not {left.shape} and "
            f"{right.shape}"
        )
    only_a, only_b = int((left & ~right).sum()), int((right & ~left).sum())
    count = only_a + only_b
    if count == 0:
        return TestResult("mcnemar mid-p", 0, 0.0, 1.0, "both sides are right on the same items")
    smaller = min(only_a, only_b)
    log_half = -count * math.log(2)
    chances = [
        math.exp(
            math.lgamma(count + 1) - math.lgamma(i + 1) - math.lgamma(count - i + 1) + log_half
        )
        for i in range(smaller + 1)
    ]
    p_value = 2 * (math.fsum(chances) - chances[-1] / 2)
    return TestResult("mcnemar mid-p", count, float(only_b), min(1.0, p_value))


def correct(p_values: Mapping[str, float | None], method: str = "holm") -> dict[str, float | None]:
    """Adjusted p-values of a family of tests, by name; those that are ``None`` stay so.

    "holm" bounds the chance of any false claim (Holm, 1979), "benjamini-hochberg" the
    expected share of false ones among the claims (1995).
    """
    if method not in CORRECTIONS:
        raise ComparisonError(f"method must be one of {', '.join(CORRECTIONS)}, not {method!r}")
    known = {name: float(p) for name, p in p_values.items() if p is not None}
    for name, p in known.items():
        if not 0 <= p <= 1:
            raise ComparisonError(f"the p-value of {name} is {p!r}, not in [0, 1]")
    order = sorted(known, key=lambda name: known[name])
    count = len(order)
    adjusted: dict[str, float | None] = dict.fromkeys(p_values)
    running: list[float]
    if method == "holm":
        scaled = [min(1.0, known[name] * (count - i)) for i, name in enumerate(order)]
        running = list(itertools.accumulate(scaled, max))
    else:
        scaled = [min(1.0, known[name] * count / (i + 1)) for i, name in enumerate(order)]
        running = list(itertools.accumulate(scaled[::-1], min))[::-1]
    adjusted.update(zip(order, running))
    return adjusted


# Student's t ------------------------------------------------------------------------------


def t_tail(t: float, degrees: int) -> float:
    """The chance of a value above ``t >= 0`` under Student's t."""
    return _beta_share(degrees / 2, 0.5, degrees / (degrees + t * t)) / 2


def t_quantile(chance: float, degrees: int) -> float:
    """The value below which Student's t is with ``chance`` (above 1/2)."""
    if not 0.5 < chance < 1:
        raise ComparisonError(f"level must be between 0 and 1, not {2 * chance - 1!r}")
    low, high = 0.0, 1.0
    while t_tail(high, degrees) > 1 - chance:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, degrees) > 1 - chance else (low, middle)
    return (low + high) / 2


def _beta_share(a: float, b: float, x: float) -> float:
    """The regularized incomplete beta function by its continued fraction (Lentz)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta_share(b, a, 1 - x)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
        + a * math.log(x) + b * math.log1p(-x)
    )  # fmt: skip
    tiny = 1e-300
    c, d = 1.0, 1.0 / (1 - (a + b) * x / (a + 1) or tiny)
    fraction = d
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for numerator in (even, odd):
            d = 1.0 / ((1 + numerator * d) or tiny)
            c = (1 + numerator / c) or tiny
            fraction *= c * d
        if abs(c * d - 1) < 1e-16:
            break
    return front * fraction / a


def _values(deltas: Sequence[float]) -> list[float]:
    values = [float(value) for value in deltas]
    if not all(map(math.isfinite, values)):
        raise ComparisonError("differences must be finite")
    return values
