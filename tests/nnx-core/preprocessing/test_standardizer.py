"""A Standardizer reads the training rows only, checks its schema and reloads exactly."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from nnx.data_splits import SplitManifest
from nnx.preprocessing import FORMAT, PreprocessingError, Standardizer
from nnx.utils.identity import IdentityRef
from sklearn.preprocessing import StandardScaler

FRAME = pd.DataFrame(
    {
        "age": [20, 30, 40, 1000],
        "income": [1.5, 2.5, 6.5, -9.0],
        "const": [7.1] * 3 + [8.0],
        "s": list("abcd"),
    }
)
COLUMNS = ["age", "income", "const"]
ROWS = [0, 1, 2]
FITTED = Standardizer.fit(FRAME, rows=ROWS, columns=COLUMNS)


# -- fitting -------------------------------------------------------------------------


def test_the_statistics_are_those_of_the_training_rows():
    assert FITTED.mean == (30.0, 3.5, 7.1)
    assert FITTED.scale == pytest.approx(
        (np.sqrt(200 / 3), np.std([1.5, 2.5, 6.5]), 1.0), rel=1e-15
    )
    assert FITTED.columns == ("age", "income", "const")
    assert FITTED.fit_rows == 3
    assert FITTED.n_features == 3


finite = st.floats(-1e6, 1e6, width=64).map(lambda v: 0.0 if abs(v) < 1e-6 else v)


@settings(max_examples=150, deadline=None)
@given(
    arrays(np.float64, array_shapes(min_dims=2, max_dims=2, max_side=12), elements=finite),
    st.data(),
)
def test_it_agrees_with_scikit_learn_on_the_chosen_rows(table, data):
    rows = data.draw(st.lists(st.integers(0, len(table) - 1), min_size=1, unique=True))
    scaler = StandardScaler().fit(table[rows])
    ours = Standardizer.fit(table, rows=rows, dtype="float64")
    assert ours.mean == pytest.approx(scaler.mean_, rel=1e-9, abs=1e-9)
    for j in range(table.shape[1]):
        if len(set(table[rows, j])) == 1:
            assert (ours.mean[j], ours.scale[j]) == (table[rows[0], j], 1.0)
        else:
            assert ours.scale[j] == pytest.approx(np.sqrt(scaler.var_[j]), rel=1e-6, abs=1e-12)


class Watched:
    """A row-indexable source that knows which rows were read."""

    def __init__(self, rows):
        self.rows, self.read = rows, []

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        self.read.append(i)
        return self.rows[i]


def test_no_other_row_is_read(tmp_path):
    table = np.arange(12.0).reshape(4, 3)
    table[3] = np.nan
    expected = Standardizer.fit(table[:3], rows=[0, 1, 2])
    source = Watched(table)
    assert Standardizer.fit(source, rows=[2, 0, 1]).mean == expected.mean
    assert source.read == [2, 0, 1]
    samples = Watched([(torch.tensor(row), 1) for row in table])
    assert Standardizer.fit(samples, rows=ROWS).scale == expected.scale
    mapped = np.memmap(tmp_path / "t", dtype="float64", mode="w+", shape=(4, 3))
    mapped[:] = table
    for other in (
        table,
        torch.tensor(table),
        torch.tensor(table, requires_grad=True),
        mapped,
        pd.DataFrame(table),
    ):
        assert Standardizer.fit(other, rows=ROWS).mean == expected.mean
    broken = FRAME.astype(object)
    broken.loc[3, "age"] = "not a number"
    assert Standardizer.fit(broken, rows=ROWS, columns=COLUMNS).mean == FITTED.mean


@pytest.mark.parametrize(
    ("values", "mean", "scale"),
    [
        ([1e308, -1e308], 0.0, 1e308),
        ([1.7e308, 1.7e308, 1.6e308], 1.6666666666666667e308, np.std([1.7, 1.7, 1.6]) * 1e308),
        ([1e-200, 3e-200], 2e-200, 1e-200),
        ([5e-324, 0.0], None, None),
        ([1e9 + 1, 1e9 + 3], 1e9 + 2, 1.0),
    ],
)
def test_extreme_values_neither_overflow_nor_vanish(values, mean, scale):
    fitted = Standardizer.fit(np.array(values)[:, None], rows=range(len(values)), dtype="float64")
    assert 0 < fitted.scale[0] < np.inf
    assert np.isfinite(fitted.mean[0])
    if mean is not None:
        assert fitted.mean[0] == pytest.approx(mean, rel=1e-12, abs=1e-300)
        assert fitted.scale[0] == pytest.approx(scale, rel=1e-12)


def test_booleans_nullable_and_small_types_are_numbers():
    frame = pd.DataFrame(
        {
            "b": [True, False, True],
            "n": pd.array([1, 2, 3], dtype="Int64"),
            "h": np.array([1, 2, 3], dtype=np.float16),
            "u": np.array([200, 100, 0], dtype=np.uint8),
            "f": pd.array([0.5, 1.5, None], dtype="Float64"),
        }
    )
    fitted = Standardizer.fit(frame, rows=[0, 1], dtype="float64")
    assert fitted.mean == (0.5, 1.5, 1.5, 150.0, 1.0)
    assert fitted.transform(frame.iloc[:2]).tolist() == [
        [1.0, -1.0, -1.0, 1.0, -1.0],
        [-1.0, 1.0, 1.0, -1.0, 1.0],
    ]
    with pytest.raises(PreprocessingError, match="column 'f' is not finite in training row 0"):
        Standardizer.fit(frame, rows=[2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": []}, "no training rows"),
        ({"rows": [0, 9]}, "row 9 is not a position in the 4 rows"),
        ({"rows": [-1]}, "row -1 is not a position"),
        ({"rows": [0, 0]}, "names a position twice"),
        ({"rows": [True, False, True, True]}, r"integer positions, not bool; a mask .*flatnonzero"),
        ({"rows": [0.0]}, "integer positions, not float64"),
        ({"rows": ["0"]}, "integer positions"),
        ({"rows": [0], "columns": ["age", "nope"]}, r"missing columns \['nope'\]"),
        ({"rows": [0], "columns": ["age", "age"]}, r"named twice: \['age'\]"),
        ({"rows": [0], "columns": "age"}, "list of labels, not the string 'age'"),
        ({"rows": [0], "columns": [("a", "b")]}, "string or an integer"),
        ({"rows": [0], "columns": [True]}, "string or an integer, not True"),
        ({"rows": [0], "columns": ["s"]}, r"column 's' is not numeric"),
        ({"rows": [0], "columns": ["age"], "dtype": "int64"}, "dtype must be one of float16"),
        ({"rows": [0], "columns": ["age"], "dtype": np.float32}, "dtype must be one of"),
    ],
)
def test_a_fit_that_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(PreprocessingError, match=message):
        Standardizer.fit(FRAME, **arguments)


def test_dates_doubled_and_strange_columns_are_refused():
    dates = pd.DataFrame({"d": pd.to_datetime(["2024-01-01", "2024-01-02"])})
    with pytest.raises(PreprocessingError, match=r"column 'd' is not numeric \(datetime"):
        Standardizer.fit(dates, rows=[0, 1])
    doubled = pd.DataFrame([[1, 2], [3, 4]], columns=["a", "a"])
    with pytest.raises(PreprocessingError, match="twice"):
        Standardizer.fit(doubled, rows=[0, 1])
    with pytest.raises(PreprocessingError, match=r"more than one column named \['a'\]"):
        Standardizer.fit(doubled, rows=[0, 1], columns=["a"])
    with pytest.raises(PreprocessingError, match="a source must have a length"):
        Standardizer.fit(iter([[1.0]]), rows=[0])
    with pytest.raises(PreprocessingError, match="not numeric"):
        Standardizer.fit(np.array([[1 + 2j]]), rows=[0])
    with pytest.raises(PreprocessingError, match="one dimension of values, got 0"):
        Standardizer.fit(torch.arange(3.0), rows=[0])
    with pytest.raises(PreprocessingError, match="2 columns are named but rows have 3"):
        Standardizer.fit(torch.ones(2, 3), rows=[0], columns=["a", "b"])
    with pytest.raises(PreprocessingError, match="not finite in training row 1"):
        Standardizer.fit(np.array([[1.0], [np.nan]]), rows=[0, 1])


def test_the_membership_is_a_digest_of_the_positions_or_what_is_named():
    assert (
        FITTED.fit_membership
        == Standardizer.fit(FRAME, rows=np.array([2, 1, 0]), columns=COLUMNS).fit_membership
    )
    assert FITTED.fit_membership.kind == "digest"
    assert (
        FITTED.fit_membership
        != Standardizer.fit(FRAME, rows=[0, 1], columns=COLUMNS).fit_membership
    )
    plan = SplitManifest(strategy="explicit", train=["a"], validation=[], test=[])
    for given_one, expected in [(plan, plan.identity()), ("v1", IdentityRef.declared("v1"))]:
        fitted = Standardizer.fit(FRAME, rows=ROWS, columns=COLUMNS, membership=given_one)
        assert fitted.fit_membership == expected


# -- transforming --------------------------------------------------------------------


def by_hand(rows, fitted=FITTED):
    values = (np.asarray(rows, dtype=np.float64) - np.array(fitted.mean)) / np.array(fitted.scale)
    return torch.from_numpy(values).to(torch.float32)


def test_rows_are_standardized_in_float64_and_returned_as_the_dtype():
    expected = by_hand(FRAME[COLUMNS].to_numpy())
    table = FRAME[COLUMNS].to_numpy()
    for data in (FRAME, table, torch.tensor(table), torch.tensor(table, requires_grad=True)):
        result = FITTED.transform(data)
        assert result.dtype is torch.float32
        assert not result.requires_grad
        assert torch.equal(result, expected)
    assert FITTED.transform(FRAME.iloc[:0]).shape == (0, 3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@settings(max_examples=25, deadline=None)
@given(table=arrays(np.float64, (5, 3), elements=finite))
def test_a_single_row_is_exactly_its_row_of_the_batch(dtype, table):
    fitted = Standardizer(FITTED.mean, FITTED.scale, ("a", "b", "c"), dtype=dtype)
    frame = pd.DataFrame(table, columns=["a", "b", "c"])
    try:
        batch = fitted.transform(frame)
    except PreprocessingError:
        assert dtype == "float16"
        return
    for i in range(5):
        rows = [frame.iloc[i], table[i], torch.tensor(table[i]), table[i].tolist(), tuple(table[i])]
        assert all(torch.equal(fitted(row), batch[i]) for row in rows)


def test_chunks_do_not_show(monkeypatch):
    whole = FITTED.transform(FRAME)
    monkeypatch.setattr("nnx.data.statistics._CHUNK", 6)  # two rows of three columns
    again = Standardizer.fit(FRAME, rows=ROWS, columns=COLUMNS)
    assert again.mean == pytest.approx(FITTED.mean, rel=1e-15)
    assert again.scale == pytest.approx(FITTED.scale, rel=1e-15)
    assert torch.equal(FITTED.transform(FRAME), whole)
    assert torch.equal(FITTED.transform(FRAME[COLUMNS].to_numpy()), whole)
    broken = FRAME.assign(income=[1.0, 2.0, 3.0, np.inf])
    with pytest.raises(PreprocessingError, match="row 3, column 'income': inf"):
        FITTED.transform(broken)


def test_a_series_is_checked_by_name():
    row = FRAME.iloc[1]
    assert torch.equal(FITTED(row), FITTED.transform(FRAME)[1])
    with pytest.raises(PreprocessingError, match=r"missing columns \['age'\]"):
        FITTED(row.drop("age"))
    with pytest.raises(PreprocessingError, match="another order"):
        FITTED(row[["income", "age", "const"]])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (FRAME.drop(columns="income"), r"missing columns \['income'\]"),
        (
            FRAME[["income", "age", "const"]],
            r"another order: fitted \['age', 'income', 'const'\], got \['income'",
        ),
        (FRAME.assign(age=list("abcd")), "column 'age' is not numeric"),
        (
            FRAME.assign(age=[1, 2, None, 4]),
            "row 2, column 'age': nan does not become a finite float32",
        ),
        (FRAME.assign(age=[1, 2, 3, 1e300]), "row 3, column 'age': 1e.300 does not become"),
        (
            pd.DataFrame([[1, 2, 3, 4]], columns=["age", "income", "const", "age"]),
            "more than one column",
        ),
        (np.ones((2, 4)), r"shape \(rows, 3\), got \(2, 4\)"),
        (np.ones(3), r"shape \(rows, 3\), got \(3,\)"),
        (torch.ones(1, 2, 3), r"got \(1, 2, 3\)"),
        (np.array([["1", "2", "3"]]), "not numeric"),
        (np.array([[1, 2, None]], dtype=object), "row 0, column 'const': nan"),
        (np.ma.masked_array([[1.0, 2.0, 3.0]], mask=[[0, 1, 0]]), "row 0, column 'income': nan"),
        ([[1, 2, 3]], "DataFrame, or a 2-D tensor or array, not list"),
    ],
)
def test_data_of_another_schema_never_reach_a_model(data, message):
    with pytest.raises(PreprocessingError, match=message):
        FITTED.transform(data)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1, 2], r"3 values, got shape \(2,\)"),
        (np.ones((1, 3)), r"got shape \(1, 3\); use transform"),
        ([1, "x", 3], "not numeric"),
        ([1, None, 3], "column 'income': nan"),
        (5.0, r"got shape \(\)"),
    ],
)
def test_a_row_of_another_schema_is_refused(row, message):
    with pytest.raises(PreprocessingError, match=message):
        FITTED(row)


def test_without_names_a_frame_is_refused():
    fitted = Standardizer.fit(FRAME[COLUMNS].to_numpy(), rows=ROWS)
    assert fitted.columns is None
    with pytest.raises(PreprocessingError, match="fitted without column names"):
        fitted.transform(FRAME)
    assert torch.equal(fitted.transform(FRAME[COLUMNS].to_numpy()), FITTED.transform(FRAME))


def test_integer_labels_are_names_too():
    frame = pd.DataFrame(np.arange(6.0).reshape(2, 3))
    fitted = Standardizer.fit(frame, rows=[0, 1], columns=[2, 0])
    assert fitted.columns == (2, 0)
    assert torch.equal(fitted.transform(frame[[2, 1, 0]]), torch.tensor([[-1.0, -1.0], [1.0, 1.0]]))


def test_the_source_is_never_changed():
    before = FRAME.copy(deep=True)
    FITTED.transform(FRAME), Standardizer.fit(FRAME, rows=ROWS, columns=COLUMNS)
    pd.testing.assert_frame_equal(FRAME, before)


# -- identity ------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(allow_nan=False, allow_infinity=False), st.floats(min_value=5e-324, max_value=1.7e308)),
        min_size=1, max_size=5,
    ),
    st.sampled_from(["float16", "bfloat16", "float32", "float64"]),
)  # fmt: skip
def test_it_reloads_exactly(pairs, dtype):
    mean, scale = zip(*pairs)
    ours = Standardizer(
        mean, scale, dtype=dtype, fit_rows=3, fit_membership=IdentityRef.declared("v")
    )
    again = Standardizer.from_json(ours.to_json())
    assert again == ours
    assert again.digest() == ours.digest()
    assert [m.hex() for m in again.mean] == [float(m).hex() for m in mean]


def test_it_goes_to_a_file_and_back(tmp_path):
    FITTED.save(tmp_path / "s.json")
    assert Standardizer.load(tmp_path / "s.json") == FITTED
    assert json.loads((tmp_path / "s.json").read_text())["format"] == FORMAT


def test_the_digest_covers_statistics_schema_and_membership():
    base = Standardizer((1.0,), (2.0,))
    others = [
        Standardizer((1.5,), (2.0,)),
        Standardizer((1.0,), (2.5,)),
        Standardizer((1.0,), (2.0,), ("a",)),
        Standardizer((1.0,), (2.0,), (0,)),
        Standardizer((1.0,), (2.0,), ("0",)),
        Standardizer((1.0,), (2.0,), dtype="float64"),
        Standardizer((1.0,), (2.0,), fit_rows=1),
        Standardizer((1.0,), (2.0,), fit_membership=IdentityRef.declared("v")),
    ]
    assert len({s.digest() for s in [base, *others]}) == len(others) + 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mean": [1.0]}, "one mean, scale and label per column"),
        ({"columns": ["a"]}, "one mean, scale and label per column"),
        ({"mean": [], "scale": [], "columns": None}, "one mean, scale and label"),
        ({"mean": [1.0, float("nan"), 2.0]}, r"mean\[1\] must be a finite real number"),
        ({"scale": [1.0, 0.0, 2.0]}, r"scale\[1\] must be a finite real number > 0"),
        ({"scale": [1.0, -1.0, 2.0]}, r"scale\[1\]"),
        ({"scale": [1.0, float("inf"), 2.0]}, r"scale\[1\]"),
        ({"scale": [1.0, "1", 2.0]}, r"scale\[1\]"),
        ({"mean": 3}, "not iterable"),
        ({"columns": ["a", "a", "b"]}, "named twice"),
        ({"columns": [1.5, "a", "b"]}, "string or an integer"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"dtype": None}, "dtype must be one of"),
        ({"fit_rows": -1}, "fit_rows"),
        ({"fit_membership": {"kind": "odd"}}, "IdentityRef.kind"),
        ({"fit_membership": None}, "NoneType"),
        ({"format": "nnx.preprocessing/2"}, "not a nnx.preprocessing/1 document"),
        ({"extra": 1}, r"unknown or missing keys: \['extra'\]"),
    ],
)
def test_a_document_that_makes_no_sense_is_refused(change, message):
    with pytest.raises(PreprocessingError, match=message):
        Standardizer.from_state({**FITTED.state(), **change})


def test_other_documents_are_refused():
    for text in ("[]", "{", '{"mean": [1]}'):
        with pytest.raises(PreprocessingError, match=r"document|JSON"):
            Standardizer.from_json(text)
