"""Runs of ``nnx train`` that an earlier form dealt their rows and named their data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from nnx.cli import stored_run
from nnx.cli.columns import class_labels
from nnx.cli.source import Source, split_rows
from nnx.cli.table import read_table
from nnx.store import NNRun

EARLIER = Path(__file__).parents[2] / "data" / "earlier-runs"
RUNS = {
    "classes": "583d73b5f7fb525864ff89c0e50254dd",
    "numbers": "b08dc84f0982c7170d7c33f8ca094292",
}


def held_out(run_id, split):
    rows = Path(f"runs/{run_id}/predictions/{split}.csv").read_text().splitlines()[1:]
    return [int(row.split(",")[0]) for row in rows]


@pytest.fixture
def here(tmp_path, monkeypatch):
    shutil.copytree(EARLIER, tmp_path / "runs")
    shutil.copy(EARLIER / "table.csv", tmp_path)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("kind", RUNS)
def test_a_resume_holds_out_the_rows_that_the_run_held_out(here, kind, capsys):
    parent = RUNS[kind]
    child = stored_run.resume(parent, epochs=1)
    for split in ("validation", "test"):
        assert held_out(child, split) == held_out(parent, split)
    assert NNRun.load(child).train.data_id == NNRun.load(parent).train.data_id
    stored = [json.loads(Path(f"runs/{id}/table.json").read_text()) for id in (parent, child)]
    assert stored[0]["format"] == stored[1]["format"] == "nnx.table-run/1"
    assert {**stored[0]["source"], "path": ""} == {**stored[1]["source"], "path": ""}


def test_rows_are_dealt_by_the_rule_of_their_form(here):
    table = read_table("table.csv", delimiter=",")
    asked = {"path": "table.csv", "target": "label", "drop": ("value",)}
    today, earlier = Source(**asked), Source(**asked, earlier=True)
    assert list(split_rows(earlier, table).validation) == held_out(RUNS["classes"], "validation")
    assert split_rows(today, table) != split_rows(earlier, table)


def test_what_was_asked_is_stored_without_defaults(here):
    assert Source(path="a.csv", target="y").state() == {"path": "a.csv", "target": "y"}
    asked = Source(path="a.csv", target="y", drop=("z",), batch_size=8)
    assert asked.state() == {"path": "a.csv", "target": "y", "drop": ["z"], "batch_size": 8}
    assert Source.from_state(asked.state()) == asked
    assert len({asked.identity("d"), Source(path="a.csv", target="y").identity("d")}) == 2


def test_classes_that_are_equal_as_numbers_have_one_order(tmp_path):
    path = tmp_path / "codes.csv"
    path.write_text(
        "a,code\n" + "".join(f"{i},{c}\n" for i, c in enumerate(["1", "01", "001"] * 9))
    )
    assert class_labels(read_table(str(path), delimiter=","), "code") == ("001", "01", "1")
