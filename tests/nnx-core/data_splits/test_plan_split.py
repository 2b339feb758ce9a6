"""A plan deals every row once, keeps groups and classes, and depends on no row order."""

from __future__ import annotations

import datetime as dt
import hashlib
import random
from collections import Counter
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nnx.data_splits import SplitError, SplitManifest, plan_split
from nnx.utils.identity import IdentityRef

IDS = st.one_of(
    st.lists(st.integers(-(2**70), 2**70), min_size=3, max_size=60, unique=True),
    st.lists(st.text(max_size=5), min_size=3, max_size=60, unique=True),
)
SHARES = st.sampled_from(
    [None, (0.7, 0.15, 0.15), (0.5, 0.5, 0), (0.8, 0, 0.2), (1, 0, 0), (0.34, 0.33, 0.33)]
)


def rank(seed, what, key):
    return hashlib.sha256(f"nnx.split.rank\0{seed}\0{what}\0{key}".encode()).digest()


def splits(plan):
    return plan.train, plan.validation, plan.test, plan.excluded


def assert_each_row_once(plan, ids):
    dealt = [i for part in splits(plan) for i in part]
    assert Counter(dealt) == Counter(ids)
    assert all(list(part) == sorted(part) for part in splits(plan))
    assert plan.n_rows == len(ids)


def shuffled(seed, *columns):
    order = list(range(len(columns[0])))
    random.Random(seed).shuffle(order)
    return [[column[i] for i in order] for column in columns]


# -- group ---------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(IDS, st.data(), SHARES, st.integers(0, 2**40))
def test_no_group_straddles_and_no_row_is_lost_or_doubled(ids, data, shares, seed):
    groups = data.draw(st.lists(st.sampled_from("abcdefg"), min_size=len(ids), max_size=len(ids)))
    active = 3 if shares is None else sum(s > 0 for s in shares)
    arguments = {"strategy": "group", "proportions": shares, "seed": seed}
    if len(set(groups)) < active:
        with pytest.raises(SplitError, match="cannot fill"):
            plan_split(ids, groups=groups, **arguments)
        return
    plan = plan_split(ids, groups=groups, **arguments)
    assert_each_row_once(plan, ids)
    of = dict(zip(ids, groups))
    parts = [{of[i] for i in part} for part in splits(plan)]
    assert not parts[0] & parts[1] | parts[0] & parts[2] | parts[1] & parts[2]
    assert [bool(p) for p in parts[:3]] == [s > 0 for s in shares or (1, 1, 1)]
    ids2, groups2 = shuffled(seed, ids, groups)
    assert plan_split(ids2, groups=groups2, **arguments) == plan


def test_groups_are_visited_in_seeded_order_and_go_where_most_rows_are_missing():
    sizes = {"a": 4, "b": 3, "c": 2, "d": 2, "e": 1}
    groups = [g for g, n in sizes.items() for _ in range(n)]
    plan = plan_split(
        range(12), strategy="group", groups=groups, proportions=(0.5, 0.25, 0.25), seed=3
    )
    order = sorted(sizes, key=lambda g: rank(3, "group", f"s{g}"))
    room, chosen = [6, 3, 3], {}
    for group in order:
        split = max(range(3), key=lambda s: (room[s], -s))
        chosen[group] = split
        room[split] -= sizes[group]
    expected = [tuple(i for i in range(12) if chosen[groups[i]] == s) for s in range(3)]
    assert [plan.train, plan.validation, plan.test] == expected
    assert all(expected)


def test_an_empty_active_split_takes_the_smallest_group_of_the_fullest():
    # Two rows of test are never the furthest below target until it is forced.
    groups = ["big"] * 50 + ["mid"] * 40 + ["s"] * 5 + ["t"] * 5
    plan = plan_split(
        range(100), strategy="group", groups=groups, proportions=(0.98, 0.01, 0.01), seed=0
    )
    names = [{groups[i] for i in part} for part in splits(plan)[:3]]
    assert all(len(n) >= 1 for n in names)
    assert names[1] | names[2] <= {"s", "t", "mid"}


def test_groups_of_other_kinds():
    for groups in ([1, 1, 2, 3], [True, True, False, False], [0.5, 0.5, 1.5, 2.5]):
        shares = (0.5, 0.25, 0.25) if len(set(groups)) > 2 else (0.5, 0.5, 0)
        plan = plan_split(list("abcd"), strategy="group", groups=groups, proportions=shares, seed=1)
        assert_each_row_once(plan, list("abcd"))


# -- stratified ----------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(IDS, st.data(), SHARES, st.integers(0, 2**40))
def test_every_class_reaches_every_active_split(ids, data, shares, seed):
    labels = data.draw(
        st.lists(st.sampled_from([0, 1, 2, 9]), min_size=len(ids), max_size=len(ids))
    )
    active = 3 if shares is None else sum(s > 0 for s in shares)
    sizes = Counter(labels)
    arguments = {"strategy": "stratified", "proportions": shares, "seed": seed}
    small = sorted(c for c, n in sizes.items() if n < active)
    if small:
        with pytest.raises(
            SplitError, match=f"fewer rows than the {active} active splits: {small[0]} "
        ):
            plan_split(ids, labels=labels, **arguments)
    if len(small) == len(sizes) and active > 1:
        return
    plan = plan_split(ids, labels=labels, insufficient="train", **arguments)
    assert_each_row_once(plan, ids)
    assert list(plan.parameters.get("train_only_classes", ())) == small
    assert ("train_only_classes" in plan.parameters) == bool(small)
    of = dict(zip(ids, labels))
    for s, part in enumerate(splits(plan)[:3]):
        classes = {of[i] for i in part}
        if (shares or (1, 1, 1))[s]:
            assert classes >= set(sizes) - set(small)
        if s:
            assert not classes & set(small)
    ids2, labels2 = shuffled(seed, ids, labels)
    assert plan_split(ids2, labels=labels2, insufficient="train", **arguments) == plan


def counts_by_class(plan, labels):
    return [Counter(labels[i] for i in part) for part in splits(plan)[:3]]


def test_large_classes_are_cut_exactly_and_totals_follow_the_proportions():
    labels = ["a"] * 100 + ["b"] * 40
    plan = plan_split(range(140), strategy="stratified", labels=labels, seed=5)
    train, validation, test = counts_by_class(plan, labels)
    assert (train["a"], validation["a"], test["a"]) == (70, 15, 15)
    assert (train["b"], validation["b"], test["b"]) == (28, 6, 6)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(12, 90), min_size=1, max_size=12), st.integers(0, 99))
def test_the_carried_rounding_keeps_totals_within_one_row(sizes, seed):
    labels = [c for c, n in enumerate(sizes) for _ in range(n)]
    shares = (0.6, 0.25, 0.15)
    plan = plan_split(
        range(len(labels)), strategy="stratified", labels=labels, proportions=shares, seed=seed
    )
    for part, share in zip(splits(plan), shares):
        assert abs(len(part) - Fraction(str(share)) * len(labels)) <= 1
    for s, counts in enumerate(counts_by_class(plan, labels)):
        for c, n in enumerate(sizes):
            assert abs(counts[c] - shares[s] * n) < 2


def test_the_one_row_minimum_never_skews_another_class():
    labels = ["big"] * 1000 + [f"small{i}" for i in range(40) for _ in range(3)]
    plan = plan_split(range(len(labels)), strategy="stratified", labels=labels, seed=1)
    train, validation, test = counts_by_class(plan, labels)
    assert (train["big"], validation["big"], test["big"]) == (700, 150, 150)
    for i in range(40):
        assert train[f"small{i}"] == validation[f"small{i}"] == test[f"small{i}"] == 1


def test_rows_of_a_class_are_ranked_by_seed_and_id():
    ids = [f"row{i}" for i in range(20)]
    plan = plan_split(ids, strategy="stratified", labels=[0] * 20, seed=11)
    ranked = sorted(ids, key=lambda i: rank(11, "sample", f"s{i}"))
    assert set(plan.train) == set(ranked[:14])
    assert set(plan.validation) == set(ranked[14:17])
    assert set(plan.test) == set(ranked[17:])


# -- chronological -------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=50),
    st.integers(0, 31),
    st.integers(0, 31),
    st.one_of(st.none(), st.integers(0, 10)),
    st.sampled_from(["both", "validation", "test"]),
    st.sampled_from(["int", "float", "array", "float32", "date", "naive", "utc", "datetime64", "pandas", "pandas-tz"]),
)  # fmt: skip
def test_windows_gaps_and_ties_hold_for_every_kind_of_time(days, a, b, gap, which, kind):
    a, b = sorted((a, b))
    cutoffs = {"both": (a, b), "validation": (a, None), "test": (None, b)}[which]
    convert, column = KINDS[kind]
    times = column([convert(d) for d in days])
    number = kind in ("int", "float", "array", "float32")
    arguments = {
        "strategy": "chronological",
        "times": times,
        "cutoffs": tuple(c if c is None else convert(c) for c in cutoffs),
        "gap": gap if gap is None or number else dt.timedelta(days=gap),
    }
    expected = [expected_split(d, cutoffs, gap or 0) for d in days]
    if "train" not in expected:
        with pytest.raises(SplitError, match="training split would be empty"):
            plan_split(range(len(days)), **arguments)
        return
    plan = plan_split(range(len(days)), **arguments)
    for name in ("train", "validation", "test", "excluded"):
        assert list(getattr(plan, name)) == [i for i, e in enumerate(expected) if e == name]
    assert SplitManifest.from_json(plan.to_json()) == plan


def expected_split(day, cutoffs, gap):
    if any(c is not None and c - gap <= day < c for c in cutoffs):
        return "excluded"
    validation, test = cutoffs
    if test is not None and day >= test:
        return "test"
    return "validation" if validation is not None and day >= validation else "train"


START = dt.datetime(2024, 2, 20)
ZONES = [
    dt.timezone.utc,
    dt.timezone(dt.timedelta(hours=5, minutes=30)),
    dt.timezone(dt.timedelta(hours=-8)),
]


def aware(day):
    return (START.replace(tzinfo=dt.timezone.utc) + dt.timedelta(days=day)).astimezone(
        ZONES[day % 3]
    )


def naive(day):
    return START + dt.timedelta(days=day)


KINDS = {
    "int": (int, list),
    "float": (float, list),
    "array": (int, np.array),
    "float32": (float, lambda v: np.array(v, dtype=np.float32)),
    "date": (lambda d: naive(d).date(), list),
    "naive": (naive, list),
    "utc": (aware, list),
    "datetime64": (lambda d: np.datetime64(naive(d)), np.array),
    "pandas": (lambda d: pd.Timestamp(naive(d)), pd.Series),
    "pandas-tz": (
        lambda d: pd.Timestamp(naive(d), tz="Europe/Berlin"),
        lambda v: pd.Series(v).astype("datetime64[ns, Europe/Berlin]"),
    ),
}


def test_a_timestamp_on_a_cutoff_starts_the_later_split():
    plan = plan_split(
        list("abcdef"), strategy="chronological", times=[1, 2, 2, 3, 3, 4], cutoffs=(2, 3)
    )
    assert splits(plan) == (("a",), ("b", "c"), ("d", "e", "f"), ())


def test_nanoseconds_and_large_numbers_compare_exactly():
    base = np.datetime64("2024-01-01T00:00:00.000000000")
    plan = plan_split(
        range(3),
        strategy="chronological",
        times=np.array([base, base + np.timedelta64(1, "ns"), base + np.timedelta64(2, "ns")]),
        cutoffs=(None, base + np.timedelta64(2, "ns")),
    )
    assert plan.test == (2,)
    assert plan.parameters["cutoffs"] == (None, "2024-01-01T00:00:00.000000002")
    big = 2**53
    for times in ([big, big + 1], np.array([big, big + 1])):
        plan = plan_split(range(2), strategy="chronological", times=times, cutoffs=(None, big + 1))
        assert plan.test == (1,)
    plan = plan_split(
        range(2), strategy="chronological", times=np.array([1.0, 2.0**53]), cutoffs=(None, big + 1)
    )
    assert plan.test == ()
    small = plan_split(
        range(2),
        strategy="chronological",
        times=np.array([1, 2], dtype=np.uint8),
        cutoffs=(1.5, 10**30),
    )
    assert splits(small) == ((0,), (1,), (), ())


def test_cutoffs_may_be_an_array():
    days = np.arange("2024-01-01", "2024-01-06", dtype="datetime64[D]")
    for unit in ("D", "s", "ns"):
        cutoffs = days[[2, 3]].astype(f"datetime64[{unit}]")
        plan = plan_split(range(5), strategy="chronological", times=days, cutoffs=cutoffs)
        assert splits(plan) == ((0, 1), (2,), (3, 4), ())


def test_years_beyond_nanoseconds_do_not_overflow():
    times = np.array(["1000-01-01", "9999-01-01"], dtype="datetime64[D]")
    plan = plan_split(
        range(2), strategy="chronological", times=times, cutoffs=(None, dt.datetime(5000, 1, 1))
    )
    assert (plan.train, plan.test) == ((0,), (1,))


def test_a_daylight_saving_fold_compares_as_instants():
    zone = "Europe/Berlin"
    times = pd.DatetimeIndex(["2024-10-27 00:30", "2024-10-27 01:30"], tz="UTC").tz_convert(zone)
    assert times[0].strftime("%H:%M") == times[1].strftime("%H:%M") == "02:30"
    for given_times in (times, pd.Series(times), list(times)):
        plan = plan_split(
            range(2), strategy="chronological", times=given_times, cutoffs=(None, times[1])
        )
        assert (plan.train, plan.test) == ((0,), (1,))


@pytest.mark.parametrize(
    ("times", "cutoffs", "gap", "message"),
    [
        ([1, dt.date(2024, 1, 1)], (None, 1), None, "mix dates and numbers"),
        ([dt.datetime(2024, 1, 1), aware(0)], (None, naive(1)), None, "mix naive.*aware"),
        ([naive(0), naive(2)], (None, aware(1)), None, r"cutoffs\[1\] is a timezone-aware"),
        ([naive(0), naive(2)], (None, naive(1).date()), None, r"cutoffs\[1\] is a date but"),
        ([1, 2], ("2", None), None, r"cutoffs\[0\] must be a finite number"),
        ([1, float("nan")], (None, 1), None, r"times\[1\] is missing"),
        (np.array([1.0, np.inf]), (None, 1), None, r"times\[1\] is not a finite number"),
        ([1, True], (None, 1), None, r"times\[1\] must be.*True"),
        ([naive(0), pd.NaT], (None, naive(1)), None, r"times\[1\] is missing \(NaT\)"),
        (pd.Series([naive(0), pd.NaT]), (None, naive(1)), None, r"times\[1\] is missing"),
        (["2024", "2025"], (None, 1), None, r"times\[0\] must be a finite number"),
        ([1, 2], (None, None), None, "at most one of them None"),
        ([1, 2], (1,), None, "cutoffs must be"),
        ([1, 2], (3, 2), None, "validation_start 3 comes after test_start 2"),
        ([1, 2], (None, 2), -1, "gap must be a finite number >= 0"),
        ([1, 2], (None, 2), True, "gap must be a finite number >= 0"),
        ([1, 2], (None, 2), dt.timedelta(1), "gap must be a finite number"),
        ([naive(0), naive(2)], (None, naive(1)), 3, "gap must be a timedelta >= 0"),
        ([naive(0), naive(2)], (None, naive(1)), dt.timedelta(-1), "gap must be a timedelta >= 0"),
        ([naive(0).date()], (None, naive(1).date()), dt.timedelta(hours=3), "whole days"),
        ([5, 6], (None, 2), None, "training split would be empty"),
    ],
)
def test_times_that_cannot_be_compared_are_refused(times, cutoffs, gap, message):
    with pytest.raises(SplitError, match=message):
        plan_split(
            range(len(times)), strategy="chronological", times=times, cutoffs=cutoffs, gap=gap
        )


def test_gaps_of_every_timedelta_kind():
    for gap in (
        dt.timedelta(days=1),
        np.timedelta64(1, "D"),
        np.timedelta64(24, "h"),
        pd.Timedelta("1D"),
    ):
        plan = plan_split(
            range(4), strategy="chronological", times=[naive(i) for i in range(4)],
            cutoffs=(None, naive(3)), gap=gap,
        )  # fmt: skip
        assert splits(plan) == ((0, 1), (), (3,), (2,))
    plan = plan_split(
        range(3), strategy="chronological", times=[naive(i).date() for i in range(3)],
        cutoffs=(None, naive(2).date()), gap=np.timedelta64(1, "D"),
    )  # fmt: skip
    assert plan.excluded == (1,)


# -- ids, seeds and arguments ---------------------------------------------------------

PAIR = {"strategy": "group", "groups": list("abc"), "proportions": (0.34, 0.33, 0.33)}


@pytest.mark.parametrize(
    "ids",
    [np.array([3, 1, 2]), np.array([3, 1, 2], dtype=np.uint8), pd.Series([3, 1, 2]), pd.Index([3, 1, 2]),
     torch.tensor([3, 1, 2]), (np.int64(3), 1, np.int16(2)), iter([3, 1, 2]), pd.Series([3, 1, 2], dtype="Int64")],
)  # fmt: skip
def test_any_integer_column_gives_plain_integers(ids):
    plan = plan_split(ids, seed=1, **PAIR)
    assert plan == plan_split([3, 1, 2], seed=1, **PAIR)
    assert {type(i) for part in splits(plan) for i in part} == {int}


@pytest.mark.parametrize(
    "ids", [np.array(["c", "a", "b"]), pd.Series(["c", "a", "b"]), pd.Series(["c", "a", "b"], dtype="category"),
            (np.str_("c"), "a", "b"), np.array(["c", "a", "b"], dtype=object)],
)  # fmt: skip
def test_any_string_column_gives_plain_strings(ids):
    plan = plan_split(ids, seed=1, **PAIR)
    assert plan == plan_split(["c", "a", "b"], seed=1, **PAIR)
    assert {type(i) for part in splits(plan) for i in part} == {str}


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, "a", 2], "mix int and str"),
        ([1, 1, 2], "unique; repeated: 1"),
        ([1, 2.0, 3], r"ids\[1\] must be str or int, not 2.0"),
        ([True, False, 1], r"ids\[0\] must be str or int, not True"),
        ([1, None, 2], r"ids\[1\] is missing \(None\)"),
        ([1, float("nan"), 2], r"ids\[1\] is missing \(nan\)"),
        (pd.Series([1, None, 3], dtype="Int64"), r"ids\[1\] is missing"),
        (pd.Series([1.0, 2.0, 3.0]), r"ids\[0\] must be str or int, not 1.0"),
        ([1, 2], "ids has 2 rows but groups has 3"),
        (np.array([1, 2, 3], dtype="datetime64[ns]"), r"ids\[0\] must be str or int"),
        (pd.Series(pd.to_datetime(["2024", "2025", "2026"])), r"ids\[0\] must be str or int"),
        ("abc", "column of values, not str"),
        ({"a": 1}, "column of values, not dict"),
        (np.zeros((3, 1), dtype=int), "one dimension, not 2"),
    ],
)
def test_ids_that_name_no_row_are_refused(ids, message):
    with pytest.raises(SplitError, match=message):
        plan_split(ids, seed=1, **PAIR)


def test_a_plan_without_ids_needs_a_source():
    with pytest.raises(SplitError, match="needs source="):
        plan_split(seed=1, **PAIR)
    plan = plan_split(seed=1, source="rows-v1", **PAIR)
    assert plan.ids == "position"
    assert plan.source == IdentityRef.declared("rows-v1")
    assert_each_row_once(plan, [0, 1, 2])


def test_no_random_stream_is_read_or_moved():
    states = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state()
    plan = plan_split([1, 2, 3], **PAIR)
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tobytes() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert isinstance(plan.seed, int)
    assert plan == plan_split([1, 2, 3], seed=plan.seed, **PAIR)
    assert len({plan_split([1, 2, 3], **PAIR).seed for _ in range(5)}) == 5


def test_another_seed_deals_otherwise():
    plans = {
        plan_split(range(40), strategy="group", groups=range(40), seed=s).train for s in range(5)
    }
    assert len(plans) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "random"}, "strategy must be one of group, chronological"),
        ({"strategy": "explicit"}, r'SplitManifest\(strategy="explicit", train='),
        ({"strategy": "group"}, "a group split needs groups"),
        ({"strategy": "chronological", "times": [1, 2, 3]}, "needs cutoffs"),
        ({"strategy": "chronological", "times": [1, 2, 3], "cutoffs": (None, 2), "seed": 1}, "not seed"),
        ({"strategy": "group", "groups": [1, 2, 3], "labels": [1, 2, 3]}, "not labels"),
        ({**PAIR, "insufficient": "train"}, "takes groups, proportions, seed, not insufficient"),
        ({**PAIR, "seed": 1.5}, "seed must be an integer"),
        ({**PAIR, "seed": True}, "seed must be an integer"),
        ({**PAIR, "proportions": (0.5, 0.5)}, "three numbers"),
        ({**PAIR, "proportions": (0.5, 0.4, 0.2)}, "sum to 1"),
        ({**PAIR, "proportions": (0, 0.5, 0.5)}, "train above 0"),
        ({**PAIR, "proportions": (1.2, -0.2, 0)}, "finite real number >= 0"),
        ({**PAIR, "proportions": (True, 0, 0)}, "finite real number"),
        ({**PAIR, "proportions": (float("nan"), 0, 1)}, "finite real number"),
        ({**PAIR, "groups": ["a", None, "b"]}, r"groups\[1\] is missing"),
        ({**PAIR, "groups": ["a", 1, "b"]}, "groups must have one type"),
        ({**PAIR, "groups": [1, 1.0, 2]}, "groups must have one type"),
        ({"strategy": "stratified", "labels": [0, 0, 0], "insufficient": "drop"}, '"raise" or "train"'),
        ({**PAIR, "groups": []}, "ids has 3 rows but groups has 0"),
        ({**PAIR, "source": 3}, "identity is"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(SplitError, match=message):
        plan_split([1, 2, 3], **arguments)


def test_nothing_to_split_is_refused():
    with pytest.raises(SplitError, match="no rows to split"):
        plan_split([], strategy="group", groups=[], seed=1)


def test_a_one_shot_column_is_read_once():
    plan = plan_split(iter([1, 2, 3]), strategy="group", groups=iter("abc"), seed=1)
    assert plan.n_rows == 3
