"""The table as cells, and as Markdown in a page that keeps a place for it."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

from measure import Row

COLUMNS = ("benchmark", "what", "NNx", "beside it", "unit", "ratio", "spread", "against", "wanted")
NUMBERS = ("NNx", "beside it", "ratio", "spread")
BEGIN, END = "<!-- the table of nox -s bench -->", "<!-- end of the table -->"


def figure(value: float | None) -> str:
    if value is None or math.isnan(value):
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def cells(label: str, row: Row) -> tuple[str, ...]:
    verdict = {None: "", True: ": met", False: ": MISSED"}[row.met]
    ratio = "" if row.ratio is None else f"{row.ratio:.2g}" if row.ratio < 1 else f"{row.ratio:.2f}"
    percent = row.spread is not None and not math.isnan(row.spread)
    return (
        label, row.name.strip(), figure(row.ours), figure(row.other), row.unit, ratio,
        f"{row.spread:.0%}" if percent else "", row.against, row.target + verdict,
    )  # fmt: skip


def machine() -> str:
    """The processor, the system and the versions of what is compared."""
    versions = []
    for name in ("torch", "lightning", "transformers", "accelerate", "scikit-learn", "peft"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{processor()}, {os.cpu_count()} cores, {memory:.0f} GiB of memory, {platform.system()}; "
        f"Python {platform.python_version()}, {', '.join(versions)}"
    )


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def check(file: Path, machine: str, *, partial: bool) -> None:
    """Refuse to mix figures of two machines in one table."""
    if partial and (old := _table(file)) and machine not in old:
        raise SystemExit(f"{file} shows another machine or other versions; run every benchmark")


def write(
    file: Path, machine: str, ran: Sequence[str], found: Sequence[tuple[str, Row]], *, partial: bool
) -> None:
    """Put the table between the page's two marks.

    After a partial run, the lines of the benchmarks that did not run stay.
    """
    old = _table(file)
    kept = [line for line in (old or "").splitlines() if partial and line.startswith("| `")]
    order = list(dict.fromkeys([*map(_label, kept), *ran]))
    lines = [line for line in kept if _label(line) not in ran]
    for label, row in found:
        lines.append("| " + " | ".join((f"`{label}`", *cells(label, row)[1:])) + " |")
    lines.sort(key=lambda line: order.index(_label(line)))
    rule = ["--:" if name in NUMBERS else "---" for name in COLUMNS]
    head = ["| " + " | ".join(COLUMNS) + " |", "|" + "|".join(rule) + "|"]
    text = "\n".join(
        [BEGIN, "", machine, _load(old if partial else None), "", *head, *lines, "", END]
    )
    page = file.read_text(encoding="utf-8").replace(old, text) if old else text + "\n"
    file.write_text(page, encoding="utf-8")


def _load(old: str | None) -> str:
    """How busy the machine was in the last quarter of an hour, at worst of all partial runs."""
    earlier = re.search(r"Load average while it was measured: ([\d.]+)", old or "")
    load = max(os.getloadavg()[2], float(earlier[1]) if earlier else 0.0)
    return (
        f"Load average while it was measured: {load:.1f}, of which the benchmarks themselves "
        "make 1 to 2."
    )


def _label(line: str) -> str:
    return line.split("`")[1]


def _table(file: Path) -> str | None:
    """What is between the two marks, with them; ``None`` where there is no place for it."""
    if not file.exists():
        return None
    _, begin, rest = file.read_text(encoding="utf-8").partition(BEGIN)
    inside, end, _ = rest.partition(END)
    return begin + inside + end if end else None
