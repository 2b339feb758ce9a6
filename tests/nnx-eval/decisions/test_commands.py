"""``nnx calibrate`` and ``nnx decide`` on a table, from training to decisions."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from nnx.cli.app import build
from nnx.decisions import TrustChain
from sklearn.datasets import load_breast_cancer
from typer.testing import CliRunner


def nnx(*arguments: str):
    return CliRunner().invoke(build(), list(arguments))


def write(path: str, X, y) -> None:
    with open(path, "w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow([*(f"x{i}" for i in range(X.shape[1])), "kind"])
        writer.writerows([*row, name] for row, name in zip(X.tolist(), y))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("table")
    data = load_breast_cancer()
    names = np.array(["malignant", "benign"])[data.target]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("NNX_TQDM_DISABLE", "1")
        write("seen.csv", data.data[:450], names[:450])
        write("new.csv", data.data[450:], names[450:])
        result = nnx(
            "train", "seen.csv", "--target", "kind", "--epochs", "15", "--hidden", "16",
            "--validation", "0.3",
        )  # fmt: skip
        assert result.exit_code == 0, result.output
    return folder, names[450:]


def test_a_table_is_calibrated_and_decided_about(trained, monkeypatch) -> None:
    folder, truth = trained
    monkeypatch.chdir(folder)
    result = nnx("decide", "best", "new.csv")
    assert result.exit_code == 1
    assert "is not calibrated" in result.output
    result = nnx("calibrate", "best", "--method", "temperature")
    assert result.exit_code == 0, result.output
    assert "on split 'test'" in result.output
    file = next(Path("runs").glob("*/trust.json"))
    chain = TrustChain.load(file)
    assert chain.disjointness == {"train": "verified", "calibrator": "verified"}
    assert chain.calibrator.labels == ("benign", "malignant")
    result = nnx("decide", "best", "new.csv", "--max-risk", "0.02", "-o", "out.csv")
    assert result.exit_code == 0, result.output
    with open("out.csv") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == len(truth)
    decided = [
        (row["decision"], t) for row, t in zip(rows, truth) if row["decision"] != "abstained"
    ]
    assert len(decided) > 60
    assert np.mean([d != t for d, t in decided]) < 0.08
    assert all(
        row["predicted kind"] == row["decision"] for row in rows if row["decision"] != "abstained"
    )


def test_rows_that_were_trained_on_are_refused(trained, monkeypatch) -> None:
    folder, _ = trained
    monkeypatch.chdir(folder)
    assert nnx("calibrate", "best", "--method", "temperature").exit_code == 0
    result = nnx("decide", "best", "seen.csv", "-o", "no.csv")
    assert result.exit_code == 1
    assert "was trained on" in result.output
    assert not Path("no.csv").exists()


def test_the_method_is_chosen_by_rows_left_out(trained, monkeypatch) -> None:
    folder, _ = trained
    monkeypatch.chdir(folder)
    result = nnx("calibrate", "best")
    assert result.exit_code == 0, result.output
    assert "cross-validated NLL" in result.output
