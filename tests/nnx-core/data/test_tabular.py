"""A DataFrame becomes loaders of exact tensors, split as declared."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest
import torch
from nnx import NNTabularDataset
from nnx.data_splits import SplitError, SplitManifest, plan_split
from nnx.plugins.siblings import install_line
from nnx.preprocessing import PreprocessingError, Standardizer
from nnx.utils.identity import hash_bytes
from torch.utils.data import TensorDataset, random_split

N = 40


def frame():
    generator = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "id": [f"r{i:02d}" for i in range(N)],
            "age": generator.integers(20, 60, N),
            "income": generator.normal(size=N),
            "label": [i % 3 for i in range(N)],
            "price": generator.normal(size=N),
            "group": [i // 4 for i in range(N)],
        }
    )


def dataset(df=None, **options):
    options = {"feature_cols": ["age", "income"], "target_col": "label", **options}
    return NNTabularDataset(df=frame() if df is None else df, **options)


def rows(loader):
    return [] if loader is None else list(loader.dataset.indices)


def splits(ds):
    return [rows(loader) for loader in (ds.train_loader, ds.val_loader, ds.test_loader)]


def contents(ds):
    """Every row's features and target, by split."""
    return [
        None if loader is None else [torch.stack(part) for part in zip(*loader.dataset)]
        for loader in (ds.train_loader, ds.val_loader, ds.test_loader)
    ]


# -- the default split -----------------------------------------------------------------


def expected_split(generator):
    parts = random_split(TensorDataset(torch.arange(N)), [28, 6, 6], generator=generator)
    return [list(part.indices) for part in parts]


def test_rows_are_split_by_random_split_from_the_seed_or_the_global_stream():
    assert splits(dataset(seed=3)) == expected_split(torch.Generator().manual_seed(3))
    torch.manual_seed(3)
    ours, after = splits(dataset()), torch.rand(1)
    torch.manual_seed(3)
    assert ours == expected_split(torch.default_generator)
    assert torch.equal(after, torch.rand(1))


def test_a_seeded_split_moves_no_stream():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    dataset(seed=3, standardize=True)
    assert torch.equal(torch.get_rng_state(), before)


def test_features_and_classes_are_the_rows_of_the_frame():
    df = frame()
    ds = dataset(df, seed=1)
    for part, (X, y) in zip(splits(ds), contents(ds)):
        assert torch.equal(
            X, torch.tensor(df.iloc[part][["age", "income"]].to_numpy(), dtype=torch.float32)
        )
        assert y.tolist() == df["label"].iloc[part].tolist()
    assert (ds.input_dim, ds.output_dim) == (2, 3)
    assert y.dtype is torch.int64
    assert ds.state() == {
        "name": "tabular", "input_dim": 2, "output_dim": 3,
        "train_size": 28, "val_size": 6, "test_size": 6,
    }  # fmt: skip
    assert dataset(name_override="iris").name == "iris"
    pd.testing.assert_frame_equal(df, frame())


def test_only_training_shuffles_and_none_is_the_whole_split():
    ds = dataset(seed=1)
    assert [loader.batch_size for loader in (ds.train_loader, ds.val_loader, ds.test_loader)] == [
        28,
        6,
        6,
    ]
    sized = dataset(seed=1, batch_sizes=(8, np.int64(4), None))
    assert [len(x) for x, _ in sized.train_loader] == [8, 8, 8, 4]
    assert [len(x) for x, _ in sized.val_loader] == [4, 2]
    first = torch.cat([x for x, _ in sized.test_loader])
    assert torch.equal(first, contents(sized)[2][0])
    assert type(sized.train_loader.sampler).__name__ == "RandomSampler"


@pytest.mark.parametrize(
    "sizes", [(0, 1, 1), (True, 1, 1), (2.0, 1, 1), ("2", 1, 1), (-1, None, None), (1, 1), 5, None]
)
def test_batch_sizes_are_counts_or_none(sizes):
    with pytest.raises(ValueError, match="batch_sizes"):
        dataset(batch_sizes=sizes)


@pytest.mark.filterwarnings("error")
def test_zero_proportions_publish_no_loader():
    ds = dataset(seed=1, val_proportion=0.0, test_proportion=0)
    assert ds.val_loader is None
    assert ds.test_loader is None
    assert len(ds.train_loader.dataset) == N
    tiny = dataset(frame().iloc[:3], seed=1)
    assert tiny.val_loader is None


@pytest.mark.parametrize("bad", [{"val_proportion": -0.1}, {"test_proportion": 1.0}, {"val_proportion": 0.6, "test_proportion": 0.4},
                                 {"val_proportion": float("nan")}, {"val_proportion": True}, {"val_proportion": "0.1"}])  # fmt: skip
def test_proportions_leave_something_to_train_on(bad):
    with pytest.raises(ValueError, match="proportion"):
        dataset(**bad)


# -- targets ---------------------------------------------------------------------------


def test_a_floating_target_dtype_is_a_regression():
    df = frame()
    df.loc[3, "price"] = np.nan
    ds = dataset(df, target_col="price", target_dtype=torch.float32, seed=1)
    assert ds.output_dim == 1
    y = torch.cat([part[1] for part in contents(ds)])
    assert y.shape == (N, 1)
    assert next(iter(ds.train_loader))[1].shape == (28, 1)
    assert y.dtype is torch.float32
    assert int(y.isnan().sum()) == 1  # an unknown target, which a regression task masks


def test_whole_numbers_stored_as_floats_are_classes():
    df = frame()
    df["label"] = df["label"].astype(float)
    assert dataset(df).output_dim == 3
    df["label"] = df["label"].astype(bool)
    assert dataset(df).output_dim == 2


@pytest.mark.parametrize(
    ("column", "options", "message"),
    [
        (
            [0.5] * N,
            {},
            r"'label' holds 0.5 in row 0, which is not a class index.*target_dtype=torch.float32",
        ),
        (["a"] * N, {}, "'label' is not numeric: 'a' in row 0|'label' is not numeric"),
        ([1.0] * (N - 1) + [np.nan], {}, "'label' holds nan in row 39"),
        ([-1] * N, {}, "every value is negative"),
        ([300] * N, {"target_dtype": torch.uint8}, "row 0: 300 does not fit torch.uint8"),
        ([np.inf] * N, {"target_dtype": torch.float32}, "row 0: inf is not finite"),
        (pd.to_datetime(["2024-01-01"] * N), {}, "is not numeric"),
    ],
)
def test_a_target_that_is_none_is_refused_by_row(column, options, message):
    df = frame()
    df["label"] = column
    with pytest.raises(ValueError, match=message):
        dataset(df, **options)


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ([0, 2], r"no row is of class 1, and the highest class is 2.*\.cat\.codes"),
        ([1, 2], "no row is of class 0"),
        ([-1, 1, 5], "no row is of class 0, and the highest class is 5"),
    ],
)
def test_labels_with_gaps_are_refused(classes, message):
    df = frame()
    df["label"] = [classes[i % len(classes)] for i in range(N)]
    with pytest.raises(ValueError, match=message):
        dataset(df)


def test_a_refusal_draws_nothing_from_the_global_stream():
    df = frame()
    df["label"] = [0, 2] * (N // 2)
    broken = frame()
    broken["income"] = broken["income"].where(broken.index != 3)
    for table, options in ((df, {}), (broken, {}), (broken, {"standardize": True})):
        torch.manual_seed(4)
        before = torch.get_rng_state()
        with pytest.raises(ValueError):
            dataset(table, **options, val_proportion=0.0, test_proportion=0.0)
        assert torch.equal(torch.get_rng_state(), before)


def test_a_split_beside_a_seed_is_refused():
    df = frame()
    plan = plan_split(df["id"], strategy="stratified", labels=df["label"], seed=1)
    with pytest.raises(ValueError, match="seed draws a split, and split= gives one already"):
        dataset(df, split=plan, id_col="id", seed=1)


def test_masked_classes_do_not_count():
    df = frame()
    df.loc[0, "label"] = -100
    assert dataset(df).output_dim == 3


# -- features --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["int64", "Int64", "object"])
def test_integer_features_stay_exact(kind):
    df = frame()
    df["age"] = pd.Series(2**53 + np.arange(N)).astype(kind)
    ds = dataset(df, feature_cols=["age"], feature_dtype=torch.int64, seed=1)
    assert sorted(x.item() for part in contents(ds) for x in part[0]) == df["age"].tolist()


@pytest.mark.parametrize(
    ("column", "dtype", "message"),
    [
        (
            [np.nan] + [0.0] * (N - 1),
            torch.float32,
            "'age', row 0: nan is not finite; drop or impute",
        ),
        ([0.0] * 7 + [np.inf] * (N - 7), torch.float32, "row 7: inf is not finite"),
        ([1e300] * N, torch.float32, "row 0: 1e.300 does not fit torch.float32"),
        ([1.5] * N, torch.int64, "row 0: 1.5 does not fit torch.int64"),
        ([300] * N, torch.int8, "row 0: 300 does not fit torch.int8"),
        (["x"] * N, torch.float32, "'age' is not numeric"),
        (pd.array([1, None] * (N // 2), dtype="Int64"), torch.float32, "row 1: nan is not finite"),
        ([1 + 2j] * N, torch.float32, "not numeric"),
        (pd.Categorical(["a"] * N), torch.float32, "not numeric"),
    ],
)
def test_a_feature_that_does_not_fit_is_refused_by_row(column, dtype, message):
    df = frame()
    df["age"] = column
    with pytest.raises(ValueError, match=message):
        dataset(df, feature_cols=["age"], feature_dtype=dtype)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"feature_cols": ["age", "nope"]}, ValueError, r"missing columns \['nope'\]; there are"),
        ({"target_col": "nope"}, ValueError, "missing columns"),
        ({"feature_cols": []}, ValueError, "feature_cols must be a list of column labels"),
        ({"feature_cols": 3}, ValueError, "feature_cols must be a list of column labels"),
        ({"feature_cols": "age"}, ValueError, "feature_cols must be a list of column labels"),
        ({"feature_cols": ["age", "label"]}, ValueError, "target column 'label' is among"),
        ({"id_col": "nope"}, ValueError, "missing columns"),
        ({"seed": 1.5}, ValueError, "seed must be an integer"),
        ({"source_identity": "v1"}, ValueError, "split is None"),
        ({"standardize": "yes"}, ValueError, "standardize must be a bool or Standardizer"),
        (
            {"standardize": True, "feature_dtype": torch.int64},
            ValueError,
            "floating to standardize",
        ),
        ({"split": {"train": []}}, ValueError, "split must be a SplitManifest"),
    ],
)
def test_arguments_are_refused_before_anything_is_drawn(options, error, message):
    state = torch.get_rng_state()
    with pytest.raises(error, match=message):
        dataset(**options)
    assert torch.equal(torch.get_rng_state(), state)


def test_other_tables_are_refused():
    with pytest.raises(
        TypeError,
        match=re.escape(f"not dict (pandas comes with: {install_line('nnx-core', 'tabular')})"),
    ):
        NNTabularDataset(df={"age": [1]}, feature_cols=["age"], target_col="label")
    doubled = pd.DataFrame(np.zeros((3, 3)), columns=["age", "age", "label"])
    with pytest.raises(ValueError, match=r"more than one column named \['age'\]"):
        dataset(doubled, feature_cols=["age"])
    with pytest.raises(ValueError, match="no rows"):
        dataset(frame().iloc[:0])


def test_columns_may_come_as_an_index():
    assert dataset(feature_cols=frame().columns[1:3]).feature_cols == ["age", "income"]


def test_a_doubled_column_that_is_not_used_does_no_harm():
    df = frame()
    df = pd.concat([df, df[["price"]]], axis=1)
    assert dataset(df).input_dim == 2


# -- a manifest ------------------------------------------------------------------------

SOURCE = hash_bytes(b"rows.csv")


def plan(df, **options):
    return plan_split(df["id"], strategy="group", groups=df["group"], seed=7, **options)


def test_a_manifest_decides_the_rows_whatever_their_order():
    df = frame()
    manifest = plan(df, source=SOURCE)
    ds = dataset(df, split=manifest, id_col="id", source_identity=SOURCE)
    for part, ids in zip(splits(ds), (manifest.train, manifest.validation, manifest.test)):
        assert tuple(df["id"].iloc[part]) == ids
    shuffled = df.sample(frac=1, random_state=1)
    again = dataset(shuffled, split=manifest, id_col="id", source_identity=SOURCE)
    for ours, theirs in zip(contents(ds), contents(again)):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs))
    assert ds.state()["split"] == manifest.digest()


def test_the_index_is_never_taken_for_ids():
    df = frame()
    manifest = plan(df)
    with pytest.raises(ValueError, match="which column holds the ids with id_col="):
        dataset(df.set_index("id"), split=manifest)


def test_a_manifest_that_does_not_match_is_refused_before_a_tensor_exists():
    df = frame()
    manifest = plan(df, source=SOURCE)
    broken = df.astype({"age": object})
    broken.loc[0, "age"] = "text"  # would be refused when tensors are made
    for table, options, message in [
        (broken.iloc[:-1], {"source_identity": SOURCE}, "lacks 1 planned"),
        (broken, {}, "none was given"),
        (broken, {"source_identity": "other"}, "got 'other'"),
    ]:
        with pytest.raises(SplitError, match=message):
            dataset(table, split=manifest, id_col="id", **options)


def test_positions_need_their_source():
    df = frame()
    manifest = plan_split(strategy="group", groups=df["group"], seed=7, source="v1")
    ds = dataset(df, split=manifest, source_identity="v1")
    assert splits(ds)[0] == list(manifest.train)
    with pytest.raises(ValueError, match="row positions, so id_col cannot"):
        dataset(df, split=manifest, id_col="id", source_identity="v1")
    with pytest.raises(SplitError, match="lacks"):
        dataset(df.iloc[:-1], split=manifest, source_identity="v1")


def test_excluded_rows_are_in_no_loader_and_their_values_do_not_matter():
    df = frame()
    times = list(range(N))
    manifest = plan_split(df["id"], strategy="chronological", times=times, cutoffs=(20, 30), gap=3)
    assert manifest.excluded == ("r17", "r18", "r19", "r27", "r28", "r29")
    df["income"] = df["income"].mask(df["id"].isin(manifest.excluded))
    df["label"] = df["label"].where(~df["id"].isin(manifest.excluded), 99)
    for options in ({}, {"standardize": True}):
        ds = dataset(df, split=manifest, id_col="id", **options)
        assert [len(part) for part in splits(ds)] == [17, 7, 10]
        assert not {17, 18, 19, 27, 28, 29} & {row for part in splits(ds) for row in part}
        assert ds.output_dim == 3
    kept = df[~df["id"].isin(manifest.excluded)]
    fewer = dataset(kept, split=manifest, id_col="id", standardize=True)
    for ours, theirs in zip(contents(ds), contents(fewer)):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs))


def test_empty_optional_splits_publish_no_loader():
    df = frame()
    manifest = plan_split(df["id"], strategy="chronological", times=range(N), cutoffs=(None, 30))
    ds = dataset(df, split=manifest, id_col="id")
    assert ds.val_loader is None
    assert len(ds.test_loader.dataset) == 10
    empty = SplitManifest(strategy="explicit", train=[], validation=list(df["id"]), test=[])
    with pytest.raises(SplitError, match="training split of this plan is empty"):
        dataset(df, split=empty, id_col="id")


# -- standardization -------------------------------------------------------------------


@pytest.mark.parametrize("by_manifest", [False, True])
def test_it_is_fitted_on_the_training_rows_of_the_same_split(by_manifest):
    df = frame()
    options = {"split": plan(df), "id_col": "id"} if by_manifest else {"seed": 5}
    raw, ds = dataset(df, **options), dataset(df, standardize=True, **options)
    assert splits(ds) == splits(raw)
    train = df.iloc[splits(ds)[0]][["age", "income"]]
    assert ds.standardizer.mean == pytest.approx(train.mean().to_numpy())
    assert ds.standardizer.scale == pytest.approx(train.std(ddof=0).to_numpy())
    for part, (X, _) in zip(splits(ds), contents(ds)):
        assert torch.equal(X, ds.standardizer.transform(df.iloc[part]))
    assert ds.state()["standardizer"] == ds.standardizer.state()
    assert raw.standardizer is None
    if by_manifest:
        assert ds.standardizer.fit_membership == options["split"].identity()
    pd.testing.assert_frame_equal(df, frame())


def test_the_same_draw_with_and_without_standardization():
    torch.manual_seed(2)
    plain, after = splits(dataset()), torch.rand(1)
    torch.manual_seed(2)
    assert splits(dataset(standardize=True)) == plain
    assert torch.equal(torch.rand(1), after)


def test_a_fitted_one_is_applied_without_refitting():
    fitted = dataset(seed=1, standardize=True).standardizer
    reloaded = Standardizer.from_json(fitted.to_json())
    df = frame() * 1
    df["income"] += 100
    ds = dataset(df, seed=2, standardize=reloaded)
    assert ds.standardizer is reloaded
    assert torch.equal(contents(ds)[0][0], fitted.transform(df.iloc[splits(ds)[0]]))


@pytest.mark.parametrize(
    ("fitted", "message"),
    [
        (
            Standardizer((0.0, 0.0), (1.0, 1.0), ("income", "age")),
            r"fitted on \('income', 'age'\), but feature_cols",
        ),
        (Standardizer((0.0, 0.0), (1.0, 1.0)), "fitted on None"),
        (
            Standardizer((0.0, 0.0), (1.0, 1.0), ("age", "income"), dtype="float64"),
            "gives float64, but feature_dtype",
        ),
    ],
)
def test_a_fitted_one_of_another_schema_is_refused_before_the_split(fitted, message):
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=message):
        dataset(standardize=fitted)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_missing_training_value_is_refused_by_column():
    df = frame()
    df["income"] = np.nan
    with pytest.raises(PreprocessingError, match="column 'income' is not finite"):
        dataset(df, standardize=True)


def test_columns_in_another_order_than_the_frame():
    df = frame()
    ds = dataset(df, feature_cols=["income", "age"], seed=1, standardize=True)
    part = splits(ds)[0]
    expected = ds.standardizer.transform(df.iloc[part][["income", "age"]])
    assert torch.equal(contents(ds)[0][0], expected)
