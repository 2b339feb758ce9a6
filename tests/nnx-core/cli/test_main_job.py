"""Train on a table, predict, resume; and what is refused before a run exists."""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from nnx.cli.preparation import Preparation
from nnx.cli.table import read_table
from nnx.cli.table_run import load_model
from nnx.enums import Devices
from nnx.nn_model import NNModel
from nnx.store.predictions import load_predictions
from nnx.store.run import NNRun
from nnx.utils import files
from nnx.utils.disk import Disk
from nnx.utils.identity import hash_bytes
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import accuracy_score, mean_squared_error
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

Nnx = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real tables: a classification and a regression."""
    folder = tmp_path_factory.mktemp("tables")
    cancer, diabetes = load_breast_cancer(), load_diabetes(scaled=False)
    write(
        folder / "cancer.csv",
        [*cancer.feature_names, "diagnosis"],
        ([*row, cancer.target_names[y]] for row, y in zip(cancer.data.tolist(), cancer.target)),
    )
    write(
        folder / "diabetes.csv",
        [*diabetes.feature_names, "progression"],
        ([*row, y] for row, y in zip(diabetes.data.tolist(), diabetes.target.tolist())),
    )
    return folder


def write(path: Path, header: list[str], rows: object) -> None:
    with open(path, "w", newline="") as stream:
        csv.writer(stream).writerow(header)
        csv.writer(stream).writerows(rows)  # type: ignore[arg-type]


def records(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.fixture
def here(tmp_path: Path, tables: Path) -> Path:
    for table in tables.iterdir():
        shutil.copy(table, tmp_path)
    return tmp_path


def run_ids(here: Path, folder: str = "runs") -> list[str]:
    return sorted(
        p.parent.name for p in (here / folder).glob("*/run.yaml") if not p.parent.is_symlink()
    )


def only_run(here: Path) -> str:
    (found,) = run_ids(here)
    return found


def test_a_classifier_is_trained_tested_and_used(here: Path, nnx: Nnx) -> None:
    trained = nnx("train", "cancer.csv", "--target", "diagnosis", "--epochs", "20")
    assert trained.returncode == 0, trained.stderr
    run = only_run(here)
    shown = {
        line.split("  ")[1].strip(): line.split()[-1]
        for line in trained.stdout.splitlines()
        if line.startswith("  ")
    }
    assert shown["run"] == run
    assert float(shown["accuracy"]) > 0.9

    kept = {p.split: p for p in load_predictions(run, str(here / "runs"))}
    assert sorted(kept) == ["test", "validation"]
    hits = [a == b for a, b in zip(kept["test"].targets, kept["test"].predicted)]
    assert float(shown["accuracy"]) == pytest.approx(np.mean(hits), abs=5e-5)
    table = [row["diagnosis"] for row in records(here / "cancer.csv")]
    assert [table[int(i)] for i in kept["test"].sample_ids] == list(kept["test"].targets)

    predicted = nnx("predict", run[:6], "cancer.csv")
    assert predicted.returncode == 0, predicted.stderr
    rows = list(csv.DictReader(io.StringIO(predicted.stdout)))
    truth = [row["diagnosis"] for row in records(here / "cancer.csv")]
    assert list(rows[0]) == ["predicted diagnosis", "probability benign", "probability malignant"]
    found = [row["predicted diagnosis"] for row in rows]
    # A network on standardized columns is as good as the linear model of scikit-learn.
    data = load_breast_cancer()
    linear = make_pipeline(StandardScaler(), LogisticRegression()).fit(data.data, data.target)
    assert accuracy_score(truth, found) > linear.score(data.data, data.target) - 0.03
    for row in rows:
        chances = [float(row["probability benign"]), float(row["probability malignant"])]
        assert sum(chances) == pytest.approx(1, abs=2e-6)
        assert row["predicted diagnosis"] == ["benign", "malignant"][int(np.argmax(chances))]


def test_predictions_are_those_of_the_checkpoint_on_inputs_prepared_once(
    here: Path, nnx: Nnx
) -> None:
    nnx("train", "cancer.csv", "--target", "diagnosis", "--epochs", "2", "--hidden", "8")
    run = only_run(here)
    assert (
        nnx("predict", run, "cancer.csv", "--checkpoint", "last", "-o", "out.csv").returncode == 0
    )
    found = np.array([list(row.values())[1:] for row in records(here / "out.csv")], dtype=float)

    stored = json.loads((here / "runs" / run / "table.json").read_text())["preparation"]
    mean, scale = stored["standardizer"]["mean"], stored["standardizer"]["scale"]
    inputs = (load_breast_cancer().data - mean) / scale
    state = torch.load(here / "runs" / run / "checkpoints" / "last.pt", weights_only=True)
    weights = state.get("net_state", state)
    x = torch.from_numpy(inputs).float()
    hidden = torch.nn.functional.leaky_relu(
        x @ weights["layers.0.weight"].T + weights["layers.0.bias"]
    )
    logits = hidden @ weights["layers.1.weight"].T + weights["layers.1.bias"]
    np.testing.assert_allclose(found, logits.softmax(1).numpy(), atol=2e-6)


def test_a_number_is_predicted_in_the_units_of_the_table(here: Path, nnx: Nnx) -> None:
    trained = nnx(
        "train", "diabetes.csv", "--target", "progression", "--regression", "--epochs", "30"
    )
    assert trained.returncode == 0, trained.stderr
    assert "root mean squared error" in trained.stdout
    kept = {p.split: p for p in load_predictions(only_run(here), str(here / "runs"))}["test"]
    table = [float(row["progression"]) for row in records(here / "diabetes.csv")]
    np.testing.assert_allclose(
        [table[int(i)] for i in kept.sample_ids], np.array(kept.targets, float), rtol=1e-5
    )
    rows = list(csv.DictReader(io.StringIO(nnx("predict", only_run(here), "diabetes.csv").stdout)))
    found = [float(row["predicted progression"]) for row in rows]
    data = load_diabetes(scaled=False)
    linear = make_pipeline(StandardScaler(), Ridge()).fit(data.data, data.target)
    reference = mean_squared_error(data.target, linear.predict(data.data))
    assert mean_squared_error(data.target, found) < 1.15 * reference


def test_categories_missing_cells_and_a_split_column(here: Path, nnx: Nnx) -> None:
    rng = np.random.default_rng(0)
    rows = []
    for n in range(120):
        colour = ["red", "green", "blue"][n % 3]
        size = "" if n == 7 else f"{rng.normal():.3f}"
        part = ["train", "train", "val", "test"][n // 30]
        rows.append([colour, size, part, "warm" if colour == "red" else "cold"])
    write(here / "colours.csv", ["colour", "size", "part", "feel"], rows)
    arguments = ["train", "colours.csv", "--target", "feel", "--split-column", "part"]
    refused = nnx(*arguments)
    assert refused.returncode == 1
    assert refused.stderr.startswith(
        "nnx: colours.csv, row 8 (line 9), column 'size': the value is missing."
    )
    assert not (here / "runs").exists()
    trained = nnx(*arguments, "--impute", "--epochs", "40", "--learning-rate", "0.01")
    assert trained.returncode == 0, trained.stderr
    assert "60 train, 30 validation, 30 test" in trained.stdout
    assert "4 from 2 columns" in trained.stdout
    assert [line.split()[-1] for line in trained.stdout.splitlines() if "accuracy" in line] == [
        "1.0000"
    ]


def test_the_same_command_is_the_same_run_and_another_table_another(here: Path, nnx: Nnx) -> None:
    arguments = ["train", "cancer.csv", "--target", "diagnosis", "--epochs", "1", "--quiet"]
    assert nnx(*arguments).returncode == 0
    first = only_run(here)
    again = nnx(*arguments)
    assert again.returncode == 1
    assert f"as run {first}. `nnx show {first[:8]}` shows it" in again.stderr
    assert "Traceback" not in again.stderr
    weights = (here / "runs" / first / "checkpoints" / "last.pt").read_bytes()
    assert nnx(*arguments, "--overwrite").returncode == 0
    assert only_run(here) == first
    assert len(weights) == (here / "runs" / first / "checkpoints" / "last.pt").stat().st_size
    lines = (here / "cancer.csv").read_text().splitlines()
    (here / "cancer.csv").write_text("\n".join(lines[:-1]) + "\n")
    assert nnx(*arguments).returncode == 0
    assert len(run_ids(here)) == 2


def test_runs_on_one_table_compare_whatever_columns_and_batches_they_train_on(
    here: Path, nnx: Nnx
) -> None:
    def train(*more: str) -> None:
        done = nnx("train", "cancer.csv", "--target", "diagnosis", "--epochs", "1", "-q", *more)
        assert done.returncode == 0, done.stderr

    train()
    train("--batch-size", "64")
    train("--drop", "mean radius", "--categorical", "mean texture")
    assert len(run_ids(here)) == 3
    assert nnx("best").stderr.startswith("compared 3 runs by val.error of categorical/2 on cancer")
    train("--split-seed", "1")  # other rows are held out
    told = nnx("best").stderr.splitlines()
    assert [line.partition(" by ")[0] for line in told] == [
        "compared 3 runs", "not compared: 1 run"
    ]  # fmt: skip


def test_a_stored_configuration_is_trained_on_given_data(here: Path, nnx: Nnx) -> None:
    nnx(
        "train",
        "cancer.csv",
        "--target",
        "diagnosis",
        "--epochs",
        "2",
        "--hidden",
        "5,4",
        "--dropout",
        "0.1",
    )
    first = only_run(here)
    config = f"runs/{first}/run.yaml"
    assert (
        nnx(
            "train", "cancer.csv", "--target", "diagnosis", "--config", config, "--runs", "other"
        ).returncode
        == 0
    )
    assert run_ids(here, "other") == [first]  # the same configuration on the same data
    assert (
        nnx(
            "train",
            "cancer.csv",
            "--target",
            "diagnosis",
            "--config",
            config,
            "--seed",
            "3",
            "--runs",
            "other",
        ).returncode
        == 0
    )
    assert len(run_ids(here, "other")) == 2
    refused = nnx(
        "train", "diabetes.csv", "--target", "progression", "--regression", "--config", config
    )
    assert refused.returncode == 1
    assert "has 30 inputs, but diabetes.csv needs 10" in refused.stderr
    refused = nnx(
        "train", "cancer.csv", "--target", "diagnosis", "--config", config, "--hidden", "3"
    )
    assert "--hidden cannot be given with --config" in refused.stderr


def test_a_configuration_takes_the_classes_of_the_table_that_it_trains(
    here: Path, nnx: Nnx
) -> None:
    trained = nnx(
        "train", "cancer.csv", "--target", "diagnosis", "--epochs", "2", "--patience", "5"
    )
    assert trained.returncode == 0, trained.stderr
    config = f"runs/{only_run(here)}/run.yaml"
    rows = records(here / "cancer.csv")
    names = {"benign": "aye", "malignant": "nay"}
    write(
        here / "other.csv",
        [*list(rows[0])[:-1], "vote"],
        ([*list(row.values())[:-1], names[row["diagnosis"]]] for row in rows),
    )
    done = nnx("train", "other.csv", "--target", "vote", "--config", config, "--runs", "other")
    assert done.returncode == 0, done.stderr
    (run,) = run_ids(here, "other")
    stored = NNRun.load(run, str(here / "other"))
    assert stored.model.task.labels == ("aye", "nay")
    assert stored.salt is None  # nothing may stop this one early
    predicted = nnx("predict", run, "other.csv", "--runs", "other").stdout.splitlines()
    assert predicted[0] == "predicted vote,probability aye,probability nay"
    refused = nnx(
        "train", "cancer.csv", "--target", "mean radius", "--regression", "--drop", "diagnosis",
        "--config", config,
    )  # fmt: skip
    assert refused.returncode == 1


def test_a_configuration_of_another_kind_of_target_is_refused(here: Path, nnx: Nnx) -> None:
    write(here / "numbers.csv", ["a", "y"], ([n, n * 1.5] for n in range(20)))
    write(here / "lonely.csv", ["a", "y"], ([n, n % 2] for n in range(20)))
    nnx("train", "numbers.csv", "--target", "y", "--regression", "--epochs", "1")
    config = f"runs/{only_run(here)}/run.yaml"
    text = (here / config).read_text().replace("output_dim: 1", "output_dim: 2")
    (here / "two.yaml").write_text(text)
    refused = nnx("train", "lonely.csv", "--target", "y", "--config", "two.yaml")
    assert refused.returncode == 1
    assert refused.stderr == (
        "nnx: the model of two.yaml predicts regression targets, but the target 'y' of lonely.csv "
        "is categorical; pass --regression to predict a number\n"
    )
    wide = ["a", "b", "y"]
    write(here / "wide.csv", wide, ([n, n + 1, n * 1.5] for n in range(20)))
    refused = nnx("train", "wide.csv", "--target", "y", "--regression", "--config", config)
    assert refused.returncode == 1
    assert refused.stderr == (
        f"nnx: the network of {config} has 1 inputs, but wide.csv needs 2; train without --config, "
        "or on a table of the same columns\n"
    )
    text = (here / config).read_text()
    for name, content, message in (
        ("empty.yaml", "", "empty.yaml"),
        ("broken.yaml", "a: [", "broken.yaml is not valid YAML"),
        ("typo.yaml", text.replace("n_epochs", "n_epoch"), "n_epochs"),
    ):
        (here / name).write_text(content)
        refused = nnx("train", "numbers.csv", "--target", "y", "--regression", "--config", name)
        assert refused.returncode == 1
        assert message in refused.stderr
        assert "Traceback" not in refused.stderr
    assert len(run_ids(here)) == 1


def test_predictions_of_a_number_keep_all_digits(here: Path, nnx: Nnx) -> None:
    # Seconds since 1970, as a table of events holds them; 7 digits would tell no two apart.
    write(here / "times.csv", ["a", "when"], ([n, 1_700_000_000 + 60 * n] for n in range(60)))
    trained = nnx("train", "times.csv", "--target", "when", "--regression", "--epochs", "30")
    assert trained.returncode == 0, trained.stderr
    run = only_run(here)
    out = nnx("predict", run, "times.csv").stdout.splitlines()[1:]
    assert len(set(out)) == 60
    stored = json.loads((here / "runs" / run / "table.json").read_text())["preparation"]
    target = stored["target"]["standardizer"]
    model = load_model(run, "best")
    inputs = Preparation.from_state(stored).inputs(read_table("times.csv"))
    logits = model.predict(inputs).logits[:, 0].astype(np.float64)
    expected = logits * target["scale"][0] + target["mean"][0]
    assert [float(cell) for cell in out] == expected.tolist()
    for kept in load_predictions(run, str(here / "runs")):
        table = [float(row["when"]) for row in records(here / "times.csv")]
        assert [float(t) for t in kept.targets] == [table[int(i)] for i in kept.sample_ids]


@pytest.mark.parametrize(
    "target", ["cancer.csv", "link.csv", "./cancer.csv", "absent/x.csv", "runs"]
)
def test_predictions_never_replace_their_input(here: Path, nnx: Nnx, target: str) -> None:
    nnx("train", "cancer.csv", "--target", "diagnosis", "--epochs", "1", "--quiet")
    os.symlink("cancer.csv", here / "link.csv")
    before = (here / "cancer.csv").read_bytes()
    message = {
        "absent/x.csv": "there is no folder absent, where absent/x.csv would lie",
        "runs": "runs is a folder; name a file in it",
    }.get(target, f"--output {target} is the input cancer.csv, which it would replace")
    refused = nnx("predict", only_run(here), "cancer.csv", "-o", target)
    assert refused.returncode == 1
    assert message in refused.stderr
    assert (here / "cancer.csv").read_bytes() == before
    assert (here / "link.csv").is_symlink()


def test_only_missing_cells_are_filled_and_they_are_counted(here: Path, nnx: Nnx) -> None:
    rows = [[n if n % 10 else "", "red" if n % 7 else "NA", "ab"[n % 2]] for n in range(40)]
    write(here / "gaps.csv", ["size", "colour", "y"], rows)
    trained = nnx("train", "gaps.csv", "--target", "y", "--impute", "--epochs", "1")
    assert trained.returncode == 0, trained.stderr
    assert "4 in 'size' with " in trained.stdout
    assert "6 in 'colour' with 'red'" in trained.stdout
    predicted = nnx("predict", only_run(here), "gaps.csv")
    assert "missing cells filled: 4 in 'size' with " in predicted.stderr
    rows[3][0] = "$5"
    write(here / "gaps.csv", ["size", "colour", "y"], rows)
    for arguments in (
        ["train", "gaps.csv", "--target", "y", "--impute"],
        ["predict", only_run(here), "gaps.csv"],
    ):
        refused = nnx(*arguments)
        assert refused.returncode == 1
        assert "row 4 (line 5), column 'size': '$5' is not a number as a program" in refused.stderr


@pytest.mark.skipif(os.name == "nt", reason="named pipes")
def test_a_pipe_is_identified_by_what_came_out_of_it(here: Path, nnx: Nnx) -> None:
    content = (here / "cancer.csv").read_bytes()
    changed = content.replace(b"malignant", b"other")
    for part in (content, changed, content):
        os.mkfifo(here / "pipe")
        writer = threading.Thread(target=(here / "pipe").write_bytes, args=(part,))
        writer.start()
        done = nnx("train", "pipe", "--target", "diagnosis", "--epochs", "1", "--overwrite")
        writer.join()
        assert done.returncode == 0, done.stderr
        (here / "pipe").unlink()
    found = run_ids(here)
    assert len(found) == 2
    digests = {json.loads((here / "runs" / r / "table.json").read_text())["content"] for r in found}
    assert digests == {str(hash_bytes(part).value) for part in (content, changed)}
    resumed = nnx("resume", found[0], "--epochs", "1")
    assert "is gone or was a pipe; pass --data DATA.csv" in resumed.stderr
    (here / "kept.csv").write_bytes(content)
    same = next(r for r in found if str(hash_bytes(content).value) in
                (here / "runs" / r / "table.json").read_text())  # fmt: skip
    done = nnx("resume", same, "--epochs", "1", "--data", "kept.csv")
    assert done.returncode == 0, done.stderr


def test_a_run_of_a_device_that_is_absent_predicts_on_the_cpu_and_is_not_continued(
    here: Path, nnx: Nnx, monkeypatch: pytest.MonkeyPatch
) -> None:
    nnx("train", "cancer.csv", "--target", "diagnosis", "--epochs", "2", "--quiet")
    run = only_run(here)
    expected = nnx("predict", run, "cancer.csv").stdout
    present = Devices.is_available
    monkeypatch.setattr(Devices, "is_available", property(lambda self: False))
    with pytest.raises(RuntimeError, match="this machine has no device 'cpu', where the model is"):
        NNModel(net_params=NNRun.load(run).net, params=NNRun.load(run).model)
    refused = nnx("resume", run, "--epochs", "1")
    assert f"run {run} was trained on cpu, which this machine has not" in refused.stderr
    calls = iter([False])  # the run's device is absent, the CPU is there
    monkeypatch.setattr(Devices, "is_available", property(lambda self: next(calls, True)))
    predicted = nnx("predict", run, "cancer.csv")
    assert predicted.stdout == expected
    assert "warning: run" in predicted.stderr
    assert "its checkpoint is used on the CPU" in predicted.stderr
    assert present is not Devices.is_available


def test_a_full_disk_names_the_file_what_is_committed_and_how_it_goes_on(
    here: Path, nnx: Nnx, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(Disk):
        room = 300_000

        def write(self, descriptor: int, data: object) -> int:
            self.room -= memoryview(data).nbytes
            if self.room < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(descriptor, data)

    arguments = ["train", "cancer.csv", "--target", "diagnosis", "--epochs", "9", "--quiet"]
    with monkeypatch.context() as patch:
        patch.setattr(files, "disk", Full())
        full = nnx(*arguments)
    run = only_run(here)
    assert full.returncode == 1
    said = re.fullmatch(
        rf"nnx: \S*runs/{run}/\S+: No space left on device\. Run {run} has (\d) committed "
        rf"epochs; once the file can be written, `(nnx resume {run[:8]})` continues it\n",
        full.stderr,
    )
    assert said, full.stderr
    assert 0 < int(said[1]) < 9
    assert nnx(*said[2].split()[1:], "--quiet").returncode == 0


def test_a_finished_run_trains_on_when_more_epochs_are_asked_for(here: Path, nnx: Nnx) -> None:
    nnx("train", "cancer.csv", "--target", "diagnosis", "--epochs", "2", "--quiet")
    first = only_run(here)
    done = nnx("resume", first)
    assert done.returncode == 1
    assert done.stderr == (
        f"nnx: run {first} has finished its 2 epochs; `nnx resume {first[:8]} --epochs 10` trains "
        "10 more\n"
    )
    assert run_ids(here) == [first]
    more = nnx("resume", first, "--epochs", "2")
    assert more.returncode == 0, more.stderr
    assert len(run_ids(here)) == 2


def test_a_resume_needs_the_table_it_was_trained_on(here: Path, nnx: Nnx) -> None:
    nnx("train", "cancer.csv", "--target", "diagnosis", "--epochs", "2", "--quiet")
    first = only_run(here)
    (here / "cancer.csv").rename(here / "moved.csv")
    gone = nnx("resume", first, "--epochs", "1")
    assert gone.returncode == 1
    assert "is gone or was a pipe; pass --data DATA.csv" in gone.stderr
    assert nnx("resume", first, "--epochs", "1", "--data", "moved.csv").returncode == 0
    with open(here / "moved.csv", "a") as stream:
        stream.write((here / "moved.csv").read_text().splitlines()[-1] + "\n")
    changed = nnx("resume", first, "--epochs", "1", "--data", "moved.csv")
    assert changed.returncode == 1
    assert "its content changed" in changed.stderr


BAD_INPUT = {
    "a missing file": (["train", "absent.csv", "--target", "y"], "absent.csv: no such file"),
    "an unknown column": (
        ["train", "cancer.csv", "--target", "diagnosys"],
        "cancer.csv has no column 'diagnosys'; did you mean 'diagnosis'",
    ),
    "a header only": (["train", "header.csv", "--target", "y"], "header.csv has a header but no row"),
    "one class": (["train", "one.csv", "--target", "y"], "the target 'y' has one class, 'u'"),
    "a share that leaves nothing": (
        ["train", "cancer.csv", "--target", "diagnosis", "--test", "0.9"],
        "--validation 0.15 and --test 0.9 leave no row to train on",
    ),
    "a bad size": (
        ["train", "cancer.csv", "--target", "diagnosis", "--hidden", "8,x"],
        "--hidden is sizes such as 64,32, or none; not '8,x'",
    ),
    "no epochs": (
        ["train", "cancer.csv", "--target", "diagnosis", "--epochs", "0"],
        "--epochs must be an integer >= 1, not 0",
    ),
    "a bad rate": (
        ["train", "cancer.csv", "--target", "diagnosis", "--learning-rate", "-1"],
        "--learning-rate must be a finite real number >= 0, not -1.0",
    ),
    "a bad dropout": (
        ["train", "cancer.csv", "--target", "diagnosis", "--dropout", "2"],
        "--dropout must be a finite real number >= 0 and <= 1, not 2.0",
    ),
    "a bad seed": (
        ["train", "cancer.csv", "--target", "diagnosis", "--seed", "-1"],
        "--seed must be in [0, 2**63), not -1",
    ),
    "no patience": (
        ["train", "cancer.csv", "--target", "diagnosis", "--patience", "0"], "--patience"
    ),
    "a bad delimiter": (
        ["train", "cancer.csv", "--target", "diagnosis", "--delimiter", "::"],
        "--delimiter is one character, or tab",
    ),
    "no folder of runs to clean": (
        ["gc", "--runs", "absent"], "there is no folder absent; --runs names the folder",
    ),
    "no folder of runs to choose from": (["best", "--runs", "absent"], "there is no folder absent"),
    "an absent device": (
        ["train", "cancer.csv", "--target", "diagnosis", "--device", "cuda"],
        "--device cuda: this machine has none",
    ),
    "an unknown device": (
        ["train", "cancer.csv", "--target", "diagnosis", "--device", "tpu"],
        "--device is one of cpu, mps, cuda, auto, not 'tpu'",
    ),
    "a missing configuration": (
        ["train", "cancer.csv", "--target", "diagnosis", "--config", "no.yaml"],
        "no.yaml: no such file",
    ),
    "no such run to predict": (["predict", "0123abc", "cancer.csv"], "0123abc"),
    "no such run to resume": (["resume", "0123abc"], "0123abc"),
    "no such run to show": (["show", "0123abc"], "0123abc"),
    "an unknown option": (["train", "cancer.csv"], "--target"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_message_and_leaves_no_run(here: Path, nnx: Nnx, case: str) -> None:
    if case == "an absent device" and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    (here / "header.csv").write_text("x,y\n")
    (here / "one.csv").write_text("x,y\n1,u\n2,u\n")
    arguments, message = BAD_INPUT[case]
    result = nnx(*arguments)
    assert result.returncode in (1, 2)
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    assert not (here / "runs").exists() or not run_ids(here)


def test_a_refusal_prints_a_traceback_only_with_debug(process: Nnx) -> None:
    arguments = ["train", "absent.csv", "--target", "y"]
    refused = process(*arguments)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == "nnx: absent.csv: no such file\n"
    debugged = process("--debug", *arguments)
    assert debugged.returncode == 1
    assert debugged.stderr.startswith("Traceback")
    assert debugged.stderr.endswith("FileNotFoundError: absent.csv: no such file\n")


def test_an_ambiguous_id_names_the_candidates(here: Path, nnx: Nnx) -> None:
    for seed in range(20):  # of 17 ids, two begin alike
        nnx("train", "cancer.csv", "--target", "diagnosis", "--epochs", "1", "--hidden", "none",
            "--seed", str(seed), "--quiet")  # fmt: skip
        ids = run_ids(here)
        first = [i[0] for i in ids]
        twice = next((c for c in first if first.count(c) > 1), None)
        if twice:
            break
    assert twice
    result = nnx("predict", twice, "cancer.csv")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    for candidate in (i for i in ids if i.startswith(twice)):
        assert candidate in result.stderr


def test_a_corrupt_checkpoint_is_refused(here: Path, nnx: Nnx) -> None:
    nnx("train", "cancer.csv", "--target", "diagnosis", "--epochs", "2", "--quiet")
    run = only_run(here)
    for name in ("last", "best"):
        path = here / "runs" / run / "checkpoints" / f"{name}.pt"
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content[: len(content) // 2])
    for arguments in (["predict", run, "cancer.csv"], ["resume", run, "--epochs", "1"]):
        result = nnx(*arguments)
        assert result.returncode == 1, arguments
        assert ".pt" in result.stderr
        assert "Traceback" not in result.stderr
    assert run_ids(here) == [run]


def test_a_run_without_a_table_cannot_predict_a_table(here: Path, nnx: Nnx) -> None:
    nnx("train", "cancer.csv", "--target", "diagnosis", "--epochs", "1", "--quiet")
    run = only_run(here)
    (here / "runs" / run / "table.json").unlink()
    result = nnx("predict", run, "cancer.csv")
    assert result.returncode == 1
    assert "was not made by nnx train: it has no table.json" in result.stderr


@pytest.mark.skipif(os.name == "nt", reason="POSIX permissions")
def test_an_unwritable_runs_folder_is_refused(here: Path, nnx: Nnx) -> None:
    # A file in the place of a folder stops root too.
    (here / "taken").write_text("")
    for folder in ("taken", "taken/runs"):
        result = nnx(
            "train", "cancer.csv", "--target", "diagnosis", "--epochs", "1", "--runs", folder
        )
        assert result.returncode == 1
        assert "taken" in result.stderr
        assert "Traceback" not in result.stderr
    assert (here / "taken").read_text() == ""


@pytest.mark.skipif(os.name == "nt", reason="pseudo-terminals")
def test_a_terminal_shows_a_progress_bar_unless_it_is_quiet(here: Path) -> None:
    arguments = ["train", "cancer.csv", "--target", "diagnosis", "--epochs", "2"]
    assert "%|" in on_a_terminal(here, *arguments)
    assert "%|" not in on_a_terminal(here, *arguments, "--quiet", "--overwrite")


def on_a_terminal(here: Path, *arguments: str) -> str:
    """What ``nnx`` shows on a terminal."""
    import fcntl
    import pty
    import termios

    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    command = [sys.executable, "-m", "nnx", *arguments]
    env = {k: v for k, v in os.environ.items() if k != "NNX_TQDM_DISABLE"}
    with subprocess.Popen(command, cwd=here, env=env, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        shown = b""
        with contextlib.suppress(OSError):  # the end of a pseudo-terminal
            while chunk := os.read(controller, 4096):
                shown += chunk
    os.close(controller)
    assert process.returncode == 0, shown.decode()
    return shown.decode()
