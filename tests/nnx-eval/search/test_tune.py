"""``nnx train --tune``: the best of some trials trains once more, and is tested on rows unseen."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from nnx import MonitorSpec, NNRun
from nnx.cli.app import build
from sklearn.datasets import load_iris
from typer.testing import CliRunner

ARGUMENTS = ["train", "iris.csv", "--target", "kind", "--epochs", "3", "--quiet"]


@pytest.fixture(autouse=True)
def iris() -> None:
    data = load_iris()
    with open("iris.csv", "w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["a", "b", "c", "d", "kind"])
        writer.writerows(
            [*row, data.target_names[y]] for row, y in zip(data.data, data.target, strict=True)
        )


def run(*arguments: str, code: int = 0) -> str:
    found = CliRunner().invoke(build(), [*ARGUMENTS, *arguments])
    assert found.exit_code == code, found.output
    return found.output


def test_the_best_trial_trains_once_more_as_an_ordinary_run() -> None:
    told = run("--tune", "4", "--dropout", "0.1")
    assert "tuned, 4 configurations tried" in told
    assert told.count("Run saved to") == 1
    assert "test, best checkpoint" in told
    folders = [path for path in Path("runs").iterdir() if (path / "run.yaml").is_file()]
    runs = {path.name: NNRun.load(path.name) for path in folders if path.name != "best"}
    (final,) = [id for id in runs if Path("runs", id, "table.json").is_file()]
    trials = [one for id, one in runs.items() if id != final]
    assert len(trials) == 4
    assert {one.net.dropout_prob for one in trials} == {0.1}

    def score(one) -> float:
        return min(point.val_edp.loss for point in one.idps if point.val_edp)

    best, chosen = min(trials, key=score), runs[final]
    assert chosen.net == best.net
    assert chosen.train.optim == best.train.optim
    assert chosen.train.monitor == MonitorSpec("loss")
    assert score(chosen) == score(best)  # the same seed, data and order: the same training
    assert {one.train.data_id for one in runs.values()} == {chosen.train.data_id}


def test_a_repeated_search_chooses_the_same() -> None:
    run("--tune", "2")
    told = run("--tune", "2", code=1)
    assert "this configuration was trained on this table already" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tune", "2", "--validation", "0"], "--validation is 0"),
        (
            ["--tune", "2", "--hidden", "8", "--dropout", "0", "--learning-rate", "0.1"],
            "nothing to try",
        ),
        (["--tune", "2", "--config", "x.yaml"], "--tune cannot be given with --config"),
        (["--tune-seconds", "2"], "is a limit of --tune TRIALS"),
    ],
)
def test_what_cannot_be_tuned_is_refused(arguments, message) -> None:
    assert message in " ".join(run(*arguments, code=1).split())
    assert not Path("runs").exists()


def test_trials_end_with_their_time() -> None:
    told = run("--tune", "1", "--tune-seconds", "0.001", code=1)
    assert "none of the 1 tried configurations could be scored: stopped by deadline" in told
