"""Folds of a cross-validation: every row is validated once, and like goes with like."""

from __future__ import annotations

import datetime as dt
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nnx.data_splits import SplitError, SplitManifest, plan_folds
from sklearn.model_selection import TimeSeriesSplit


def validated(folds) -> list:
    return sorted(sample for fold in folds for sample in fold.validation)


@given(st.integers(2, 6), st.integers(6, 40), st.integers(0, 5))
def test_rows_are_validated_once_by_folds_of_equal_size(k, rows, seed) -> None:
    folds = plan_folds(k=k, n_rows=rows, seed=seed, source="table")
    assert validated(folds) == list(range(rows))
    sizes = [len(fold.validation) for fold in folds]
    assert max(sizes) - min(sizes) <= 1
    for fold in folds:
        assert sorted(fold.train + fold.validation) == list(range(rows))
        assert SplitManifest.from_json(fold.to_json()).digest() == fold.digest()
    assert len({fold.digest() for fold in folds}) == k


@given(st.lists(st.sampled_from("abc"), min_size=12, max_size=60), st.integers(2, 4), st.randoms())
def test_a_class_has_its_share_of_every_fold_in_any_order_of_rows(labels, k, random) -> None:
    small = [name for name, count in Counter(labels).items() if count < k]
    ids = [f"row{i}" for i in range(len(labels))]
    if small:
        with pytest.raises(SplitError, match="fewer rows than the"):
            plan_folds(ids, labels=labels, k=k)
        return
    folds = plan_folds(ids, labels=labels, k=k)
    of = dict(zip(ids, labels))
    assert validated(folds) == sorted(ids)
    for name in set(labels):
        counts = [sum(of[sample] == name for sample in fold.validation) for fold in folds]
        assert max(counts) - min(counts) <= 1
    sizes = [len(fold.validation) for fold in folds]
    assert max(sizes) - min(sizes) <= 1
    order = list(range(len(ids)))
    random.shuffle(order)
    again = plan_folds([ids[i] for i in order], labels=[labels[i] for i in order], k=k)
    assert [fold.digest() for fold in again] == [fold.digest() for fold in folds]


@given(st.lists(st.integers(0, 9), min_size=10, max_size=60), st.integers(2, 5))
def test_a_group_is_never_parted(groups, k) -> None:
    if len(set(groups)) < k:
        with pytest.raises(SplitError, match="cannot fill"):
            plan_folds(groups=groups, k=k, source="table")
        return
    folds = plan_folds(groups=groups, k=k, source="table")
    assert validated(folds) == list(range(len(groups)))
    for fold in folds:
        assert fold.validation
        assert not {groups[i] for i in fold.train} & {groups[i] for i in fold.validation}
    largest = max(Counter(groups).values())
    sizes = [len(fold.validation) for fold in folds]
    assert max(sizes) - min(sizes) <= largest


def test_by_time_a_fold_is_validated_by_what_came_before() -> None:
    days = [dt.date(2024, 1, 1) + dt.timedelta(days=i) for i in range(24)]
    folds = plan_folds(times=days, k=3, source="table")
    wanted = TimeSeriesSplit(n_splits=3).split(days)
    for fold, (train, validation) in zip(folds, wanted):
        assert (list(fold.train), list(fold.validation)) == (train.tolist(), validation.tolist())
        assert sorted(fold.train + fold.validation + fold.excluded) == list(range(24))
    gapped = plan_folds(times=days, k=3, gap=dt.timedelta(days=2), source="table")
    for fold, plain in zip(gapped, folds):
        assert fold.train == plain.train[:-2]
        assert fold.validation == plain.validation
    moments = np.array(["2024-01-01", "2024-01-02"], dtype="datetime64[s]").repeat(6)
    (fold,) = plan_folds(times=moments, k=1, source="table")  # equal times stay together
    assert (fold.train, fold.validation) == (tuple(range(6)), tuple(range(6, 12)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_rows": 4}, "needs source="),
        ({"source": "x"}, "say how many rows"),
        ({"n_rows": 4, "source": "x", "k": 1}, "k must be"),
        ({"n_rows": 4, "source": "x"}, "4 row.s. cannot fill 5 folds"),
        ({"labels": [0, 1], "groups": [0, 1], "source": "x"}, "by one of labels, groups and times"),
        ({"n_rows": 9, "gap": 1, "source": "x"}, "belongs to times="),
        ({"times": [1, 1, 1, 2], "k": 3, "source": "x"}, "too few distinct times"),
        ({"times": [1, 2, 3, 4], "k": 1, "gap": 9, "source": "x"}, "no row to train on"),
        ({"ids": ["a"], "labels": [0, 1]}, "1 rows but labels has 2"),
    ],
)
def test_folds_that_cannot_be_are_refused(arguments, message) -> None:
    with pytest.raises(SplitError, match=message):
        plan_folds(**arguments)
