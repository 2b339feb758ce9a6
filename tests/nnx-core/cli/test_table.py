"""Reading a CSV file: every refusal says what, where and the way out."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nnx.cli.table import (
    TableError,
    delimiter_of,
    is_missing,
    looks_like_a_number,
    number,
    read_table,
)
from nnx.utils.identity import hash_file


def write(tmp_path: Path, text: str, *, encoding: str = "utf-8") -> str:
    path = tmp_path / "data.csv"
    path.write_bytes(text.encode(encoding))
    return str(path)


def test_a_table_is_columns_of_stripped_text_with_the_lines_of_its_rows(tmp_path: Path) -> None:
    table = read_table(write(tmp_path, 'a, b\r\n1 ,"x\ny"\r\n\r\n2,z\r\n'))
    assert table.columns == {"a": ["1", "2"], "b": ["x\ny", "z"]}
    assert table.lines == [3, 5]
    assert len(table) == 2
    assert table.place(1, "b") == f"{table.path}, row 2 (line 5), column 'b'"


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path: Path) -> None:
    assert list(read_table(write(tmp_path, "a\n1\n", encoding="utf-8-sig")).columns) == ["a"]


def test_another_delimiter_can_be_asked_for(tmp_path: Path) -> None:
    table = read_table(write(tmp_path, "a;b\n1,5;2\n"), delimiter=";")
    assert table.columns == {"a": ["1,5"], "b": ["2"]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; the first line must name the columns"),
        ("\n\n", "is empty; the first line must name the columns"),
        ("a,b\n", "has a header but no row"),
        ("a,,c\n1,2,3\n", "column 2 has no name in the header"),
        ("a,b,a\n1,2,3\n", "the header names 'a' twice"),
        ("a,b\n1,2\n3\n", r"row 2 \(line 3\) has 1 cells, but the header names 2 columns"),
        ("a,b\n1,2,3\n", r"row 1 \(line 2\) has 3 cells, but the header names 2 columns"),
        ("a;b\n1;2\n", "has one column, 'a;b'; if ';' separates its cells, pass --delimiter ';'"),
        ("a\tb\n1\t2\n", r"if '\\t' separates its cells, pass --delimiter tab"),
        (
            'a,b\n1,x\n2,"y\n3,z\n4,w\n',
            r"lines 3 to 5: a quote opens a cell of this row and is not closed; a quote inside a "
            'quoted cell is written as ""',
        ),
        (
            'a,b\n1,"x" y\n',
            r"line 2: the quotes of this row are broken \(',' expected after '\"'\)",
        ),
        (
            'a,b\n1,"x\n2,y\n3,z\n4,w"\n',
            "lines 2 to 5 are one row, because a quote opens in line 2 and closes in line 5, but "
            "the 2 lines between them look like rows of their own",
        ),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TableError, match=message):
        read_table(write(tmp_path, text))


def test_an_open_quote_in_a_long_table_is_named_by_the_line_that_opens_it(tmp_path: Path) -> None:
    rows = [f"{n},{'x' * 100}" for n in range(3000)]
    rows[30] = '30,"open'
    with pytest.raises(TableError, match=r"lines 32 to \d+: a quote opens a cell of this row"):
        read_table(write(tmp_path, "a,b\n" + "\n".join(rows) + "\n"))


@pytest.mark.parametrize(
    ("typed", "character"), [("\\t", "\t"), ("tab", "\t"), ("\t", "\t"), (";", ";"), ("'", "'")]
)
def test_a_delimiter_can_be_typed(typed: str, character: str) -> None:
    assert delimiter_of(typed) == character


@pytest.mark.parametrize("typed", ["", ";;", '"', "\n"])
def test_what_cannot_be_a_delimiter_is_refused(typed: str) -> None:
    with pytest.raises(TableError, match="--delimiter is one character, or tab"):
        delimiter_of(typed)


def test_the_digest_is_of_the_bytes_that_were_read(tmp_path: Path) -> None:
    path = write(tmp_path, "a,b\n" + "1,2\n" * 100_000)
    assert read_table(path).digest == hash_file(path).value


def test_text_in_another_encoding_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "name\ncafé\n", encoding="latin-1")
    with pytest.raises(TableError, match=r"is not UTF-8 text .* save the table as CSV with UTF-8"):
        read_table(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent\.csv: no such file"):
        read_table(str(tmp_path / "absent.csv"))
    with pytest.raises(TableError, match="is a folder; give a CSV file"):
        read_table(str(tmp_path))


def test_an_unknown_column_names_close_ones(tmp_path: Path) -> None:
    table = read_table(write(tmp_path, "income,age\n1,2\n"))
    with pytest.raises(TableError, match="has no column 'incme'; did you mean 'income'"):
        table.column("incme")
    with pytest.raises(TableError, match="has no column 'Y'; it has 'income', 'age'$"):
        table.column("Y")


@pytest.mark.parametrize("cell", ["", "NA", "n/a", "NaN", "null", "None", "?"])
def test_what_counts_as_missing(cell: str) -> None:
    assert is_missing(cell)


@pytest.mark.parametrize(
    ("cell", "value"),
    [("1", 1.0), ("-2.5e3", -2500.0), ("1_000", None), ("inf", None), ("abc", None), ("", None)],
)
def test_what_counts_as_a_number(cell: str, value: float | None) -> None:
    assert number(cell) == value


cells = st.text(st.characters(blacklist_categories=["Cs", "Cc", "Zs", "Zl", "Zp"]), max_size=8)


@pytest.mark.parametrize(
    "cell",
    [
        "1,238",
        "1.238,50",
        "1 238",
        "2,5",
        "-2,5",
        "$5",
        "5 €",
        "€-1,5",
        "12%",
        "1'000",
        "12",
        "1.5",
    ],
)
def test_what_looks_like_a_number(cell: str) -> None:
    assert looks_like_a_number(cell)


@pytest.mark.parametrize(
    "cell", ["", "a", "12a", "1,2,3", "2020-01-02", "1.2.3", "12:30", "$", "-"]
)
def test_what_does_not_look_like_a_number(cell: str) -> None:
    assert not looks_like_a_number(cell)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(cells, cells), min_size=1, max_size=6))
def test_what_the_csv_module_writes_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]]
) -> None:
    path = tmp_path_factory.mktemp("csv") / "data.csv"
    with open(path, "w", encoding="utf-8", newline="") as stream:
        csv.writer(stream).writerows([("first", "second"), *rows])
    table = read_table(str(path))
    assert list(zip(table.columns["first"], table.columns["second"])) == [
        (a.strip(), b.strip()) for a, b in rows
    ]
