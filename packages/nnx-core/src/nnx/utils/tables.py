"""Plain-text tables and trees of nested dictionaries."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TextIO

__all__ = ["Utils", "flatten_dict", "print_table", "print_tree"]


def flatten_dict(data: Mapping[Any, Any], parent_key: str = "", sep: str = ".") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` becomes ``{"a.b": 1}``. An empty mapping stays as a value.

    Raises ``ValueError`` when two paths flatten to one key.
    """
    flat: dict[str, Any] = {}
    for key, value in data.items():
        path = f"{parent_key}{sep}{key}" if parent_key else str(key)
        inner = (
            flatten_dict(value, path, sep)
            if isinstance(value, Mapping) and value
            else {path: value}
        )
        for name, leaf in inner.items():
            if name in flat:
                raise ValueError(
                    f"two entries flatten to {name!r}; choose another sep than {sep!r}"
                )
            flat[name] = leaf
    return flat


def print_table(
    data: Mapping[Any, Any],
    header: bool = True,
    title: str | None = None,
    *,
    file: TextIO | None = None,
) -> None:
    """Print a two-column table of keys and values to ``file`` (default: stdout).

    Nested mappings are flattened with dots; ``header`` prints the column names.
    """
    rows = [(str(key), _cell(value)) for key, value in flatten_dict(data).items()]
    if header:
        rows.insert(0, ("Key", "Value"))
    out = sys.stdout if file is None else file
    keys = max((_width(key) for key, _ in rows), default=0)
    values = max((_width(line) for _, cell in rows for line in cell.split("\n")), default=0)
    rule = f"+{'-' * (keys + 2)}+{'-' * (values + 2)}+"
    if title is not None:
        print(title, file=out)
    print(rule, file=out)
    for index, (key, cell) in enumerate(rows):
        for number, line in enumerate(cell.split("\n")):
            left = key if number == 0 else ""
            print(f"| {_pad(left, keys)} | {_pad(line, values)} |", file=out)
        if header and index == 0:
            print(rule, file=out)
    if len(rows) > header or not header:
        print(rule, file=out)


def print_tree(tree: Any, level: int = 0, *, file: TextIO | None = None) -> None:
    """Print nested mappings and sequences as an indented tree to ``file`` (default: stdout)."""
    out = sys.stdout if file is None else file
    indent = "  " * level
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            if isinstance(value, (Mapping, list, tuple)) and value:
                print(f"{indent}{key}:", file=out)
                print_tree(value, level + 1, file=out)
            else:
                print(f"{indent}{key}: {_cell(value)}", file=out)
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            if isinstance(item, (Mapping, list, tuple)) and item:
                print(f"{indent}-", file=out)
                print_tree(item, level + 1, file=out)
            else:
                print(f"{indent}- {_cell(item)}", file=out)
    else:
        print(f"{indent}{_cell(tree)}", file=out)


def _cell(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _width(text: str) -> int:
    """Terminal columns of ``text``: wide characters take two, combining ones none."""
    from unicodedata import combining, east_asian_width

    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)


def _pad(text: str, width: int) -> str:
    return text + " " * (width - _width(text))


class Utils:
    """The functions of this module under the name that older scripts use."""

    flatten_dict = staticmethod(flatten_dict)
    print_table = staticmethod(print_table)
    print_tree = staticmethod(print_tree)
