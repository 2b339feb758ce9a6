"""Columns become inputs; what is learned is learned from the training rows and is JSON."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from nnx.cli.columns import fit
from nnx.cli.preparation import Preparation
from nnx.cli.table import Table, TableError, read_table
from sklearn.compose import ColumnTransformer
from sklearn.preprocessing import OneHotEncoder, StandardScaler


def table_of(tmp_path: Path, header: str, *rows: str) -> Table:
    path = tmp_path / "data.csv"
    path.write_text("\n".join([header, *rows]) + "\n")
    return read_table(str(path))


def test_columns_are_prepared_as_scikit_learn_does(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    numbers = rng.normal(3, 5, size=(40, 2))
    colours = rng.choice(["red", "green", "blue"], size=40)
    rows = [
        f"{a!r},{c},{b!r},{'yes' if a > 3 else 'no'}"
        for (a, b), c in zip(numbers.tolist(), colours)
    ]
    table = table_of(tmp_path, "a,colour,b,label", *rows)
    train = list(range(0, 40, 2))
    prepared = fit(table, target="label", rows=train)

    oracle = ColumnTransformer(
        [("n", StandardScaler(), [0, 1]), ("c", OneHotEncoder(sparse_output=False), [2])]
    )
    columns = np.empty((40, 3), dtype=object)
    columns[:, :2], columns[:, 2] = numbers, colours
    oracle.fit(columns[train])
    expected = oracle.transform(columns).astype(np.float32)
    assert prepared.width == 5
    assert [f.name for f in prepared.features] == ["a", "b", "colour"]
    torch.testing.assert_close(prepared.inputs(table), torch.from_numpy(expected))
    assert prepared.target.labels == ("no", "yes")
    assert prepared.target.encode(table).tolist() == [int(a > 3) for a, _ in numbers]


def test_statistics_are_read_from_the_training_rows_alone(tmp_path: Path) -> None:
    table = table_of(tmp_path, "a,y", "1,u", "3,v", "1e6,u", "-1e6,v")
    prepared = fit(table, target="y", rows=[0, 1])
    assert prepared.standardizer is not None
    assert (prepared.standardizer.mean, prepared.standardizer.scale) == ((2.0,), (1.0,))


def test_what_was_fitted_survives_json(tmp_path: Path) -> None:
    table = table_of(tmp_path, "a,c,y", "1.1,x,0.1", "3.7,y,0.7", ",x,0.2")
    prepared = fit(table, target="y", rows=[0, 1], regression=True, impute=True)
    again = Preparation.from_state(json.loads(json.dumps(prepared.state())))
    assert again == prepared
    assert torch.equal(again.inputs(table), prepared.inputs(table))
    assert torch.equal(again.target.encode(table), prepared.target.encode(table))


def test_a_regression_target_is_standardized_and_restored(tmp_path: Path) -> None:
    table = table_of(tmp_path, "a,y", "1,10", "2,20", "3,60")
    prepared = fit(table, target="y", rows=[0, 1], regression=True)
    encoded = prepared.target.encode(table)
    assert encoded.shape == (3, 1)
    assert encoded[:, 0].tolist() == [-1.0, 1.0, 9.0]
    assert prepared.target.restore(encoded[:, 0].numpy()).tolist() == [10.0, 20.0, 60.0]


def test_classes_that_are_numbers_are_in_numeric_order(tmp_path: Path) -> None:
    table = table_of(tmp_path, "a,y", "1,10", "2,9", "3,2")
    assert fit(table, target="y", rows=[0, 1, 2]).target.labels == ("2", "9", "10")


def test_missing_cells_are_filled_from_the_training_rows_when_asked(tmp_path: Path) -> None:
    table = table_of(
        tmp_path, "a,c,y", "1,red,u", "3,red,v", "2,blue,u", "?,NA,v", ",green,u", "100,green,v"
    )
    prepared = fit(table, target="y", rows=[0, 1, 2], impute=True)
    fills = {f.name: f.fill for f in prepared.features}
    assert fills == {"a": 2.0, "c": "red"}
    inputs = prepared.inputs(table)
    assert torch.equal(
        inputs[3], inputs[4] * torch.tensor([1, 0, 0, 0]) + torch.tensor([0.0, 0, 0, 1])
    )
    assert inputs[3, 0] == 0.0  # the mean of 1, 3 and 2 is their median
    assert prepared.filled(table) == "2 in 'a' with 2.0, 1 in 'c' with 'red'"


def test_a_cell_that_holds_something_is_never_filled(tmp_path: Path) -> None:
    prepared = fit(
        table_of(tmp_path, "a,c,y", "1,red,u", "3,red,v", ",blue,u"), target="y", rows=[0, 1],
        impute=True,
    )  # fmt: skip
    for cell in ("1,238", "$5", "oops", "1_000", "inf"):
        with pytest.raises(TableError, match=r"row 1 \(line 2\), column 'a': .* is not a number"):
            prepared.inputs(table_of(tmp_path, "a,c,y", f'"{cell}",red,u'))


@pytest.mark.parametrize(
    ("header", "rows", "options", "message"),
    [
        (
            "age,y", ["1,a", ",b", "3,a", "NA,b"], {},
            r"row 2 \(line 3\), column 'age': the value is missing \(and 1 more in this column\)\. "
            "Fill it in, train with --impute, or leave the column out with --drop age",
        ),
        (
            "age,y", ["1,a", "2,b", "old,a"], {},
            r"row 3 \(line 4\), column 'age': 'old' is not a number\. Mend the cell, read the "
            "column as categories with --categorical age, or leave it out with --drop age",
        ),
        (
            "net price,y", ["1.5,a", "2.5,b", "$3,a"], {"impute": True},
            r"'\$3' is not a number as a program writes it \(digits and a point\)\. Mend the "
            "cell, read the column as categories with --categorical 'net price', or leave it out "
            "with --drop 'net price'",
        ),
        (
            "p,y", ['"1,238",a', '"2,500",b', "7,a", ",b"], {"impute": True},
            r"row 1 \(line 2\), column 'p': '1,238' is not a number as a program writes it "
            r"\(digits and a point\), and most of the column is written like it\. Mend the column",
        ),
        (
            "p,y", [f'"{n},5",{"ab"[n % 2]}' for n in range(6)], {},
            r"column 'p': '0,5' is not a number as a program writes it",
        ),
        (
            "a,y", [f'{n},"{n},5"' for n in range(30)], {},
            "'0,5' is not a number .* the target has 30 distinct values like it; mend them, and "
            "to predict a number pass --regression",
        ),
        (
            "a,y", ['1,"0,5"', '2,"1,5"'], {"regression": True},
            r"'0,5' is not a number as a program writes it \(digits and a point\), which --regr",
        ),
        (
            "c,y", ["red,a", ",b"], {},
            r"row 2 \(line 3\), column 'c': the value is missing\. Fill it in",
        ),
        (
            "a,y", ["1,u", "2,u"], {},
            "the target 'y' has one class, 'u', in all rows; a classifier needs at least two",
        ),
        (
            "a,y", ["1,u", "2,"], {},
            r"row 2 \(line 3\), column 'y': the target is missing\. A target is never imputed",
        ),
        ("a,y", ["1,u", "2,v"], {"target": "z"}, "has no column 'z'"),
        ("a,y", ["1,u", "2,v"], {"drop": ["b"]}, "has no column 'b'"),
        ("a,y", ["1,u", "2,v"], {"drop": ["a"]}, "has no column beside the target 'y'"),
        (
            "a,y", ["1,u", "2,7"], {"regression": True},
            r"row 1 \(line 2\), column 'y': 'u' is not a number, which --regression needs",
        ),
        ("a,y", ["1,5", "2,5"], {"regression": True}, "the target 'y' is 5 in all rows"),
        (
            "a,y", [f"1,{n / 7}" for n in range(30)], {},
            "has 30 distinct numbers in 30 rows; to predict a number pass --regression",
        ),
        (
            "a,y", [f"1,name{n}" for n in range(150)], {},
            "150 distinct values in 150 rows, so it names rows rather than classes",
        ),
        (
            "id,y", [f"name{n},{'uv'[n % 2]}" for n in range(150)], {},
            "the column 'id' has 150 distinct values in 150 rows. Leave it out with --drop id",
        ),
        (
            "a,y", ["1,u", "2,v"], {"numeric": ["a"], "rows": [], "impute": True},
            "has no number in the training rows",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_learned_from_is_refused(
    tmp_path: Path, header: str, rows: list[str], options: dict, message: str
) -> None:
    table = table_of(tmp_path, header, *rows)
    with pytest.raises(TableError, match=message):
        fit(table, **{"target": "y", "rows": range(len(rows)), **options})


def test_a_column_can_be_read_as_asked(tmp_path: Path) -> None:
    table = table_of(tmp_path, "zip,y", "10115,u", "20095,v", "10115,v")
    rows = range(3)
    assert fit(table, target="y", rows=rows).features[0].categories is None
    asked = fit(table, target="y", rows=rows, categorical=["zip"])
    assert asked.features[0].categories == ("10115", "20095")


def test_prediction_refuses_what_training_did_not_see(tmp_path: Path) -> None:
    table = table_of(tmp_path, "a,c,y", "1,red,u", "2,blue,v")
    prepared = fit(table, target="y", rows=[0, 1])
    with pytest.raises(
        TableError, match=r"'green' is not a category seen in training\. Known: 'blue', 'red'"
    ):
        prepared.inputs(table_of(tmp_path, "a,c", "1,red", "1,green"))
    with pytest.raises(TableError, match="has no column 'c'; it has 'a', 'b', which the run was"):
        prepared.inputs(table_of(tmp_path, "a,b", "1,red"))
    with pytest.raises(TableError, match="'w' is not a class seen in training"):
        prepared.target.encode(table_of(tmp_path, "a,c,y", "1,red,w"))


def test_extra_and_reordered_columns_do_not_matter_at_prediction(tmp_path: Path) -> None:
    table = table_of(tmp_path, "a,c,y", "1,red,u", "2,blue,v")
    prepared = fit(table, target="y", rows=[0, 1])
    other = table_of(tmp_path, "c,new,a", "red,9,1", "blue,9,2")
    assert torch.equal(prepared.inputs(other), prepared.inputs(table))


def test_a_preparation_of_another_format_is_refused() -> None:
    with pytest.raises(ValueError, match=r"has format 'other/9', not 'nnx\.table/1'"):
        Preparation.from_state({"format": "other/9"})
