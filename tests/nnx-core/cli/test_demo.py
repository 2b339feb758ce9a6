"""The demo shows what it says, with real processes."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nnx.plugins.siblings import install_line
from sklearn.datasets import load_breast_cancer

Nnx = Callable[..., Any]


@pytest.mark.slow  # four processes that load torch: a training, its resume, another, a listing
def test_the_demo_kills_resumes_and_finds_equal_bits(tmp_path: Path, process: Nnx) -> None:
    shown = process("demo", "--epochs", "40", "--quiet")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    text = " ".join(shown.stdout.split())
    assert "SIGKILL: run" in text
    for what in ("weights (6,274 numbers)", "optimizer state", "history (520 batches"):
        assert what in text
    for what in ("best checkpoint (epoch", "runs/best", "test accuracy (", "stored predictions"):
        assert what in text
    assert "nnx predict of all of breast-cancer.csv" in text
    assert text.count("equal, bit for bit") == 8
    assert "DIFFERENT" not in text
    assert "accuracy" in text
    assert "stopped" in text
    assert "finished" in text
    assert str(tmp_path / "nnx-demo") in text
    with open(tmp_path / "nnx-demo" / "breast-cancer.csv", newline="") as stream:
        rows = list(csv.reader(stream))
    data = load_breast_cancer()
    assert rows[0] == [*data.feature_names, "diagnosis"]
    assert [[float(cell) for cell in row[:-1]] for row in rows[1:]] == data.data.tolist()


def test_the_demo_replaces_only_an_earlier_demo(tmp_path: Path, nnx: Nnx) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    refused = nnx("demo", "--folder", "mine")
    assert refused.returncode == 1
    assert "mine exists and is not an earlier demo" in refused.stderr
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_the_demo_names_the_line_that_brings_its_data(
    tmp_path: Path, nnx: Nnx, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    refused = nnx("demo")
    assert refused.returncode == 1
    assert f"Install it with: {install_line('nnx-core', 'demo')}" in refused.stderr
    assert list(tmp_path.iterdir()) == []
