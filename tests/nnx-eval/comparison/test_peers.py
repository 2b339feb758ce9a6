"""Tests and corrections beside statsmodels, which is installed by hand (group ``peers``)."""

from __future__ import annotations

import numpy as np
import pytest
from nnx.comparison import correct, mcnemar, paired_t, t_interval


def test_corrections_are_those_of_statsmodels() -> None:
    multitest = pytest.importorskip("statsmodels.stats.multitest")
    draw = np.random.default_rng(0)
    for count in (1, 2, 7, 40):
        values = {f"c{i}": float(p) for i, p in enumerate(draw.random(count) ** 3)}
        for ours, theirs in (("holm", "holm"), ("benjamini-hochberg", "fdr_bh")):
            wanted = multitest.multipletests(list(values.values()), method=theirs)[1]
            assert list(correct(values, ours).values()) == pytest.approx(list(wanted))


def test_the_paired_test_and_its_interval_are_those_of_statsmodels() -> None:
    weightstats = pytest.importorskip("statsmodels.stats.weightstats")
    deltas = np.random.default_rng(1).normal(0.3, 1.0, 12)
    theirs = weightstats.DescrStatsW(deltas)
    assert paired_t(deltas).p_value == pytest.approx(theirs.ttest_mean(0.0)[1])
    assert t_interval(deltas) == pytest.approx(theirs.tconfint_mean())


def test_the_mid_p_is_the_exact_test_less_half_the_chance_of_what_was_seen() -> None:
    tables = pytest.importorskip("statsmodels.stats.contingency_tables")
    stats = pytest.importorskip("scipy.stats")
    for b, c in ((3, 11), (8, 2), (0, 6)):
        a_right = np.array([True] * b + [False] * c + [True] * 5)
        b_right = np.array([False] * b + [True] * c + [True] * 5)
        exact = tables.mcnemar([[5, b], [c, 0]], exact=True).pvalue
        seen = stats.binom.pmf(b, b + c, 0.5)
        assert mcnemar(a_right, b_right).p_value == pytest.approx(exact - seen)
