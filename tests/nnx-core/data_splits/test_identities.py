"""Plans as the original system deals and stores them."""

from __future__ import annotations

import datetime as dt
import json
from fractions import Fraction
from pathlib import Path

import pytest
from nnx.data.split_strategies import one_from_the_richest
from nnx.data_splits import SplitError, SplitManifest, plan_split
from nnx.provenance import ExperimentManifest, IdentityRef

DATA = Path(__file__).parents[2] / "data"
WANTED = json.loads((DATA / "identities.json").read_text())
IDS = [f"r{i}" for i in range(40)]
CASES = {
    "split_group": {
        "strategy": "group", "groups": [i // 4 for i in range(40)],
        "proportions": (0.6, 0.2, 0.2), "seed": 3,
    },
    "split_time": {"strategy": "chronological", "times": list(range(40)), "cutoffs": (25, 33)},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_plan_its_stored_form_and_its_digest_are_those_of_the_original(case):
    plan = plan_split(IDS, **CASES[case])
    assert json.loads(json.dumps(plan.state())) == WANTED[case]["state"]
    assert plan.digest() == plan.identity().value == WANTED[case]["digest"]
    assert SplitManifest.from_json(json.dumps(WANTED[case]["state"])) == plan


def test_parameters_hold_what_was_asked():
    labels = [i % 3 if i else 9 for i in range(40)]
    stratified = {"strategy": "stratified", "labels": labels, "seed": 1}
    with pytest.raises(SplitError):
        plan_split(IDS, **stratified)
    plan = plan_split(IDS, **stratified, insufficient="train")
    assert dict(plan.parameters) == {
        "proportions": (0.7, 0.15, 0.15), "insufficient": "train", "train_only_classes": (9,),
    }  # fmt: skip
    plain = plan_split(IDS, **{**stratified, "labels": [i % 3 for i in range(40)]})
    assert dict(plain.parameters) == {"proportions": (0.7, 0.15, 0.15), "insufficient": "raise"}


def test_a_gap_is_recorded_as_a_number_of_seconds_for_times():
    times = {"strategy": "chronological", "times": list(range(40)), "cutoffs": (25, 33)}
    assert plan_split(IDS, **times, gap=2).parameters["gap"] == 2
    days = [dt.date(2024, 1, 1) + dt.timedelta(days=i) for i in range(40)]
    for column in (days, [dt.datetime.combine(day, dt.time()) for day in days]):
        arguments = {"strategy": "chronological", "times": column, "cutoffs": (column[25], None)}
        gap = dt.timedelta(days=2)
        assert plan_split(IDS, **arguments, gap=gap).parameters["gap"] == 2 * 86400
        assert plan_split(IDS, **arguments).parameters["gap"] == 0
    half = {"times": [dt.datetime(2024, 1, 1, 0, 0, i) for i in range(40)]}
    half |= {"strategy": "chronological", "cutoffs": (half["times"][25], None)}
    assert plan_split(IDS, **half, gap=dt.timedelta(seconds=1.5)).parameters["gap"] == 1.5


def test_the_row_that_a_small_class_needs_comes_from_the_split_with_most_beyond_its_wish():
    counts = [3, 2, 0]
    one_from_the_richest(counts, [Fraction(3), Fraction(1), Fraction(1)], [0, 1, 2])
    assert counts == [3, 1, 1]  # the fullest split had no more than it wished
    counts = [2, 1, 0]
    one_from_the_richest(counts, [Fraction(5, 2), Fraction(0), Fraction(1, 2)], [0, 1, 2])
    assert counts == [1, 1, 1]  # a split keeps its only row


# -- sources -------------------------------------------------------------------------


def test_the_kind_of_an_identity_is_called_identity_and_an_earlier_name_is_read():
    assert IdentityRef.unknown().state() == {"identity": "unknown", "value": None}
    named = IdentityRef.declared("rows")
    assert named.state() == {"identity": "declared", "value": "rows"}
    for state in (named.state(), {"kind": "declared", "value": "rows"}):
        assert IdentityRef.from_state(state) == named
    assert IdentityRef.from_state({"kind": "unknown"}) == IdentityRef.unknown()


@pytest.mark.parametrize("name", ["group", "stratified", "chronological"])
def test_a_plan_of_an_earlier_form_keeps_its_members_and_its_digest(name, tmp_path):
    folder = DATA / "earlier-runs"
    digest = json.loads((folder / "expected.json").read_text())[f"split_{name}"]["digest"]
    plan = SplitManifest.load(folder / "splits" / f"{name}.json")
    stored = json.loads((folder / "splits" / f"{name}.json").read_text())
    assert list(plan.train) == stored["train"]
    assert plan.digest() == f"sha256:{digest}"
    assert plan.resolve([f"r{i}" for i in range(24)], source=plan.source).train
    assert ExperimentManifest(splits={"main": plan}).splits["main"].value == f"sha256:{digest}"
    plan.save(tmp_path / "again.json")
    assert SplitManifest.load(tmp_path / "again.json") == plan
    assert plan.state() == stored
