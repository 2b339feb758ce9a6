"""Sets and intervals: exact coverage over many splits, closed forms, and honest small samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_logits import BOUND, LABELS, SPLITS, overconfident
from nnx.calibration import CalibrationError, fit_temperature
from nnx.calibration.rows import RowSet
from nnx.conformal import (
    Cell,
    ConformalError,
    ConformalIntervals,
    ConformalMismatchError,
    ConformalSets,
    SetFitter,
    conformal_rank,
    fit_intervals,
    fit_sets,
)
from scipy.special import softmax
from scipy.stats import betabinom

WHERE = {**BOUND, "split_id": "conformal"}


def made(rows: int = 300, seed: int = 0):
    logits, targets = overconfident(rows, seed=seed)
    return softmax(logits, axis=1), targets


# -- the quantile ------------------------------------------------------------------------------------


@given(st.integers(0, 400), st.integers(1, 99))
def test_the_rank_is_exact_in_decimals(n, percent) -> None:
    wanted = -((n + 1) * (percent - 100) // 100)  # the ceiling of (n + 1) * (1 - percent / 100)
    assert conformal_rank(n, percent / 100) == wanted


def test_few_rows_give_everything_and_one_more_gives_a_threshold() -> None:
    assert Cell.of(np.arange(8.0), 0.1) == Cell(8, 9, None)
    assert Cell.of(np.arange(9.0), 0.1) == Cell(9, 9, 8.0)
    assert Cell.of(np.zeros(0), 0.5).limit == math.inf
    assert Cell.of(np.array([3.0]), 0.5) == Cell(1, 1, 3.0)  # n = 1
    p, y = made(5)
    sets = fit_sets(p, y, alpha=0.1, **WHERE)
    assert sets.predict(p, **BOUND).members.all()
    assert "too few (rank 6 is needed)" in sets.guarantee()
    wide = fit_intervals([0.0, 1], [0.0, 2], alpha=0.1, model_id="m", split_id="c")
    assert wide.predict([0.0], model_id="m").lower[0] == -math.inf
    assert ConformalIntervals.from_json(wide.to_json()) == wide


@pytest.mark.parametrize("alpha", [0.02, 0.1, 0.25, 0.5, 0.8])
def test_coverage_over_two_thousand_splits_is_within_its_exact_interval(alpha) -> None:
    """With continuous scores the covered of m new rows are beta-binomial (Vovk, 2012)."""
    n, m, runs = 60, 40, 2000
    rng = np.random.default_rng(7)
    truth = rng.normal(size=(runs, n + m))
    covered = np.empty(runs, dtype=int)
    for i, row in enumerate(truth):
        fitted = fit_intervals(np.zeros(n), row[:n], alpha=alpha, model_id="m", split_id="c")
        inside = fitted.predict(np.zeros(m), model_id="m").coverage(row[n:])
        covered[i] = round(inside * m)
    rank = conformal_rank(n, alpha)
    if rank > n:
        assert (covered == m).all()
        return
    law = betabinom(m, rank, n + 1 - rank)
    spread = 4 * law.std() / math.sqrt(runs)
    assert abs(covered.mean() - law.mean()) < spread
    for share in (0.05, 0.5, 0.95):
        place = law.ppf(share)
        tolerance = 4 * math.sqrt(0.25 / runs)
        assert (
            law.cdf(place - 1) - tolerance <= (covered < place).mean() <= law.cdf(place) + tolerance
        )
    assert law.mean() / m == pytest.approx(rank / (n + 1))


@pytest.mark.parametrize("method", ["lac", "aps", "raps"])
@pytest.mark.parametrize("condition", ["none", "class"])
def test_sets_cover_at_least_their_level_on_average(method, condition) -> None:
    found = []
    for seed in range(60):
        p, y = made(260, seed=seed)
        sets = fit_sets(p[:60], y[:60], alpha=0.2, method=method, condition=condition, **WHERE)
        found.append(sets.predict(p[60:], **BOUND).coverage(y[60:]))
    assert np.mean(found) > 0.8 - 3 * np.std(found) / math.sqrt(60)


# -- the scores ---------------------------------------------------------------------------------------


def by_hand(p, y, method, alpha, penalty=0.01, kept=1):
    """Scores and sets, row by row."""

    def score(row, label):
        if method == "lac":
            return 1 - row[label]
        order = sorted(range(len(row)), key=lambda c: (-row[c], c))
        place = order.index(label)
        total = np.cumsum(row[order])[place]
        return total + (penalty * max(0, place + 1 - kept) if method == "raps" else 0)

    scores = sorted(score(row, label) for row, label in zip(p, y))
    rank = conformal_rank(len(y), alpha)
    return lambda row: [score(row, c) <= scores[rank - 1] for c in range(len(row))]


@pytest.mark.parametrize("method", ["lac", "aps", "raps"])
def test_sets_are_those_computed_by_hand(method) -> None:
    p, y = made(80)
    p = np.round(p, 2)
    p[:, 0] += 1 - p.sum(1)  # ties
    sets = fit_sets(p[:50], y[:50], alpha=0.15, method=method, **WHERE)
    inside = by_hand(p[:50], y[:50], method, 0.15)
    wanted = [inside(row) for row in p[50:]]
    assert sets.predict(p[50:], **BOUND).members.tolist() == wanted


def test_intervals_are_closed_forms() -> None:
    rng = np.random.default_rng(0)
    y, guess, scale = rng.normal(size=39), rng.normal(size=39), rng.uniform(0.5, 2, 39)
    where = {"alpha": 0.1, "model_id": "m", "split_id": "c"}
    absolute = fit_intervals(guess, y, **where).predict([1.0], model_id="m")
    assert absolute.upper[0] - 1 == pytest.approx(sorted(np.abs(y - guess))[35])
    normal = fit_intervals(guess, y, method="normalised", scale=scale, **where)
    q = sorted(np.abs(y - guess) / scale)[35]
    assert normal.predict([1.0], scale=[3.0], model_id="m").lower[0] == pytest.approx(1 - 3 * q)
    cqr = fit_intervals(guess - 1, y, method="quantile", upper=guess + 1, **where)
    q = sorted(np.maximum(guess - 1 - y, y - guess - 1))[35]
    out = cqr.predict([0.0], upper=[2.0], model_id="m")
    assert (out.lower[0], out.upper[0]) == (pytest.approx(-q), pytest.approx(2 + q))
    for made_one in (normal, cqr):
        assert ConformalIntervals.from_json(made_one.to_json()) == made_one


def test_each_group_has_its_own_promise_and_an_unknown_one_gets_everything() -> None:
    groups = np.array(["a"] * 40 + ["b"] * 40)
    y = np.concatenate([np.linspace(-1, 1, 40), np.linspace(-5, 5, 40)])
    fitted = fit_intervals(np.zeros(80), y, alpha=0.2, groups=groups, model_id="m", split_id="c")
    out = fitted.predict(np.zeros(3), groups=["a", "b", "new"], model_id="m")
    assert out.widths[1] == pytest.approx(5 * out.widths[0])
    assert out.widths[2] == math.inf
    p, y = made(100)
    sets = fit_sets(p, y, alpha=0.2, condition="group", groups=np.arange(100) % 2, **WHERE)
    assert set(sets.cells) == {"0", "1"}
    assert sets.predict(p[:2], groups=[0, 7], **BOUND).members[1].all()


def test_a_class_absent_from_the_calibration_rows_is_in_every_set() -> None:
    p, y = made(200)
    seen = y != 2
    sets = fit_sets(p[seen], y[seen], alpha=0.2, condition="class", **WHERE)
    assert sets.cells["cat"] == Cell(0, 1, None)
    assert sets.predict(p, **BOUND).members[:, 2].all()


# -- bound, stored, streamed ------------------------------------------------------------------------------


def test_sets_are_bound_to_model_labels_and_calibrator() -> None:
    logits, targets = overconfident(200)
    calibrator = fit_temperature(logits, targets, **BOUND, **SPLITS).require()
    held, truth = overconfident(100, seed=2)
    prediction = calibrator.transform(held, **BOUND)
    sets = fit_sets(prediction, truth, alpha=0.1, split_id="conformal")
    assert sets.calibrator_id == calibrator.id
    found = sets.predict(prediction)
    assert found.sizes.tolist() == [len(names) for names in found.names()]
    for changes, name in [
        ({"model_id": "m:2"}, "model_id"),
        ({"labels": LABELS[::-1]}, "labels"),
        ({}, "calibrator_id"),
    ]:
        with pytest.raises(ConformalMismatchError, match=name):
            sets.predict([[np.nan] * 3], **{**BOUND, **changes})
    for split in ("train", "test"):
        with pytest.raises(ConformalError, match="also"):
            fit_sets(
                prediction, truth, alpha=0.1, split_id=split, train_split_id="train",
                test_split_id="test",
            )  # fmt: skip


def test_chunks_give_the_sets_of_the_whole() -> None:
    p, y = made(103)
    fitter = SetFitter(labels=LABELS, method="aps", condition="class")
    for start in range(0, 103, 25):
        fitter.update(p[start : start + 25], y[start : start + 25])
    with pytest.raises(ConformalError):
        fitter.update([[np.nan, 0.5, 0.5]], [0])
    streamed = fitter.finish(alpha=0.1, model_id="m:1", split_id="conformal")
    assert streamed == fit_sets(p, y, alpha=0.1, method="aps", condition="class", **WHERE)


def test_a_document_reloads_exactly_and_a_forged_rank_is_refused() -> None:
    p, y = made(50)
    sets = fit_sets(p, y, alpha=0.1, rows=RowSet.of(np.arange(50)), **WHERE)
    again = ConformalSets.from_json(sets.to_json())
    assert (again, again.id) == (sets, sets.id)
    assert "n = 50, rank 46, attained level 46/51" in again.guarantee()
    for cell in ({"n": 50, "rank": 40, "threshold": 0.5}, {"n": 5, "rank": 6, "threshold": 0.5}):
        with pytest.raises(ConformalError, match="rank"):
            ConformalSets.from_state({**sets.state(), "cells": {"all": cell}})


@pytest.mark.parametrize("alpha", [0, 1, -0.1, math.nan, "x", None])
def test_a_level_is_a_probability(alpha) -> None:
    with pytest.raises(ConformalError, match="alpha"):
        fit_sets([[0.5, 0.5]], [0], labels=["a", "b"], model_id="m", split_id="c", alpha=alpha)


# -- rows ---------------------------------------------------------------------------------------------------


def test_rows_are_compared_by_hash() -> None:
    X = np.random.default_rng(0).normal(size=(50, 4))
    whole, part = RowSet.of(X), RowSet.of(X[40:][::-1])
    assert (len(whole), whole.common(part), whole.common(RowSet.of(X + 1))) == (50, 10, 0)
    assert RowSet.of(X.astype(np.float32)).common(whole) == 0  # other values
    assert RowSet.of(["a", "b"]).common(RowSet.of(["b", "c"])) == 1
    assert RowSet.from_state(whole.state()) == whole
    assert RowSet.of([[0.0]]) == RowSet.of([[-0.0]])
    for wrong in ([], np.zeros(()), [None]):
        with pytest.raises(CalibrationError):
            RowSet.of(wrong)
    with pytest.raises(CalibrationError):
        RowSet.from_state({"hashes": "AAAA", "n": 1})
