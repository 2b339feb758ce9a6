"""A CSV file as columns of text, with the place of every cell for error messages."""

from __future__ import annotations

import csv
import hashlib
import io
import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nnx.errors import NNxError

# What people write for "no value"; compared in lower case.
MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
TAB = ("\\t", "tab")  # a tab as it can be typed
# Numbers as people write them: 1,238 or 1.238,50 or 1 238 or 2,5, with $ or %.
_AMOUNT = re.compile(r"\d{1,3}([,.'\u2019 \u00a0\u202f]\d{3})+([.,]\d+)?|\d+([.,]\d+)?")
_AROUND = "$\u20ac\u00a3\u00a5\u20b9% \u00a0\u202f"


class TableError(ValueError, NNxError):
    """A table that cannot be used as it is: what, where and the way out."""


@dataclass(frozen=True, slots=True)
class Table:
    """Columns of stripped text, all of one length.

    ``lines[i]`` is the line of the file on which row ``i`` ends; rows count from 1
    after the header in every message. ``digest`` is the SHA-256 of the bytes that
    were read, so that a pipe is identified by what came out of it.
    """

    path: str
    columns: dict[str, list[str]]
    lines: list[int]
    digest: str

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

    there = list(table.columns)
    hint = close(name, there) or (
        f"; it has {', '.join(map(repr, there[:8]))}{', ...' * (len(there) > 8)}"
    )
    return f"{table.path} has no column {name!r}{hint}"


def option(name: str, column: str) -> str:
    """An option that names a column, as a shell takes it."""
    return f"{name} {shlex.quote(column)}"


def delimiter_of(text: str) -> str:
    """The character that an option names: itself, or a tab by ``tab`` or ``\\t``."""
    if text.lower() in TAB:
        return "\t"
    if len(text) != 1 or text in '"\r\n':
        raise TableError(
            f"--delimiter is one character, or tab, and no quote or line end; not {text!r}"
        )
    return text


def read_table(path: str, *, delimiter: str = ",") -> Table:
    """Read a CSV file, or a pipe, with a header; quoted cells may span lines.

    Raises ``FileNotFoundError`` for a missing file and :class:`TableError` for a
    file that is no table: no header, a name used twice, a row of another length,
    a quote that is never closed, no row at all, bytes that are not UTF-8.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"{path}: no such file")
    if Path(path).is_dir():
        raise TableError(f"{path} is a folder; give a CSV file")
    try:
        with open(path, "rb", buffering=0) as raw:
            hashed = _Hashed(raw)
            text = io.TextIOWrapper(io.BufferedReader(hashed), encoding="utf-8-sig", newline="")
            reader = csv.reader(text, delimiter=delimiter, strict=True)
            names, columns, lines = _collect(path, delimiter, reader)
    except UnicodeDecodeError as error:
        raise TableError(
            f"{path} is not UTF-8 text (byte {error.start} cannot be decoded); "
            "save the table as CSV with UTF-8 encoding"
        ) from None
    return Table(path, dict(zip(names, columns)), lines, hashed.digest())


class _Hashed(io.RawIOBase):
    """A file of which all that is read is hashed on its way."""

    def __init__(self, raw: io.FileIO) -> None:
        self._raw = raw
        self._hash = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._raw.readinto(buffer) or 0
        self._hash.update(memoryview(buffer)[:count])
        return count

    def digest(self) -> str:
        """As :func:`nnx.utils.identity.hash_file` writes it."""
        return f"sha256:{self._hash.hexdigest()}"


def _collect(path: str, delimiter: str, reader: Any) -> tuple[list[str], Any, list[int]]:
    """The names, the columns, and the line on which each row ends."""
    rows = _rows(path, reader)
    _, _, header = next(rows, (0, 0, []))
    names = [name.strip() for name in header]
    if not any(names):
        raise TableError(f"{path} is empty; the first line must name the columns")
    for index, name in enumerate(names):
        if not name:
            raise TableError(f"{path}: column {index + 1} has no name in the header")
        if name in names[:index]:
            raise TableError(f"{path}: the header names {name!r} twice; names must be unique")
    if len(names) == 1:
        other = next((d for d in ";\t|," if d in names[0] and d != delimiter), None)
        if other is not None:
            typed = "tab" if other == "\t" else f"'{other}'"
            raise TableError(
                f"{path} has one column, {names[0]!r}; if {other!r} separates its cells, "
                f"pass --delimiter {typed}"
            )
    cells: list[list[str]] = [[] for _ in names]
    lines: list[int] = []
    for first, last, row in rows:
        if len(row) != len(names):
            raise TableError(
                f"{path}, row {len(lines) + 1} (line {last}) has {len(row)} cells, "
                f"but the header names {len(names)} columns"
            )
        if last - first > 1:
            _refuse_swallowed(path, delimiter, row, first, last)
        for column, cell in zip(cells, row):
            column.append(cell.strip())
        lines.append(last)
    if not lines:
        raise TableError(f"{path} has a header but no row; there is nothing to learn from")
    return names, cells, lines


def _rows(path: str, reader: Any) -> Iterator[tuple[int, int, list[str]]]:
    """The non-blank rows with their first and last line; a broken quote is named."""
    while True:
        first = reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise TableError(_broken_row(path, first, reader.line_num, str(error))) from None
        if row:
            yield first, reader.line_num, row


def _broken_row(path: str, first: int, last: int, error: str) -> str:
    if "unexpected end" in error or "field larger" in error:
        problem = "a quote opens a cell of this row and is not closed"
    else:
        problem = f"the quotes of this row are broken ({error})"
    where = f"line {first}" if last <= first else f"lines {first} to {last}"
    return f'{path}, {where}: {problem}; a quote inside a quoted cell is written as ""'


def _refuse_swallowed(path: str, delimiter: str, row: list[str], first: int, last: int) -> None:
    """Refuse a cell whose lines read as rows: its quote was left open by mistake."""
    for cell in row if len(row) > 1 else ():
        inside = cell.splitlines()[1:-1]
        if len(inside) > 1 and all(line.count(delimiter) == len(row) - 1 for line in inside):
            raise TableError(
                f"{path}, lines {first} to {last} are one row, because a quote opens in line "
                f"{first} and closes in line {last}, but the {len(inside)} lines between them look "
                "like rows of their own; close the quote where its cell ends"
            )


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


def looks_like_a_number(cell: str) -> bool:
    """Whether a cell that is no number is one as people write it: ``1,238``, ``$5``, ``2,5``."""
    return _AMOUNT.fullmatch(cell.strip(_AROUND).lstrip("+-").strip(_AROUND)) is not None
