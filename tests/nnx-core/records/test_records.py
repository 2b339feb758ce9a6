from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nnx.records import NNEvaluationDataPoint, NNIterationDataPoint, ResumeStatus

finite = st.one_of(st.none(), st.floats(allow_nan=False))
names = st.text(min_size=1, max_size=8)
edps = st.builds(
    NNEvaluationDataPoint,
    f1=finite, recall=finite, accuracy=finite, precision=finite, loss=finite, error=finite,
    extra=st.dictionaries(names, st.floats(allow_nan=False), max_size=3),
    kind=st.sampled_from([None, "categorical"]),
    count=st.one_of(st.none(), st.integers(0, 2**40)),
    status=st.sampled_from([None, "ok", "empty"]),
    metrics=st.dictionaries(names, st.floats(allow_nan=False), max_size=3),
)  # fmt: skip


def idp(**changes):
    edp = NNEvaluationDataPoint()
    base = {"lr": 0.1, "iter_idx": 3, "epoch_idx": 1, "batch_idx": 0, "train_edp": edp}
    return NNIterationDataPoint(**{**base, **changes})


@given(edps)
def test_an_evaluation_record_round_trips_through_its_state(edp):
    assert NNEvaluationDataPoint.from_state(edp.state()) == edp


@given(edps, st.one_of(st.none(), edps), st.one_of(st.none(), st.integers(0, 10**9)))
def test_an_iteration_record_round_trips_through_its_state(train, val, count):
    record = idp(train_edp=train, val_edp=val, update_count=count)
    assert NNIterationDataPoint.from_state(record.state()) == record


def test_state_omits_what_is_not_set_and_always_names_the_six_scores():
    assert NNEvaluationDataPoint(loss=0.5).state() == {
        "f1": None, "recall": None, "accuracy": None, "precision": None, "loss": 0.5, "error": None
    }  # fmt: skip
    assert list(idp().state()) == [
        "lr", "iter_idx", "epoch_idx", "batch_idx", "train_edp", "val_edp"
    ]  # fmt: skip


def test_numbers_of_numpy_and_torch_become_plain_floats_in_the_state():
    torch = pytest.importorskip("torch")
    edp = NNEvaluationDataPoint(
        loss=torch.tensor(0.5), error=np.float32(0.1), f1=np.float64(0.25), accuracy=1,
        extra={"a": np.float32(2)}, metrics={"m": torch.tensor(3.0)},
    )  # fmt: skip
    state = edp.state()
    assert state["extra"] == {"a": 2.0}
    assert state["metrics"] == {"m": 3.0}
    values = [state[k] for k in ("loss", "error", "f1", "accuracy")]
    assert values == [0.5, float(np.float32(0.1)), 0.25, 1.0]
    assert {type(v) for v in (*values, state["extra"]["a"], state["metrics"]["m"])} == {float}
    assert type(idp(lr=np.float64(0.1)).state()["lr"]) is float


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=40),
    st.sampled_from(["macro", "micro", "weighted"]),
)
def test_scores_of_labels_equal_scikit_learn(pairs, average):
    metrics = pytest.importorskip("sklearn.metrics")
    truth, guess = (np.array(column) for column in zip(*pairs))
    edp = NNEvaluationDataPoint.of(truth, guess, average=average)
    precision, recall, f1, _ = metrics.precision_recall_fscore_support(
        truth, guess, average=average, zero_division=0
    )
    assert edp.accuracy == metrics.accuracy_score(truth, guess)
    assert (edp.f1, edp.recall, edp.precision) == pytest.approx((f1, recall, precision), abs=1e-12)
    assert edp.loss is None
    assert edp.error is None


@settings(deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 1)] * 6), min_size=1, max_size=20))
def test_scores_of_indicators_equal_scikit_learn(rows):
    metrics = pytest.importorskip("sklearn.metrics")
    table = np.array(rows)
    truth, guess = table[:, :3], table[:, 3:]
    edp = NNEvaluationDataPoint.of(truth, guess)
    assert edp.accuracy == metrics.accuracy_score(truth, guess)
    assert edp.f1 == pytest.approx(
        metrics.f1_score(truth, guess, average="macro", zero_division=0), abs=1e-12
    )


def test_extra_metrics_see_both_arrays_once():
    calls = []

    def gap(truth, guess):
        calls.append(1)
        return np.abs(truth - guess).max()

    edp = NNEvaluationDataPoint.of(np.array([0, 2]), np.array([0, 1]), extra_metrics={"gap": gap})
    assert edp.extra == {"gap": 1.0}
    assert calls == [1]
    assert edp.with_extra("b", 2.0).extra == {"gap": 1.0, "b": 2.0}


def test_unequal_shapes_and_unknown_averages_are_refused():
    with pytest.raises(ValueError, match=r"shape \(2,\) cannot be scored against .* \(3,\)"):
        NNEvaluationDataPoint.of(np.zeros(2), np.zeros(3))
    with pytest.raises(ValueError, match="average must be one of macro"):
        NNEvaluationDataPoint.of(np.zeros(2), np.zeros(2), average="mean")


def test_mean_of_averages_each_metric_over_the_records_that_hold_it():
    mean = NNEvaluationDataPoint.mean_of(
        [
            NNEvaluationDataPoint(loss=1.0, extra={"a": 1.0}),
            NNEvaluationDataPoint(loss=3.0, f1=0.5, extra={"a": 2.0, "b": 7.0}),
        ]
    )
    assert (mean.loss, mean.f1, mean.recall) == (2.0, 0.5, None)
    assert mean.extra == {"a": 1.5, "b": 7.0}
    with pytest.raises(ValueError, match="at least one"):
        NNEvaluationDataPoint.mean_of([])


def test_the_monitored_training_record_is_the_summary_where_there_is_one():
    summary = NNEvaluationDataPoint(loss=2.0)
    assert idp().monitored_train_edp() == NNEvaluationDataPoint()
    assert idp(train_summary=summary).monitored_train_edp() is summary


def test_resume_status_round_trips_and_refuses_an_unknown_mode():
    status = ResumeStatus(mode="stateful", source_run_id="a" * 32, restored_components=["x"])
    assert ResumeStatus.from_state(status.state()) == status
    assert "source_epoch" not in status.state()
    with pytest.raises(ValueError, match="'warm'"):
        ResumeStatus(mode="warm")


def test_records_import_neither_torch_nor_numpy():
    code = "import nnx.records, sys; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@given(edps)
def test_equal_records_have_equal_hashes(edp):
    again = NNEvaluationDataPoint.from_state(edp.state())
    assert hash(again) == hash(edp)
    assert len({idp(train_edp=edp), idp(train_edp=again)}) == 1


def test_the_metrics_of_a_record_are_its_own_and_read_only():
    given_extra, given_metrics = {"a": 1.0}, {"nll": 0.5}
    record = NNEvaluationDataPoint(extra=given_extra, metrics=given_metrics)
    given_extra["a"], given_metrics["nll"] = 2.0, 0.1
    assert (record.extra, record.metrics) == ({"a": 1.0}, {"nll": 0.5})
    for mapping in (record.extra, record.metrics, NNEvaluationDataPoint().extra):
        with pytest.raises(TypeError):
            mapping["a"] = 3.0
    assert record.with_extra("b", 2.0).extra == {"a": 1.0, "b": 2.0}
    assert record.extra == {"a": 1.0}
    assert pickle.loads(pickle.dumps(record)) == record
    assert copy.deepcopy(record) == record
    assert type(record.state()["extra"]) is dict


def test_what_is_no_mapping_is_no_extra():
    with pytest.raises(TypeError):
        NNEvaluationDataPoint(extra=3)
