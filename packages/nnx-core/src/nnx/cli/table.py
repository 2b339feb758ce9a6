"""A CSV file as columns of text, with the place of every cell for error messages."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What people write for "no value"; compared in lower case.
MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})


class TableError(ValueError):
    """A table that cannot be used as it is: what, where and the way out."""


@dataclass(frozen=True, slots=True)
class Table:
    """Columns of stripped text, all of one length.

    ``lines[i]`` is the line of the file on which row ``i`` ends; rows count from 1
    after the header in every message.
    """

    path: str
    columns: dict[str, list[str]]
    lines: list[int]

    def __len__(self) -> int:
        return len(self.lines)

    def column(self, name: str) -> list[str]:
        """The cells of one column."""
        if name not in self.columns:
            raise TableError(unknown_column(self, name))
        return self.columns[name]

    def place(self, row: int, column: str) -> str:
        """Where a cell is, as messages say it."""
        return f"{self.path}, row {row + 1} (line {self.lines[row]}), column {column!r}"


def unknown_column(table: Table, name: str) -> str:
    from nnx.utils.validation import close

    return f"{table.path} has no column {name!r}{close(name, table.columns)}"


def read_table(path: str, *, delimiter: str = ",") -> Table:
    """Read a CSV file with a header; quoted cells may span lines.

    Raises ``FileNotFoundError`` for a missing file and :class:`TableError` for a
    file that is no table: no header, a name used twice, a row of another length,
    no row at all, bytes that are not UTF-8.
    """
    if len(delimiter) != 1:
        raise TableError(f"the delimiter must be one character, not {delimiter!r}")
    if not Path(path).exists():
        raise FileNotFoundError(f"{path}: no such file")
    if Path(path).is_dir():
        raise TableError(f"{path} is a folder; give a CSV file")
    try:
        with open(path, encoding="utf-8-sig", newline="") as stream:
            return _collect(path, delimiter, csv.reader(stream, delimiter=delimiter))
    except UnicodeDecodeError as error:
        raise TableError(
            f"{path} is not UTF-8 text (byte {error.start} cannot be decoded); "
            "save the table as CSV with UTF-8 encoding"
        ) from None


def _collect(path: str, delimiter: str, reader: Any) -> Table:
    rows = _rows(path, reader)
    _, header = next(rows, (0, []))
    names = [name.strip() for name in header]
    if not any(names):
        raise TableError(f"{path} is empty; the first line must name the columns")
    for index, name in enumerate(names):
        if not name:
            raise TableError(f"{path}: column {index + 1} has no name in the header")
        if name in names[:index]:
            raise TableError(f"{path}: the header names {name!r} twice; names must be unique")
    if len(names) == 1:
        other = next((d for d in ";\t|" if d in names[0]), None)
        if other is not None:
            raise TableError(
                f"{path} has one column, {names[0]!r}; if {other!r} separates its cells, "
                f"pass --delimiter {other!r}"
            )
    cells: list[list[str]] = [[] for _ in names]
    lines: list[int] = []
    for line, row in rows:
        if len(row) != len(names):
            raise TableError(
                f"{path}, row {len(lines) + 1} (line {line}) has {len(row)} cells, "
                f"but the header names {len(names)} columns"
            )
        for column, cell in zip(cells, row):
            column.append(cell.strip())
        lines.append(line)
    if not lines:
        raise TableError(f"{path} has a header but no row; there is nothing to learn from")
    return Table(path, dict(zip(names, cells)), lines)


def _rows(path: str, reader: Any) -> Iterator[tuple[int, list[str]]]:
    """The non-blank rows with their line; a broken quote is named."""
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise TableError(f"{path}, line {reader.line_num}: {error}") from None
        if row:
            yield reader.line_num, row


def is_missing(cell: str) -> bool:
    """Whether a cell says that there is no value."""
    return cell.lower() in MISSING


def number(cell: str) -> float | None:
    """The finite number a cell holds, or ``None``."""
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) and "_" not in cell else None
