"""Tables on the terminal. Text from outside is never read as markup."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

PLAIN_WIDTH = 160  # columns when the output is no terminal and COLUMNS is not set


def console() -> Any:
    """A console on stdout that leaves numbers uncoloured and pipes unwrapped."""
    import os

    from rich.console import Console

    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, markup=False, width=None if known else PLAIN_WIDTH)


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Iterable[str] = (),
    fold: Iterable[str] = (),
    title: str | None = None,
) -> None:
    """Print rows under a header; ``right`` aligns columns, ``fold`` lets them wrap."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shown = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title=title,
        title_justify="left",
    )  # fmt: skip
    for name in columns:
        wraps = name in fold
        shown.add_column(
            name,
            justify="right" if name in right else "left",
            no_wrap=not wraps,
            overflow="fold" if wraps else "ellipsis",
        )
    for row in rows:
        shown.add_row(*(Text(cell) for cell in row))
    console().print(shown)


def sections(report: dict[str, list[tuple[str, str]]]) -> None:
    """Print titled groups of names and values."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=False, show_header=False)
    shown.add_column(no_wrap=True)
    shown.add_column(overflow="fold")
    for title, rows in report.items():
        shown.add_row(Text(title, style="bold"), "")
        for name, value in rows:
            shown.add_row(Text(f"  {name}"), Text(value))
    console().print(shown)
