"""Pooling, pairing, intervals and the report, on values written by hand."""

from __future__ import annotations

import json
import math
import random
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nnx.comparison import (
    Bootstrap,
    ComparisonError,
    ComparisonReport,
    IncompatibleObservations,
    Metric,
    Observation,
    compare,
    summarize,
)

NLL = Metric("nll", "min", "nats")


def seen(run, value, **changes) -> Observation:
    known = {
        "metric": NLL, "split": "validation", "selection": "last", "attempt_id": f"t-{run}",
        "config": "A", "data": "d", "split_id": "s",
    }  # fmt: skip
    return Observation(run_id=run, value=value, **{**known, **changes})


def side(config, values, **changes):
    return [
        seen(f"{config}{seed}", value, config=config, replicate=f"seed={seed}", **changes)
        for seed, value in values.items()
    ]


def test_statistics_count_completed_finite_attempts_and_list_the_others() -> None:
    rows = [
        seen("a", 1.0), seen("b", 2.0), seen("c", 4.5), seen("d", 9.0, status="failed"),
        seen("e", math.nan), seen("f", None), seen("g", 3.0, status="unknown"),
    ]  # fmt: skip
    group = summarize(rows).pooled()
    assert (group.n, group.n_attempts, group.n_failed, group.n_nonfinite) == (3, 7, 2, 2)
    assert group.mean == pytest.approx(statistics.mean([1, 2, 4.5]))
    assert group.std == pytest.approx(statistics.stdev([1, 2, 4.5]))
    assert len(group.observations) == 7
    one = summarize(rows[:1]).pooled()
    assert (one.mean, one.std) == (1.0, None)
    none = summarize([seen("x", None)]).pooled()
    assert (none.n, none.mean, none.std) == (0, None, None)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=2, max_size=8))
def test_statistics_do_not_overflow(values) -> None:
    group = summarize([seen(f"r{i}", v) for i, v in enumerate(values)]).pooled()
    assert math.isfinite(group.mean)
    assert min(values) - 1e-9 * abs(group.mean) <= group.mean
    if max(map(abs, values)) < 1e150:
        assert group.std == pytest.approx(statistics.stdev(values), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("metric", Metric("nll", "min")), ("split", "train"), ("selection", "best"),
        ("config", "B"), ("data", None), ("split_id", "other"),
    ],
)  # fmt: skip
def test_what_may_not_be_pooled_is_stratified_and_named(field, value) -> None:
    summary = summarize([seen("a", 1.0), seen("b", 2.0, **{field: value})])
    assert len(summary.groups) == 2
    assert summary.differing == (field,)
    with pytest.raises(IncompatibleObservations, match=f"differ in {field}") as error:
        summary.pooled()
    assert error.value.fields == (field,)
    assert sorted(row.run_id for row in summary.observations) == ["a", "b"]


def test_an_attempt_counts_once_for_a_metric() -> None:
    with pytest.raises(ComparisonError, match="t-a is there twice for nll"):
        summarize([seen("a", 1.0), seen("a", 2.0, split="train")])
    other = Metric("f1", "max")
    assert len(summarize([seen("a", 1.0), seen("a", 0.5, metric=other)]).groups) == 2
    assert summarize([seen("a", 1.0), seen("a", 1.0, attempt_id="again")]).pooled().n == 2


def test_pairs_are_signed_and_nothing_is_dropped_in_silence() -> None:
    a = side("A", {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 9: 0.0})
    b = [
        *side("B", {1: 0.5, 2: 2.5, 3: 2.0, 7: 1.0}),
        *side("B", {4: 3.0}, status="failed"),
    ]
    found = compare(a, b, pairing="equal seeds")
    assert [(p.replicate, p.delta) for p in found.pairs] == [
        ("seed=1", -0.5), ("seed=2", 0.5), ("seed=3", -1.0), ("seed=4", None),
    ]  # fmt: skip
    assert (found.n, found.mean) == (3, pytest.approx(-1 / 3))
    assert found.std == pytest.approx(statistics.stdev([-0.5, 0.5, -1.0]))
    assert found.unmatched_a == (("seed=9", "A9/t-A9"),)
    assert found.unmatched_b == (("seed=7", "B7/t-B7"),)
    assert found.interval is None
    opposite = compare(b, a, pairing="equal seeds")
    assert opposite.mean == pytest.approx(1 / 3)


def test_a_difference_that_overflows_is_counted() -> None:
    found = compare(
        side("A", {1: -1.7e308, 2: 1.0}), side("B", {1: 1.7e308, 2: 3.0}), pairing="seeds"
    )
    assert (found.n, found.n_nonfinite, found.mean) == (1, 1, 2.0)


@pytest.mark.parametrize(
    ("a", "b", "pairing", "message"),
    [
        ([], side("B", {1: 1.0}), "seeds", "no observation"),
        (side("A", {1: 1.0}), side("B", {1: 1.0}), " ", "what an equal replicate key means"),
        ([seen("a", 1.0)], side("B", {1: 1.0}), "seeds", "no replicate key"),
        ([seen("a", 1.0, replicate="k"), seen("b", 1.0, replicate="k")], side("B", {1: 1.0}),
         "seeds", "the same replicate key 'k'"),
        (side("A", {1: 1.0}), side("B", {1: 1.0}, data=None), "seeds", "data: d and unknown"),
        (side("A", {1: 1.0}), side("B", {1: 1.0}, split_id="x"), "seeds", "split_id: s and x"),
        ([*side("A", {1: 1.0}), *side("C", {2: 1.0})], side("B", {1: 1.0}), "seeds", "populations"),
    ],
)  # fmt: skip
def test_sides_that_cannot_be_paired_are_refused(a, b, pairing, message) -> None:
    with pytest.raises(ComparisonError, match=message):
        compare(a, b, pairing=pairing)


def test_a_bootstrap_resamples_the_pairs_and_moves_no_global_stream() -> None:
    deltas = [0.1, -0.2, 0.4, 0.3, 0.05]
    before = random.getstate(), np.random.get_state()[1].tolist()
    draw = Bootstrap(seed=3, resamples=500, level=0.9)
    rows = np.random.default_rng(3).integers(0, 5, (500, 5))
    wanted = np.quantile(np.array(deltas)[rows].mean(1), [0.05, 0.95])
    assert draw.interval(deltas) == pytest.approx(tuple(wanted))
    assert before == (random.getstate(), np.random.get_state()[1].tolist())
    assert draw.interval([0.5]) is None
    assert draw.interval([0.25, 0.25, 0.25]) == (0.25, 0.25)
    assert draw.state()["seed"] == 3
    for wrong in ({"seed": -1}, {"seed": 1, "resamples": 0}, {"seed": 1, "level": 1.0}):
        with pytest.raises(ComparisonError):
            Bootstrap(**wrong)
    with pytest.raises(ComparisonError, match="finite"):
        draw.interval([math.inf, 1.0])


def report() -> ComparisonReport:
    a = side("A", {1: 1.0, 2: 2.0, 9: math.nan})
    b = side("B", {1: 0.5, 2: 2.5, 3: 2.0})
    return ComparisonReport.build([*a, *b], [(a, b, "equal seeds")], bootstrap=Bootstrap(seed=1))


def test_a_report_says_everything_in_any_order_of_input(tmp_path) -> None:
    one = report()
    a = side("A", {9: math.nan, 2: 2.0, 1: 1.0})
    b = side("B", {3: 2.0, 2: 2.5, 1: 0.5})
    other = ComparisonReport.build([*b, *a], [(a, b, "equal seeds")], bootstrap=Bootstrap(seed=1))
    assert one.text() == other.text()
    assert one.table() == other.table()
    assert one.to_json() == other.to_json()
    kinds = [row["kind"] for row in one.table()]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        "group": 2, "observation": 6, "comparison": 1, "pair": 2, "unmatched": 2,
    }  # fmt: skip
    json.dumps(one.table(), allow_nan=False)
    text = one.text()
    for part in (
        "A9/t-A9",
        "+0.5",
        "-0.5",
        "not_completed: 0",
        "seed=3: on side B alone",
        "not a test",
    ):
        assert part in text
    one.save(tmp_path / "report.json")
    assert ComparisonReport.load(tmp_path / "report.json").to_json() == one.to_json()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["summary"]["groups"][0].update(mean=0.0), "changed after it was written"),
        (lambda s: s["comparisons"][0]["result"].update(interval=[0, 1]), "changed after"),
        (lambda s: s["observations"][0].update(value=5.0), "changed after"),
        (lambda s: s.update(format="nnx.comparison/9"), "format is 'nnx.comparison/9'"),
        (lambda s: s.pop("observations"), "damaged"),
    ],
)
def test_a_report_whose_results_disagree_is_refused(change, message, tmp_path) -> None:
    state = json.loads(report().to_json())
    change(state)
    (tmp_path / "r.json").write_text(json.dumps(state))
    with pytest.raises(ComparisonError, match=message):
        ComparisonReport.load(tmp_path / "r.json")
    (tmp_path / "r.json").write_text('{"format": NaN}')
    with pytest.raises(ComparisonError, match="NaN is not JSON"):
        ComparisonReport.load(tmp_path / "r.json")


@pytest.mark.parametrize(
    "wrong",
    [
        {"status": "done"}, {"value": "1"}, {"split": ""}, {"config": ""}, {"metric": "nll"},
    ],
)  # fmt: skip
def test_a_wrong_observation_is_refused(wrong) -> None:
    with pytest.raises(ComparisonError):
        seen("a", **{"value": 1.0, **wrong})
    with pytest.raises(ComparisonError, match="direction"):
        Metric("nll", "down")
    assert Observation.from_state(seen("a", math.inf).state()) == seen("a", math.inf)
