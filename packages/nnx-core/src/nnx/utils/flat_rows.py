"""Records as flat rows: which column goes where in the nested state, and how a cell is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Place = tuple[tuple[str, ...], Callable[[Any], Any]]

_RECORDS = ("train_edp", "val_edp", "train_summary")
_FREE = ("extra", "metrics")  # their keys are the user's own, dots included
_TEXT = {"kind", "status", "metric", "split", "mode", "on_missing", "on_nonfinite"}
_WHOLE = {"iter_idx", "epoch_idx", "batch_idx", "count", "update_count"}


def place(column: str) -> Place:
    """The path of a column in the nested state, and what reads its cells."""
    head, _, rest = column.partition(".")
    if not rest:
        return (column,), _whole if column in _WHOLE else float
    if head in _RECORDS:
        field, _, name = rest.partition(".")
        if name and field in _FREE:
            return (head, field, name), float
        return (head, rest), _reader(rest)
    return tuple(column.split(".")), _reader(column.rpartition(".")[2])


def put(state: dict[str, Any], where: Place, cell: Any) -> None:
    """Set one cell of a nested state."""
    path, read = where
    for step in path[:-1]:
        state = state.setdefault(step, {})
    state[path[-1]] = read(cell)


def nested(row: Mapping[str, Any]) -> dict[str, Any]:
    """The nested state of a row, as ``csv.DictReader`` or pandas gives it.

    Empty cells (``None``, ``""``, NaN) and the column without a name are left out.
    """
    state: dict[str, Any] = {"train_edp": {}}
    for column, cell in row.items():
        empty = cell is None or cell == "" or cell != cell
        if not empty and column and not column.startswith("Unnamed"):
            put(state, place(column), cell)
    if "selection" in state:
        state["selection"].setdefault("value", None)
    return state


def _reader(field: str) -> Callable[[Any], Any]:
    if field in _TEXT:
        return str
    if field == "improved":
        return _flag
    return _whole if field in _WHOLE else float


def _whole(cell: Any) -> int:
    try:
        return int(cell)
    except ValueError:
        number = float(cell)
        if number != int(number):
            raise
        return int(number)


def _flag(cell: Any) -> bool:
    if str(cell) not in ("True", "False"):
        raise ValueError(f"{cell!r} is neither True nor False")
    return str(cell) == "True"
