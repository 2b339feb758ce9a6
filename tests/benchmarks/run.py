"""Run the benchmarks and print one table: ``nox -s bench [-- WORD ... --markdown FILE]``.

A benchmark is a function ``bench_*`` in ``tests/benchmarks/bench_*.py`` that
returns or yields ``measure.Row``, and strings to print below the table. Words select
functions by part of their ``module.function`` name; ``--markdown`` also writes the
table, into the file's place for it or the rows of the selected functions alone.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import measure
import page
from measure import Row

FIRST = ("peers", "scaling")  # what most readers look for


def benchmarks(words: list[str]) -> Iterator[tuple[str, Callable[[], Iterable[Row | str]]]]:
    files = sorted(
        Path(__file__).parent.glob("bench_*.py"),
        key=lambda file: (not file.stem.removeprefix("bench_").startswith(FIRST), file.stem),
    )
    for file in files:
        module = importlib.import_module(file.stem)
        for name, function in vars(module).items():
            if name.startswith("bench_") and callable(function):
                label = f"{file.stem.removeprefix('bench_')}.{name.removeprefix('bench_')}"
                if not words or any(word in label for word in words):
                    yield label, function


def show(lines: list[tuple[str, Row]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in page.COLUMNS:
        table.add_column(
            title, justify="right" if title in page.NUMBERS else "left", overflow="fold"
        )
    for label, row in lines:
        table.add_row(*page.cells(label, row))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("words", nargs="*", help="parts of the names of benchmarks; none: all")
    parser.add_argument("--markdown", metavar="FILE", type=Path, help="write the table here too")
    parser.add_argument("--quick", action="store_true", help="two turns each: does it run?")
    options = parser.parse_args(arguments)
    measure.quick = options.quick
    machine = page.machine()
    if options.markdown is not None:
        page.check(options.markdown, machine, partial=bool(options.words))

    found: list[tuple[str, Row]] = []
    notes: list[str] = []
    ran, failed, start = [], [], time.perf_counter()
    print(f"load of the machine: {os.getloadavg()[0]:.1f}", file=sys.stderr)
    for label, function in list(benchmarks(options.words)):
        print(f"running {label}", file=sys.stderr, flush=True)
        began = time.perf_counter()
        try:
            with contextlib.redirect_stdout(sys.stderr):  # standard output is the table's
                results = list(function())
        except Exception:
            traceback.print_exc()
            failed.append(label)
            continue
        print(f"  {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        ran.append(label)
        found.extend((label, row) for row in results if isinstance(row, Row))
        notes.extend(note for note in results if isinstance(note, str) and note not in notes)
    print(machine)
    show(found)
    for note in notes:
        print(note)
    print(f"{len(found)} rows in {time.perf_counter() - start:.0f} s")
    if options.markdown is not None:
        page.write(options.markdown, machine, ran, found, partial=bool(options.words))
    if failed:
        print("failed:", ", ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
