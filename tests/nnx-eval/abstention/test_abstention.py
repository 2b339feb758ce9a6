"""Policies, thresholds and coverage, held against sums over rows."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_logits import BOUND, LABELS, SPLITS, overconfident
from nnx import ProbabilitySpec, prediction_from_logits
from nnx.abstention import (
    MAX_DEFAULT_CANDIDATES,
    AbstentionError,
    AbstentionPolicy,
    AbstentionSchemaError,
    CoverageAccumulator,
    CoverageReport,
    CurvePoint,
    ThresholdSelection,
    decide,
    risk_coverage_curve,
    scores,
    select_threshold,
)
from nnx.calibration import fit_temperature
from nnx.decisions import Choice, Option, validate_response
from scipy.special import softmax


def policy(threshold: float = 0.6, kind: str = "max_probability", **changes) -> AbstentionPolicy:
    return AbstentionPolicy(
        kind=kind, threshold=threshold, labels=LABELS, model_id="m:1", tuning_split_id="val",
        **changes,
    )  # fmt: skip


def made(rows: int = 400, seed: int = 0):
    logits, targets = overconfident(rows, seed=seed)
    return softmax(logits, axis=1), targets


def calibrated(rows: int = 60):
    logits, targets = overconfident(rows, seed=8)
    calibrator = fit_temperature(logits, targets, **BOUND, **SPLITS).require()
    return calibrator, calibrator.transform(logits, **BOUND), targets


# -- a row is accepted at or above its threshold -----------------------------------------------


def test_scores_are_the_top_and_the_gap() -> None:
    p = [[0.2, 0.7, 0.1], [0.4, 0.4, 0.2], [1.0, 0.0, 0.0]]
    prediction, top = scores(p, kind="max_probability")
    assert (prediction.tolist(), top.tolist()) == ([1, 0, 0], [0.7, 0.4, 1.0])
    _, gap = scores(p, kind="margin")
    assert gap.tolist() == [0.7 - 0.2, 0.0, 1.0]


def test_floats_are_compared_as_they_are() -> None:
    p = [[0.2, 0.7, 0.1]]
    assert not policy(0.5, "margin").apply(p, **BOUND).accepted[0]  # 0.49999999999999994
    assert policy(0.7 - 0.2, "margin").apply(p, **BOUND).accepted[0]
    assert policy(1.0).apply([[1.0, 0.0, 0.0]], **BOUND).accepted[0]
    assert policy(0.0).apply([[0.4, 0.3, 0.3]], **BOUND).accepted[0]


def test_an_abstained_row_keeps_everything_and_has_a_reason() -> None:
    p = np.array([[0.9, 0.05, 0.05], [0.4, 0.35, 0.25]])
    result = policy().apply(p, sample_ids=[7, 9], **BOUND)
    kept, declined = result.outcomes()
    assert (kept.accepted, kept.status, kept.reason) == (True, "accepted", None)
    assert (declined.status, declined.reason) == ("abstained", "below_probability_threshold")
    assert (declined.sample_id, declined.prediction, declined.prediction_index) == (9, "ant", 0)
    assert declined.distribution == (("ant", 0.4), ("bee", 0.35), ("cat", 0.25))
    assert declined.score == 0.4
    assert result.reasons == (None, "below_probability_threshold")
    assert (result.accepted_ids.tolist(), result.abstained_ids.tolist()) == ([7], [9])
    assert policy(0.5, "margin").apply(p, **BOUND).reasons[1] == "small_margin"


def test_ids_may_repeat_and_input_stays_as_it_was() -> None:
    p, _ = made(4)
    before = p.copy()
    assert policy().apply(p, sample_ids=[1, 1, 2, 2], **BOUND).sample_ids.tolist() == [1, 1, 2, 2]
    np.testing.assert_array_equal(p, before)


@pytest.mark.parametrize(
    ("p", "message"),
    [
        ([[0.5, 0.6, 0.0]], "sums to"),
        ([[np.nan, 0.5, 0.5]], "no probability"),
        ([[1.5, -0.25, -0.25]], "no probability"),
        ([[1.0]], "C >= 2"),
    ],
)
def test_malformed_probabilities_are_an_error_and_no_abstention(p, message) -> None:
    with pytest.raises(AbstentionError, match=message):
        policy().apply(p, **BOUND)


# -- what a policy reads -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"labels": ["bee", "ant", "cat"]},
        {"model_id": "m:2"},
        {"input_field": "calibrated_probabilities", "calibrator_id": "sha256:1"},
    ],
)
def test_another_schema_is_refused_before_a_probability_is_read(changes) -> None:
    with pytest.raises(AbstentionSchemaError, match=next(iter(changes))):
        policy().apply([[np.nan] * 3], **{**BOUND, **changes})


def test_a_calibrated_prediction_has_two_views() -> None:
    calibrator, prediction, targets = calibrated()
    raw = policy(0.8).apply(prediction)
    np.testing.assert_array_equal(raw.probabilities, prediction.probabilities)
    own = policy(0.8, input_field="calibrated_probabilities", calibrator_id=calibrator.id)
    result = own.apply(prediction)
    np.testing.assert_array_equal(result.probabilities, prediction.calibrated_probabilities)
    assert result.accepted.sum() < raw.accepted.sum()  # the raw ones are overconfident
    other = policy(0.8, input_field="calibrated_probabilities", calibrator_id="sha256:other")
    with pytest.raises(AbstentionSchemaError, match="calibrator_id"):
        other.apply(prediction)
    with pytest.raises(AbstentionSchemaError, match="is not that of the calibrated prediction"):
        policy().apply(prediction, model_id="m:2")
    with pytest.raises(AbstentionError, match="two views"):
        select_threshold(prediction, targets, kind="margin", risk_ceiling=0.1, split_id="val")


def test_a_prediction_decides_by_its_own_logits() -> None:
    logits = np.array([[0.0, 1e-9, -60.0]], dtype=np.float64)
    prediction = prediction_from_logits(logits, ProbabilitySpec("categorical", labels=LABELS))
    result = policy(0.1).apply(prediction, model_id="m:1")
    assert result.prediction.tolist() == [1]
    flat = prediction_from_logits(
        np.array([[0.0, 1e-30, -5.0]]), ProbabilitySpec("categorical", labels=LABELS)
    )
    assert policy(0.1).apply(flat, model_id="m:1").prediction.tolist() == [1]  # probabilities tie
    wrong = type(prediction)(
        logits=prediction.logits, probabilities=prediction.probabilities,
        decoded=np.array([2]), sample_ids=prediction.sample_ids, spec=prediction.spec,
    )  # fmt: skip
    with pytest.raises(AbstentionError, match="not of maximal probability"):
        policy(0.1).apply(wrong, model_id="m:1")


def test_a_calibration_override_travels() -> None:
    calibrator, _, _ = calibrated()
    logits, targets = overconfident(60, seed=4)
    declared = {**BOUND, "model_id": "m:2"}
    prediction = calibrator.transform(logits, override="same weights", **declared)
    field = {"input_field": "calibrated_probabilities"}
    chosen = select_threshold(
        prediction, targets, kind="margin", risk_ceiling=0.5, split_id="val", **field
    )
    assert chosen.calibration_override["reason"] == "same weights"
    assert chosen.require().apply(prediction).calibration_override["reason"] == "same weights"
    assert ThresholdSelection.from_json(chosen.to_json()) == chosen


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"threshold": 1.1}, "threshold"),
        ({"threshold": -0.1}, "threshold"),
        ({"threshold": float("nan")}, "threshold"),
        ({"kind": "entropy"}, "kind"),
        ({"labels": ["a"]}, "two classes"),
        ({"model_id": ""}, "model_id"),
        ({"tuning_split_id": ""}, "tuning_split_id"),
        ({"input_field": "logits"}, "input_field"),
        ({"input_field": "calibrated_probabilities"}, "calibrator_id"),
        ({"calibrator_id": "sha256:1"}, "calibrated_probabilities"),
    ],
)
def test_a_policy_that_cannot_be_is_refused_when_made_and_when_loaded(changes, message) -> None:
    with pytest.raises(AbstentionError, match=message):
        AbstentionPolicy(**{**_fields(policy()), **changes})
    with pytest.raises(AbstentionError, match=message):
        AbstentionPolicy.from_state({**policy().state(), **changes})


def _fields(made: AbstentionPolicy) -> dict:
    return {f.name: getattr(made, f.name) for f in dataclasses.fields(made)}


def test_a_policy_is_its_document(tmp_path) -> None:
    policy().save(tmp_path / "p.json")
    again = AbstentionPolicy.load(tmp_path / "p.json")
    assert (again, again.id) == (policy(), policy().id)
    assert policy(0.61).id != again.id
    assert json.loads((tmp_path / "p.json").read_text())["format"] == "nnx.abstention/1"


# -- two denominators ------------------------------------------------------------------------------


def test_coverage_is_over_all_rows_and_risk_over_the_accepted() -> None:
    p, y = made()
    result = policy(0.9).apply(p, **BOUND)
    report, kept = result.report(y), p.max(1) >= 0.9
    assert (report.total, report.accepted) == (400, kept.sum())
    assert report.incorrect == (p.argmax(1) != y)[kept].sum()
    assert report.coverage == kept.mean()
    assert report.risk == report.selective_risk == (p.argmax(1) != y)[kept].mean()
    rows = result.accepted_rows(y)
    np.testing.assert_array_equal(rows.targets, y[kept])
    np.testing.assert_array_equal(rows.sample_ids, np.flatnonzero(kept))
    assert CoverageReport.from_json(report.to_json()) == report


def test_nothing_accepted_has_no_risk() -> None:
    report = policy(1.0).apply([[0.5, 0.3, 0.2]], **BOUND).report([0])
    assert (report.coverage, report.risk, report.status) == (0.0, None, "no_accepted")
    assert "unavailable" in report.summary()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=6), st.floats(0, 1))
def test_chunks_add_up_to_the_whole(cuts, threshold) -> None:
    p, y = made(40)
    whole = policy(threshold).apply(p, **BOUND).report(y)
    places = [0, *sorted(cuts), 40]
    chunked = CoverageAccumulator()
    for start, stop in pairwise(places):
        ids = np.arange(start, stop)
        chunked.update(
            policy(threshold).apply(p[start:stop], sample_ids=ids, **BOUND), y[start:stop]
        )
    assert chunked.report() == whole


def test_ids_that_were_seen_are_refused_unless_the_split_repeats_them() -> None:
    p, y = made(4)
    result = policy().apply(p, **BOUND)
    strict, lax = CoverageAccumulator(), CoverageAccumulator(allow_repeated_ids=True)
    strict.update(result, y)
    with pytest.raises(AbstentionError, match="allow_repeated_ids"):
        strict.update(result, y)
    assert strict.report().total == 4
    lax.update(result, y)
    lax.update(result, y)
    assert lax.report().total == 8
    with pytest.raises(AbstentionError, match="repeats"):
        CoverageAccumulator().update(policy().apply(p, sample_ids=[1, 1, 2, 3], **BOUND), y)
    with pytest.raises(AbstentionSchemaError, match="another policy"):
        strict.update(policy(0.7).apply(p, sample_ids=[5, 6, 7, 8], **BOUND), y)


# -- choosing a threshold --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["max_probability", "margin"])
@pytest.mark.parametrize("ceiling", [0.05, 0.2, 0.5])
def test_the_choice_is_the_highest_coverage_under_the_ceiling(kind, ceiling) -> None:
    p, y = made()
    chosen = select_threshold(p, y, kind=kind, risk_ceiling=ceiling, split_id="val", **BOUND)
    prediction, found = scores(p, kind=kind)
    wanted = []
    for t in np.unique(found):
        kept = found >= t
        wanted.append((t, kept.sum(), (prediction != y)[kept].sum()))
    assert [(c.threshold, c.accepted, c.incorrect) for c in chosen.points] == wanted[::-1]
    feasible = [row for row in wanted if row[2] <= ceiling * row[1]]
    best = max(feasible, key=lambda row: row[1])
    assert chosen.require().threshold == best[0]
    report = chosen.require().apply(p, **BOUND).report(y)
    assert (report.accepted, report.incorrect) == best[1:]
    assert ThresholdSelection.from_json(chosen.to_json()) == chosen


def test_nothing_feasible_says_what_was_possible() -> None:
    p = np.array([[0.9, 0.1, 0.0], [0.8, 0.1, 0.1]])
    none = select_threshold(
        p, [1, 0], kind="margin", risk_ceiling=0.4, split_id="val", test_split_id="test", **BOUND
    )
    assert (none.status, none.policy, none.basis) == ("no_feasible_policy", None, "empirical")
    assert (none.labels, none.model_id, none.test_split_id) == (tuple(LABELS), "m:1", "test")
    with pytest.raises(AbstentionError, match="lowest risk of any candidate is 0.5"):
        none.require()


def test_many_scores_make_evenly_spaced_order_statistics() -> None:
    p, y = made(5000)
    points = select_threshold(
        p, y, kind="max_probability", risk_ceiling=0.5, split_id="val", **BOUND
    ).points
    assert len(points) == MAX_DEFAULT_CANDIDATES
    steps = np.diff([point.coverage for point in points])
    assert steps.max() < 0.0015
    assert set(p.max(1)) >= {point.threshold for point in points}


def test_the_test_split_is_never_tuned_on() -> None:
    p, y = made(10)
    with pytest.raises(AbstentionError, match="also test_split_id"):
        select_threshold(
            p, y, kind="margin", risk_ceiling=0.1, split_id="test", test_split_id="test", **BOUND
        )


def test_a_curve_begins_where_nothing_is_accepted() -> None:
    p, y = made(30)
    curve = risk_coverage_curve(p, y, kind="margin")
    assert curve[0] == CurvePoint(None, 0, 0, 30)
    assert (curve[0].deployable, curve[0].risk, curve[0].status) == (False, None, "no_accepted")
    assert curve[-1].coverage == 1.0
    assert curve[-1].risk == (p.argmax(1) != y).mean()
    own = risk_coverage_curve(p, y, kind="margin", candidates=[0.5, 0.1])
    assert [point.threshold for point in own] == [None, 0.5, 0.1]
    with pytest.raises(AbstentionError, match="candidates"):
        risk_coverage_curve(p, y, kind="margin", candidates=[2.0])


# -- typed decisions -------------------------------------------------------------------------------

QUESTION = Choice("Which?", tuple(Option(name, f"a {name}") for name in LABELS))


def test_a_policy_on_a_typed_decision_keeps_the_answer() -> None:
    raw = {"text": "as it came"}
    sure = validate_response(QUESTION, dict(zip(LABELS, [0.9, 0.05, 0.05])), raw=raw)
    unsure = validate_response(QUESTION, dict(zip(LABELS, [0.4, 0.35, 0.25])))
    accepted, declined = (decide(r, policy(), model_id="m:1") for r in (sure, unsure))
    assert accepted.result is sure
    assert accepted.result.raw is raw
    assert (accepted.accepted, declined.abstained) == (True, True)
    assert declined.outcome.reason == "below_probability_threshold"
    assert declined.outcome.distribution == unsure.distribution
    assert declined.policy_id == policy().id
    with pytest.raises(AbstentionSchemaError):
        decide(sure, policy(), model_id="m:2")
    with pytest.raises(AbstentionError, match="has none"):
        decide(0.5, policy(), model_id="m:1")


def test_tensors_are_read() -> None:
    p, _ = made(5)
    found = policy().apply(torch.from_numpy(p), **BOUND)
    np.testing.assert_array_equal(found.accepted, p.max(1) >= 0.6)
