"""Junk of any kind is refused by our own errors, never by a stray one from below."""

from __future__ import annotations

import datetime as dt
import decimal

import numpy as np
import pandas as pd
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nnx import NNTabularDataset
from nnx.data_splits import SplitError, SplitManifest, plan_split
from nnx.preprocessing import PreprocessingError, Standardizer

VALUES = [
    None, True, 0, 1, -1, 2**64, 10**400, 1.5, float("nan"), float("inf"), "", "a", "\ud800", b"x",
    1j, (), (1,), [], {}, {1}, object(), print, pd.NA, pd.NaT, np.nan, np.int8(3), np.float16(2),
    np.bool_(True), np.str_("s"), np.datetime64("NaT"), np.datetime64("2024-01-01"),
    np.timedelta64(3, "D"), np.datetime64("2024", "Y"), dt.date(2024, 1, 1), dt.datetime(2024, 1, 1),
    dt.datetime(2024, 1, 1, tzinfo=dt.timezone.utc), dt.timedelta(days=1), pd.Timestamp("2024"),
    pd.Timedelta("1D"), pd.Period("2024"), decimal.Decimal("1.5"), torch.tensor(3), torch.zeros(2),
    np.zeros((2, 2)),
]  # fmt: skip
junk = st.sampled_from(range(len(VALUES))).map(VALUES.__getitem__)
columns = st.one_of(
    junk, st.lists(junk, max_size=4), st.tuples(junk, junk), st.lists(junk, min_size=3, max_size=3)
)
quiet = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@quiet
@given(
    columns, columns, columns, columns, columns, junk, junk, junk, st.integers(0, 3), st.booleans()
)
def test_a_split_is_planned_or_refused(
    ids, column, proportions, cutoffs, other, gap, seed, source, which, few
):
    strategy = ("group", "stratified", "chronological", "explicit")[which]
    name = ("groups", "labels", "times", "groups")[which]
    arguments = {name: column}
    if strategy == "chronological":
        arguments |= {"cutoffs": cutoffs} if few else {"cutoffs": cutoffs, "gap": gap}
    else:
        arguments |= {"seed": 1} if few else {"proportions": proportions, "seed": seed}
    try:
        plan = plan_split(ids, strategy=strategy, source=None if few else source, **arguments)
    except SplitError:
        return
    assert SplitManifest.from_json(plan.to_json()) == plan


@quiet
@given(
    st.fixed_dictionaries(dict.fromkeys(("train", "validation", "test", "excluded"), columns)),
    junk,
    junk,
    columns,
)
def test_a_manifest_is_made_or_refused(members, seed, parameters, ids):
    try:
        plan = SplitManifest(strategy="explicit", **members, seed=seed, parameters=parameters)
        plan.resolve(ids)
    except SplitError:
        pass


@quiet
@given(columns, columns, columns, junk, columns)
def test_a_standardizer_is_fitted_or_refused(source, rows, names, dtype, data):
    try:
        fitted = Standardizer.fit(source, rows=rows, columns=names, dtype=dtype)
        fitted.transform(data)
    except PreprocessingError:
        pass


GOOD = Standardizer((0.0, 1.0), (1.0, 2.0), ("a", "b"))


@quiet
@given(columns, columns, junk)
def test_rows_are_transformed_or_refused(a, b, row):
    try:
        frame = pd.DataFrame({"a": pd.Series(a, dtype=object), "b": pd.Series(b, dtype=object)})
    except Exception:
        frame = None
    for use, data in ((GOOD.transform, frame), (GOOD, row), (GOOD, [a, b]), (GOOD.transform, row)):
        try:
            result = use(data)
            assert torch.isfinite(result).all()
        except PreprocessingError:
            pass


@quiet
@given(st.lists(junk, min_size=1, max_size=4), st.lists(junk, min_size=1, max_size=4), junk, junk)
def test_a_table_is_wrapped_or_refused(feature, target, dtype, sizes):
    rows = min(len(feature), len(target))
    frame = pd.DataFrame(
        {
            "x": pd.Series(feature[:rows], dtype=object),
            "y": pd.Series(target[:rows], dtype=object),
        }
    )
    try:
        dataset = NNTabularDataset(
            df=frame, feature_cols=["x"], target_col="y", batch_sizes=(sizes, None, None),
            val_proportion=0, test_proportion=0,
        )  # fmt: skip
    except ValueError:
        return
    assert len(dataset.train_loader.dataset) == rows
