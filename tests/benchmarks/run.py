"""Run the benchmarks and print one table: ``nox -s bench [-- WORD ...]``.

A benchmark is a function ``bench_*`` in ``tests/benchmarks/bench_*.py`` that
returns or yields ``measure.Row``. Words select functions by part of their
``module.function`` name.
"""

from __future__ import annotations

import importlib
import platform
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from measure import Row


def benchmarks(words: list[str]) -> Iterator[tuple[str, Callable[[], Iterable[Row]]]]:
    for file in sorted(Path(__file__).parent.glob("bench_*.py")):
        module = importlib.import_module(file.stem)
        for name, function in vars(module).items():
            if name.startswith("bench_") and callable(function):
                label = f"{file.stem.removeprefix('bench_')}.{name.removeprefix('bench_')}"
                if not words or any(word in label for word in words):
                    yield label, function


def figure(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}"


def main(words: list[str]) -> int:
    import torch
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("benchmark", overflow="fold")
    for title in ("ours", "other", "unit", "ratio"):
        table.add_column(title, justify="right")
    for title in ("against", "target", ""):
        table.add_column(title, overflow="fold")
    failed = 0
    for label, function in benchmarks(words):
        print(f"running {label}", file=sys.stderr, flush=True)
        try:
            rows = list(function())
        except Exception:
            traceback.print_exc()
            failed += 1
            continue
        for row in rows:
            verdict = {None: "", True: "met", False: "MISSED"}[row.met]
            table.add_row(
                row.name, figure(row.ours), figure(row.other), row.unit, figure(row.ratio),
                row.against, row.target, verdict,
            )  # fmt: skip
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(f"Python {platform.python_version()}, torch {torch.__version__}", highlight=False)
    console.print(table)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
