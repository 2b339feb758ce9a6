"""The table of the benchmarks: what a row shows, and how it gets into a page."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "benchmarks"


def load(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def measure(monkeypatch):
    monkeypatch.setitem(sys.modules, "measure", None)
    return load("measure")


@pytest.fixture
def page(measure, monkeypatch):
    monkeypatch.setitem(sys.modules, "page", None)
    return load("page")


def test_two_calls_are_timed_in_turn_and_summed_up_by_median_and_quartiles(measure):
    order, mine, yours = [], iter([2, 9, 1, 3]), iter([4, 9, 4, 4])

    def call(name, values):
        order.append(name)
        return next(values)

    found = measure.interleaved(
        lambda: call("a", mine), lambda: call("b", yours), repeats=3, warmup=1, clock=None
    )
    assert order == ["a", "b", "a", "b", "b", "a", "a", "b"]
    assert (found.ours, found.other) == (3, 4)
    # ratios 9/9, 1/4, 3/4: quartiles 1/2 and 7/8 around 3/4
    assert found.spread == pytest.approx((7 / 8 - 1 / 2) / (3 / 4))


def test_the_spread_does_not_depend_on_the_unit(measure):
    ours, other = [1.0, 1.1, 1.4, 0.9], [2.0, 2.1, 1.9, 2.0]
    spread = measure.beside(ours, other).spread
    assert measure.beside([x / 7 for x in ours], other).spread == pytest.approx(spread)


def test_a_row_shows_its_ratio_spread_and_promise(measure, page):
    row = measure.Row("step", 110.0, 100.0, "us", "by hand", "<= 1.05x", False, 0.0312)
    assert page.cells("peers.step", row) == (
        "peers.step", "step", "110", "100", "us", "1.10", "3%", "by hand", "<= 1.05x: MISSED",
    )  # fmt: skip
    counted = measure.Row("bytes", 12_345.0, unit="kB")
    assert page.cells("store.bytes", counted)[2:7] == ("12,345", "", "kB", "", "")


def test_a_page_keeps_its_text_and_the_lines_of_what_did_not_run_again(measure, page, tmp_path):
    file, row = tmp_path / "page.md", measure.Row
    file.write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n")
    first = [("a.x", row("one", 1.0)), ("b.y", row("two", 2.0)), ("b.y", row("three", 3.0))]
    page.write(file, "machine", ["a.x", "b.y"], first, partial=False)
    text = file.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "machine" in text

    file.write_text(text.replace("measured: ", "measured: 9", 1))
    page.write(file, "machine", ["b.y"], [("b.y", row("four", 4.0))], partial=True)
    assert "measured: 9" in file.read_text()  # the worst of both runs
    lines = [line.split(" | ")[:3] for line in file.read_text().splitlines() if "| `" in line]
    assert lines == [["| `a.x`", "one", "1"], ["| `b.y`", "four", "4"]]


def test_figures_of_two_machines_are_not_mixed(measure, page, tmp_path):
    file = tmp_path / "page.md"
    page.write(file, "this machine", ["a.x"], [("a.x", measure.Row("one", 1.0))], partial=False)
    page.check(file, "that machine", partial=False)
    with pytest.raises(SystemExit, match="another machine"):
        page.check(file, "that machine", partial=True)


def test_the_trainers_of_the_benchmarks_stay_out_of_every_other_environment(monkeypatch):
    def load_toml(path):
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))

    nox = types.SimpleNamespace(
        session=lambda function: function, options=types.SimpleNamespace(), Session=object,
        project=types.SimpleNamespace(load_toml=load_toml),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "nox", nox)
    spec = importlib.util.spec_from_file_location("noxfile", ROOT / "noxfile.py")
    noxfile = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(noxfile)
    assert [item for item in noxfile.dependency_groups()["bench"] if "lightning" in item]
    assert not [item for item in noxfile.third_party() if "lightning" in item]
