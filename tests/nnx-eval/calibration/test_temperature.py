"""One temperature: what it minimizes, what it is bound to, and when there is none."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from made_logits import BOUND, LABELS, SPLITS, overconfident
from nnx import Nets, NNModel, NNModelParams, NNParams, ProbabilitySpec, prediction_from_logits
from nnx.calibration import (
    CalibrationError,
    CalibrationFitError,
    CalibrationMismatchError,
    CalibrationReport,
    TemperatureCalibrator,
    fit_temperature,
    model_fingerprint,
    negative_log_likelihood,
)
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax
from sklearn.calibration import CalibratedClassifierCV

SHARED = Path(__file__).parents[3] / ".." / "shared" / "vectors" / "original-bundle"


def fitted(**changes):
    logits, targets = overconfident()
    return fit_temperature(logits, targets, **{**BOUND, **SPLITS, **changes})


def nll(logits, targets, temperature):
    return -log_softmax(logits / temperature, axis=1)[np.arange(len(targets)), targets].mean()


@pytest.mark.parametrize("seed", range(4))
def test_the_temperature_minimizes_the_likelihood_as_scipy_finds_it(seed: int) -> None:
    logits, targets = overconfident(seed=seed)
    found = fit_temperature(logits, targets, **BOUND, **SPLITS).require()
    wanted = minimize_scalar(
        lambda t: nll(logits, targets, t), bounds=(0.1, 20), method="bounded",
        options={"xatol": 1e-10},
    )  # fmt: skip
    assert found.temperature == pytest.approx(wanted.x, abs=1e-6)
    assert found.fit_result["nll_after"] == pytest.approx(wanted.fun, abs=1e-12)
    assert found.fit_result["nll_before"] == pytest.approx(nll(logits, targets, 1.0), abs=1e-12)


def test_it_is_the_temperature_of_scikit_learn() -> None:
    logits, targets = overconfident()

    class Given:
        """A fitted classifier whose decision function is its input."""

        classes_ = np.arange(3)
        n_features_in_ = 3
        _estimator_type = "classifier"

        def fit(self, X, y):
            return self

        def get_params(self, deep=True):
            return {}

        def set_params(self, **_):
            return self

        def __sklearn_tags__(self):
            from sklearn.linear_model import LogisticRegression

            return LogisticRegression().__sklearn_tags__()

        def __sklearn_is_fitted__(self):
            return True

        def predict(self, X):
            return X.argmax(1)

        def decision_function(self, X):
            return X

    from sklearn.frozen import FrozenEstimator

    theirs = CalibratedClassifierCV(FrozenEstimator(Given()), method="temperature")
    theirs.fit(logits, targets)
    ours = fit_temperature(logits, targets, **BOUND, **SPLITS).require()
    found = ours.transform(logits, **BOUND).calibrated_probabilities
    np.testing.assert_allclose(found, theirs.predict_proba(logits), atol=1e-4)


def test_float32_float16_and_tensors_give_the_same_fit() -> None:
    logits, targets = overconfident(50)
    logits = logits.astype(np.float16)
    wanted = fit_temperature(logits.astype(np.float64), targets, **BOUND, **SPLITS)
    for values in (logits, logits.astype(np.float32), torch.from_numpy(logits), logits.tolist()):
        assert fit_temperature(values, targets, **BOUND, **SPLITS) == wanted
    assert fit_temperature(logits, torch.from_numpy(targets), **BOUND, **SPLITS) == wanted


def test_inputs_are_never_changed() -> None:
    logits, targets = overconfident(40)
    logits = logits.astype(np.float64)
    before = logits.copy()
    fit_temperature(logits, targets, **BOUND, **SPLITS).require().transform(logits, **BOUND)
    np.testing.assert_array_equal(logits, before)


# -- no optimum, no temperature ----------------------------------------------------------


@pytest.mark.parametrize(
    ("logits", "targets", "reason"),
    [
        ([[3.0, 0, 0], [0, 2.0, 0]], [0, 1], "separable"),
        ([[3.0, 3.0, 0], [0, 2.0, 0]], [0, 1], "separable"),  # a tie on the way
        ([[1.0, 1, 1], [2.0, 2, 2]], [0, 1], "constant"),
        ([[3.0, 0, 0], [0, 2.0, 0]], [1, 0], "no better than uniform"),
        ([[3.0, 0, 0]], [0], "separable"),  # n = 1
        ([[3.0, 0, 0]], [1], "no better than uniform"),
    ],
)
def test_a_split_without_an_optimum_gives_a_failed_fit(logits, targets, reason) -> None:
    fit = fit_temperature(logits, targets, **BOUND, **SPLITS)
    assert (fit.ok, fit.status, fit.calibrator) == (False, "failed", None)
    assert reason in fit.reason
    with pytest.raises(CalibrationFitError, match=reason):
        fit.require()


def test_an_optimum_beyond_the_bounds_or_the_iterations_is_a_failure_too() -> None:
    assert "below min_temperature" in fitted(min_temperature=50, max_temperature=60).reason
    assert "above max_temperature" in fitted(min_temperature=0.001, max_temperature=0.01).reason
    assert "did not converge in 5 iterations" in fitted(max_iterations=5).reason


def test_logits_of_ten_thousand_in_float32_neither_overflow_nor_change_their_argmax() -> None:
    logits, targets = overconfident(400)
    big = (logits * 1e4 / np.abs(logits).max()).astype(np.float32)
    assert "above max_temperature 1000" in fit_temperature(big, targets, **BOUND, **SPLITS).reason
    found = fit_temperature(big, targets, max_temperature=1e6, **BOUND, **SPLITS).require()
    out = found.transform(big, **BOUND)
    assert np.isfinite(out.calibrated_probabilities).all()
    np.testing.assert_array_equal(out.calibrated_probabilities.argmax(1), big.argmax(1))
    np.testing.assert_allclose(
        out.calibrated_probabilities, softmax(big.astype(float) / found.temperature, axis=1),
        atol=1e-12,
    )  # fmt: skip


def test_a_class_absent_from_the_calibration_split_is_no_obstacle() -> None:
    logits, targets = overconfident(300)
    seen = targets != 2
    assert fit_temperature(logits[seen], targets[seen], **BOUND, **SPLITS).ok


# -- what is refused ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split_id": "train"}, "already fits"),
        ({"split_id": "test"}, "nothing was fitted on"),
        ({"split_id": " "}, "split_id"),
        ({"model_id": None}, "model_id"),
        ({"labels": None}, r"labels=\[...\]"),
        ({"labels": ["a", "a", "b"]}, "distinct"),
        ({"labels": ["a", "b"]}, "2 labels for the 3 columns"),
        ({"labels": "abc"}, "sequence of names"),
        ({"min_temperature": 0}, "min_temperature"),
        ({"min_temperature": 2, "max_temperature": 1}, "below max_temperature"),
        ({"tolerance": float("nan")}, "tolerance"),
        ({"max_iterations": 0}, "max_iterations"),
    ],
)
def test_what_a_fit_is_told_is_checked(changes, message) -> None:
    with pytest.raises(CalibrationError, match=message):
        fitted(**changes)


@pytest.mark.parametrize(
    ("logits", "targets", "message"),
    [
        ([[0.0, np.nan, 1]], [0], r"logits\[0, 1\] is nan"),
        ([[0.0, np.inf, 1]], [0], r"logits\[0, 1\] is inf"),
        (np.zeros((0, 3)), [], "no rows"),
        (np.zeros((2, 1)), [0, 0], "C >= 2"),
        (np.zeros(3), [0], "C >= 2"),
        ([["a", "b", "c"]], [0], "real numbers"),
        (np.zeros((2, 3)), [0.0, 1.0], "integer class indices"),
        (np.zeros((2, 3)), [0, 3], r"targets\[1\] is 3"),
        (np.zeros((2, 3)), [-1, 0], r"targets\[0\] is -1"),
        (np.zeros((2, 3)), [0], "each of 2 rows"),
    ],
)
def test_logits_and_targets_are_checked(logits, targets, message) -> None:
    with pytest.raises(CalibrationError, match=message):
        fit_temperature(logits, targets, **BOUND, **SPLITS)


# -- bound to a model and an order of labels -----------------------------------------------


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"labels": ["bee", "ant", "cat"]}, "labels"),
        ({"labels": ["ant", "bee", "dog"]}, "labels"),
        ({"model_id": "m:2"}, "model_id"),
    ],
)
def test_another_order_or_model_is_refused_unless_named(changes, what) -> None:
    calibrator, (logits, targets) = fitted().require(), overconfident(20, seed=5)
    declared = {**BOUND, **changes}
    with pytest.raises(CalibrationMismatchError, match=f"another {what}"):
        calibrator.transform(np.full((1, 3), np.nan), **declared)  # before the logits are read
    with pytest.raises(CalibrationMismatchError, match=f"another {what}"):
        calibrator.report(logits, targets, split_id="test", **declared)
    out = calibrator.transform(logits, override="same weights, renamed", **declared)
    wanted = {"expected": BOUND[what], "actual": declared[what]}
    assert out.override["reason"] == "same weights, renamed"
    assert out.override["mismatches"] == {what: wanted}
    report = calibrator.report(logits, targets, split_id="test", override="renamed", **declared)
    assert CalibrationReport.from_json(report.to_json()) == report
    assert report.override["mismatches"][what]["actual"] == tuple(declared[what]) or (
        report.override["mismatches"][what]["actual"] == declared[what]
    )


def test_another_number_of_classes_is_never_accepted() -> None:
    with pytest.raises(CalibrationMismatchError, match="3 classes and these are 2"):
        fitted().require().transform(
            np.zeros((1, 2)), model_id="m:1", labels=["a", "b"], override="anyway"
        )


def test_an_override_that_overrides_nothing_leaves_no_trace() -> None:
    logits, _ = overconfident(5)
    assert fitted().require().transform(logits, override="just in case", **BOUND).override is None


def test_a_fingerprint_changes_with_any_weight_and_with_nothing_else(tmp_path) -> None:
    def model(seed):
        torch.manual_seed(seed)
        return NNModel(
            net_params=NNParams(input_dim=4, output_dim=3, hidden_dims=[5], dropout_prob=0.1),
            params=NNModelParams(net=Nets.FEED_FWD),
        )

    one, same = model(0), model(0)
    name = model_fingerprint(one)
    assert name.startswith("sha256:")
    assert name == model_fingerprint(same) == model_fingerprint(one.net)
    same.net.train()
    same.net.requires_grad_(False)
    assert model_fingerprint(same) == name
    with torch.no_grad():
        next(same.net.parameters())[0, 0] += 1e-6
    assert model_fingerprint(same) != name
    assert model_fingerprint(one.net.to(torch.bfloat16)) != name
    with pytest.raises(CalibrationError, match="NNModel or a"):
        model_fingerprint("m:1")


# -- what a transform gives ----------------------------------------------------------------


def test_raw_and_calibrated_views_are_separate() -> None:
    calibrator, (logits, _) = fitted().require(), overconfident(30, seed=9)
    out = calibrator.transform(logits, sample_ids=np.arange(30) + 100, **BOUND)
    np.testing.assert_array_equal(out.logits, logits)
    np.testing.assert_allclose(out.probabilities, softmax(logits, axis=1), atol=1e-15)
    np.testing.assert_allclose(
        out.calibrated_probabilities, softmax(logits / calibrator.temperature, axis=1), atol=1e-15
    )
    np.testing.assert_array_equal(out.decoded, logits.argmax(1))
    np.testing.assert_array_equal(out.calibrated_probabilities.argmax(1), out.decoded)
    assert out.decoded_labels().tolist() == [LABELS[i] for i in out.decoded]
    assert out.sample_ids.tolist() == list(range(100, 130))
    assert (out.calibrator_id, out.model_id, len(out)) == (calibrator.id, "m:1", 30)
    assert out.probabilities.dtype == np.float64
    one = TemperatureCalibrator(1.0, LABELS, "m:1", "calibration")
    np.testing.assert_array_equal(
        one.transform(logits, **BOUND).calibrated_probabilities, out.probabilities
    )


def test_a_prediction_brings_its_labels_and_ids() -> None:
    calibrator, (logits, _) = fitted().require(), overconfident(6)
    spec = ProbabilitySpec("categorical", labels=LABELS)
    prediction = prediction_from_logits(logits, spec, sample_ids=[5, 4, 3, 2, 1, 0])
    out = calibrator.transform(prediction, model_id="m:1")
    assert out.sample_ids.tolist() == [5, 4, 3, 2, 1, 0]
    with pytest.raises(CalibrationError, match="not those of the prediction"):
        calibrator.transform(prediction, model_id="m:1", sample_ids=range(6))
    with pytest.raises(CalibrationError, match="not those of the prediction"):
        calibrator.transform(prediction, model_id="m:1", labels=["x", "y", "z"])
    other = prediction_from_logits(logits, ProbabilitySpec("categorical", labels=["x", "y", "z"]))
    with pytest.raises(CalibrationMismatchError):
        calibrator.transform(other, model_id="m:1")
    yes_no = prediction_from_logits(logits, ProbabilitySpec("bernoulli", labels=LABELS))
    with pytest.raises(CalibrationError, match="bernoulli prediction"):
        calibrator.transform(yes_no, model_id="m:1")


# -- reports -------------------------------------------------------------------------------


def test_a_report_says_before_and_after_on_rows_held_out() -> None:
    calibrator, (logits, targets) = fitted().require(), overconfident(500, seed=3)
    report = calibrator.report(logits, targets, split_id="test", **BOUND)
    raw, out = softmax(logits, axis=1), softmax(logits / calibrator.temperature, axis=1)
    assert report.before.nll == pytest.approx(negative_log_likelihood(raw, targets), abs=1e-12)
    assert report.after.nll == pytest.approx(nll(logits, targets, calibrator.temperature))
    assert report.after.brier == pytest.approx(((out - np.eye(3)[targets]) ** 2).sum(1).mean())
    assert (report.outcome, report.improved, report.n_samples) == ("improved", True, 500)
    assert report.after.ece < report.before.ece
    assert "improved held-out NLL" in report.summary()
    again = TemperatureCalibrator.from_json(calibrator.to_json())
    assert again.report(logits, targets, split_id="test", **BOUND) == report


@pytest.mark.parametrize("split", ["calibration", "train"])
def test_fitted_rows_are_no_held_out_data(split) -> None:
    logits, targets = overconfident(20)
    with pytest.raises(CalibrationError, match="not held out"):
        fitted().require().report(logits, targets, split_id=split, **BOUND)


def test_a_calibrator_that_makes_it_worse_says_to_keep_the_raw_probabilities() -> None:
    logits, targets = overconfident(400, factor=1.0)
    worse = TemperatureCalibrator(4.0, LABELS, "m:1", "calibration")
    report = worse.report(logits, targets, split_id="test", **BOUND)
    assert report.outcome == "worsened"
    assert report.summary().endswith("keep the uncalibrated probabilities")
    same = TemperatureCalibrator(1.0, LABELS, "m:1", "calibration")
    assert same.report(logits, targets, split_id="test", **BOUND).outcome == "unchanged"


# -- on disk -------------------------------------------------------------------------------


def test_a_calibrator_reloads_exactly(tmp_path) -> None:
    calibrator = fitted().require()
    calibrator.save(tmp_path / "c.json")
    again = TemperatureCalibrator.load(tmp_path / "c.json")
    assert again == calibrator
    assert again.id == calibrator.id == calibrator.digest()
    assert again.split == {
        "calibration": "calibration", "train": "train", "test": "test",
        "disjointness": "unverified",
    }  # fmt: skip
    logits, _ = overconfident(10)
    np.testing.assert_array_equal(
        again.transform(logits, **BOUND).calibrated_probabilities,
        calibrator.transform(logits, **BOUND).calibrated_probabilities,
    )


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0}, {"temperature": -1}, {"temperature": "2"}, {"temperature": True},
        {"labels": ["a", "a"]}, {"model_id": ""}, {"model_id": None}, {"format": "nnx.split/1"},
        {"kind": "isotonic"}, {"extra": 1}, {"fit": {}}, {"split": {"train": "t"}},
        {"split": {"calibration": "t", "train": "t"}}, {"split": {"calibration": "t", "test": "t"}},
    ],
)  # fmt: skip
def test_a_document_that_cannot_be_is_refused(change) -> None:
    state = {**fitted().require().state(), **change}
    with pytest.raises(CalibrationError):
        TemperatureCalibrator.from_state(state)


@pytest.mark.parametrize("text", ["", "[]", '{"temperature": NaN}', "{" * 100_000])
def test_other_text_is_refused(text) -> None:
    with pytest.raises(CalibrationError):
        TemperatureCalibrator.from_json(text)


def test_the_calibrator_of_the_original_reads_and_writes_as_it_was() -> None:
    files = list(SHARED.glob("bundle-resume/g-*/calibrator-0.json"))
    if not files:
        pytest.skip("needs the original's bundle in shared/vectors")
    text = files[0].read_text()
    calibrator = TemperatureCalibrator.load(files[0])
    assert calibrator.temperature == json.loads(text)["temperature"] == 1.8087585044578143
    assert calibrator.to_json() + "\n" == text
