"""Costs, thresholds under a constraint, and the chain as one record."""

from __future__ import annotations

import numpy as np
import pytest
from made_logits import BOUND, LABELS, overconfident
from nnx.abstention import select_threshold
from nnx.calibration import RowSet, fit_calibrator, fit_temperature
from nnx.conformal import fit_sets
from nnx.decisions import (
    CostPolicy,
    InvalidDecisionRequest,
    TrustChain,
    binomial_interval,
    choose_threshold,
)
from scipy.stats import binomtest


def costs(**changes) -> CostPolicy:
    return CostPolicy(**{
        "actions": ("treat", "wait"), "labels": ("ill", "well"),
        "costs": ((0, 1), (10, 0)), "model_id": "m:1", **changes,
    })  # fmt: skip


def test_the_cheapest_action_is_the_bayes_decision() -> None:
    policy = costs()
    p = np.array([[0.05, 0.95], [0.1, 0.9], [1 / 11, 10 / 11], [0.0, 1.0], [1.0, 0.0]])
    np.testing.assert_allclose(policy.expected(p)[0], [0.95, 0.5])
    assert policy.decide(p).tolist() == [1, 0, policy.expected(p)[2].argmin(), 1, 0]
    assert CostPolicy.from_json(policy.to_json()) == policy
    for wrong in ({"costs": ((0, 1),)}, {"costs": ((0, np.nan), (1, 0))}, {"costs": "x"}):
        with pytest.raises(InvalidDecisionRequest, match="costs are finite"):
            costs(**wrong)
    with pytest.raises(InvalidDecisionRequest, match="3 columns"):
        policy.decide([[0.2, 0.3, 0.5]])


def yes_no(rows: int = 200, seed: int = 0):
    rng = np.random.default_rng(seed)
    p = np.round(rng.random(rows), 2)
    return p, (rng.random(rows) < p).astype(int)


@pytest.mark.parametrize(
    ("constraint", "bound"),
    [
        ("precision_at_least", 0.8),
        ("false_positive_rate_at_most", 0.1),
        ("positives_at_most", 0.25),
    ],
)
def test_the_threshold_has_the_highest_recall_that_is_allowed(constraint, bound) -> None:
    p, on = yes_no()
    found = choose_threshold(p, on, split_id="val", **{constraint: bound})
    best = 0
    for t in np.unique(p):
        yes = p >= t
        value = {
            "precision_at_least": on[yes].mean(),
            "false_positive_rate_at_most": yes[on == 0].mean(),
            "positives_at_most": yes.mean(),
        }[constraint]
        allowed = value >= bound if constraint == "precision_at_least" else value <= bound
        if allowed:
            best = max(best, on[yes].sum())
        if t == found.threshold:
            assert allowed
            assert found.value == pytest.approx(value)
    assert found.recall == best / on.sum()
    assert found.lower < found.value < found.upper


def test_the_interval_is_the_exact_one() -> None:
    for k, n in [(0, 5), (5, 5), (3, 10), (90, 100), (499, 1000)]:
        wanted = binomtest(k, n).proportion_ci(0.9, method="exact")
        assert binomial_interval(k, n, 0.9) == pytest.approx((wanted.low, wanted.high), abs=1e-9)
    assert binomial_interval(0, 0) == (0.0, 1.0)


def test_what_no_threshold_meets_is_said() -> None:
    none = choose_threshold([0.9, 0.8], [0, 0], split_id="val", precision_at_least=0.5)
    assert none.threshold is None
    with pytest.raises(InvalidDecisionRequest, match="no threshold meets precision_at_least 0.5"):
        none.require()
    with pytest.raises(InvalidDecisionRequest, match="also test_split_id"):
        choose_threshold([0.9], [1], split_id="t", test_split_id="t", precision_at_least=0.5)
    with pytest.raises(InvalidDecisionRequest, match="give one of"):
        choose_threshold([0.9], [1], split_id="val")


# -- the chain ------------------------------------------------------------------------------------------


def links(model_id: str = "m:1"):
    bound = {**BOUND, "model_id": model_id}
    X = {name: overconfident(300, seed=i) for i, name in enumerate(("cal", "conf", "tune"))}
    calibrator = fit_temperature(*X["cal"], split_id="cal", **bound).require()
    out = {name: calibrator.transform(logits, **bound) for name, (logits, _) in X.items()}
    conformal = fit_sets(out["conf"], X["conf"][1], alpha=0.1, split_id="conf")
    chosen = select_threshold(
        out["tune"], X["tune"][1], kind="max_probability", risk_ceiling=0.3, split_id="tune",
        input_field="calibrated_probabilities",
    )  # fmt: skip
    policy = CostPolicy(
        (*LABELS, "ask"), LABELS, [*(1 - np.eye(3)).tolist(), [0.4, 0.4, 0.4]], model_id,
        calibrator.id,
    )  # fmt: skip
    return {
        "calibrator": calibrator, "conformal": conformal, "abstention": chosen.require(),
        "costs": policy,
    }  # fmt: skip


ROWS = {
    name: RowSet.of(np.arange(300) + 1000 * i)
    for i, name in enumerate(("train", "calibrator", "conformal", "abstention", "test"))
}


def test_a_chain_decides_as_its_links_and_is_its_document(tmp_path) -> None:
    made = links()
    chain = TrustChain("m:1", **made, rows=ROWS)
    logits, _ = overconfident(50, seed=9)
    found = chain.decide(logits, model_id="m:1")
    p = made["calibrator"].transform(logits, **BOUND).calibrated_probabilities
    wanted = np.asarray((*LABELS, "ask"))[made["costs"].decide(p)]
    assert found.actions.tolist() == wanted.tolist()
    assert set(found.actions) >= {"ask"}
    np.testing.assert_array_equal(found.accepted, p.max(1) >= made["abstention"].threshold)
    np.testing.assert_array_equal(found.sets.members, 1 - p <= made["conformal"].cells["all"].limit)
    chain.save(tmp_path / "chain.json")
    again = TrustChain.load(tmp_path / "chain.json")
    assert (again, again.id) == (chain, chain.id)
    assert set(again.disjointness.values()) == {"verified"}
    assert set(TrustChain("m:1", **made).disjointness.values()) == {"unverified"}


@pytest.mark.parametrize("name", ["calibrator", "conformal", "abstention", "costs"])
def test_a_link_that_was_fitted_on_something_else_is_refused(name) -> None:
    made = {**links(), name: links("m:2")[name]}
    with pytest.raises(InvalidDecisionRequest, match="was fitted on model_id"):
        TrustChain("m:1", **made)
    made = links()
    other = fit_calibrator(*overconfident(), method="vector", split_id="cal", **BOUND)
    with pytest.raises(InvalidDecisionRequest, match="was fitted on calibrator_id"):
        TrustChain("m:1", **{**made, "calibrator": other})
    with pytest.raises(ValueError, match="model_id"):
        TrustChain("m:1", **made).decide(np.zeros((1, 3)), model_id="m:3")


@pytest.mark.parametrize("name", ["calibrator", "conformal", "abstention", "test"])
def test_rows_that_were_trained_on_are_refused_when_they_are_known(name) -> None:
    shared = {**ROWS, name: RowSet.of(np.arange(290, 310))}
    with pytest.raises(InvalidDecisionRequest, match=f"10 rows are both in train and in {name}"):
        TrustChain("m:1", **links(), rows=shared)
