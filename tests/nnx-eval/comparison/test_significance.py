"""Tests and corrections against SciPy and against counting."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nnx.comparison import (
    ComparisonError,
    SequentialTest,
    correct,
    mcnemar,
    paired_t,
    permutation,
    t_interval,
    wilcoxon,
)
from nnx.comparison.significance import t_quantile, t_tail
from scipy import stats


@pytest.mark.parametrize("count", [2, 3, 5, 12, 60])
def test_the_paired_t_test_and_its_interval(count) -> None:
    deltas = np.random.default_rng(count).normal(0.3, 1.0, count)
    wanted = stats.ttest_1samp(deltas, 0.0)
    found = paired_t(deltas)
    assert (found.statistic, found.p_value) == pytest.approx((wanted.statistic, wanted.pvalue))
    interval = wanted.confidence_interval(0.9)
    assert t_interval(deltas, 0.9) == pytest.approx((interval.low, interval.high))


@pytest.mark.parametrize("degrees", [1, 2, 7, 30, 1000])
def test_students_t_is_scipys(degrees) -> None:
    for t in (0.0, 0.3, 1.0, 4.0, 40.0):
        assert t_tail(t, degrees) == pytest.approx(stats.t.sf(t, degrees), rel=1e-9)
    for chance in (0.6, 0.975, 0.9995):
        assert t_quantile(chance, degrees) == pytest.approx(stats.t.ppf(chance, degrees))


@pytest.mark.parametrize("count", [3, 6, 20, 45])
def test_the_signed_rank_test_is_exact(count) -> None:
    deltas = np.random.default_rng(count).normal(0.2, 1.0, count)
    wanted = stats.wilcoxon(deltas, method="exact")
    assert wilcoxon(deltas).p_value == pytest.approx(wanted.pvalue)


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=9))
def test_signs_are_counted_with_ties_and_zeros(deltas) -> None:
    nonzero = [d for d in deltas if d]
    ranks = stats.rankdata(np.abs(nonzero)) if nonzero else []
    center = sum(ranks) / 2
    observed = abs(sum(r for r, d in zip(ranks, nonzero) if d > 0) - center)
    signs = list(itertools.product([0, 1], repeat=len(nonzero)))
    hits = sum(abs(sum(r * s for r, s in zip(ranks, row)) - center) >= observed for row in signs)
    assert wilcoxon(deltas).p_value == pytest.approx(hits / len(signs))
    all_signs = list(itertools.product([-1, 1], repeat=len(deltas)))
    far = sum(abs(sum(s * d for s, d in zip(row, deltas))) >= abs(sum(deltas)) for row in all_signs)
    assert permutation(deltas).p_value == pytest.approx(far / len(all_signs))


def test_many_differences_are_permuted_at_random_and_never_give_zero() -> None:
    deltas = np.random.default_rng(0).normal(0.3, 1.0, 40)
    assert permutation(deltas).p_value == pytest.approx(paired_t(deltas).p_value, abs=0.02)
    assert permutation(deltas) == permutation(deltas)
    assert permutation(np.ones(40), resamples=99).p_value == pytest.approx(0.01)


@pytest.mark.parametrize(("b", "c"), [(0, 0), (3, 1), (0, 6), (10, 10), (150, 260)])
def test_mcnemars_mid_p(b, c) -> None:
    left = [True] * b + [False] * c + [True, False]
    right = [False] * b + [True] * c + [True, False]
    found = mcnemar(left, right)
    n, k = b + c, min(b, c)
    wanted = 1.0 if n == 0 else 2 * stats.binom.cdf(k, n, 0.5) - stats.binom.pmf(k, n, 0.5)
    assert found.p_value == pytest.approx(min(1.0, wanted))
    assert found.statistic == c
    with pytest.raises(ComparisonError, match="the same items"):
        mcnemar([True], [True, False])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=10))
def test_corrections_over_a_family(values) -> None:
    names = {f"t{i}": p for i, p in enumerate(values)}
    found = correct(names, "benjamini-hochberg")
    assert [found[n] for n in names] == pytest.approx(list(stats.false_discovery_control(values)))
    count = len(values)
    holm = correct(names, "holm")
    for name, p in names.items():
        steps = [min(1, q * (count - i)) for i, q in enumerate(sorted(values)) if q <= p]
        assert holm[name] == pytest.approx(max(steps))


def test_what_cannot_be_tested_has_no_p_value() -> None:
    assert paired_t([0.3]).p_value is None
    assert paired_t([0.25] * 4).p_value is None  # equal differences say nothing of their spread
    assert "equal" in paired_t([0.25] * 4).note
    assert paired_t([0.0] * 4).p_value == 1.0
    assert wilcoxon([0.0, 0.0]).p_value == 1.0
    assert permutation([]).p_value is None
    assert correct({"a": 0.01, "b": None}) == {"a": 0.01, "b": None}
    with pytest.raises(ComparisonError, match="holm"):
        correct({"a": 0.1}, "bonferroni")
    with pytest.raises(ComparisonError, match="finite"):
        wilcoxon([math.nan])


def test_a_declared_sequential_rule_keeps_its_error_over_all_looks() -> None:
    rule = SequentialTest(looks=(4, 8, 12), alpha=0.1)
    assert sum(rule.threshold(look) for look in rule.looks) == pytest.approx(0.1)
    draw = np.random.default_rng(0)
    claims = 0
    for _ in range(400):  # there is no difference
        deltas = draw.normal(size=12)
        stopped = next((n for n in rule.looks if rule.decide(deltas[:n]) == "difference"), None)
        claims += stopped is not None
    assert claims / 400 < 0.1 + 0.03
    assert rule.decide([2.0, 2.1, 1.9, 2.0]) == "difference"
    assert rule.decide([2.0, -2.1, 1.9, -2.0]) == "continue"
    assert rule.decide([1.0, -1.0] * 6) == "no difference found"
    with pytest.raises(ComparisonError, match="no look after 5 pairs"):
        rule.decide([1.0] * 5)
    with pytest.raises(ComparisonError, match="rise"):
        SequentialTest(looks=(8, 4))
