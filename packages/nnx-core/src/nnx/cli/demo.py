"""``nnx demo``: train on real data, kill, resume, and compare with a training left alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

MARKER = ".nnx-demo"
TABLE = "breast-cancer.csv"
TARGET = "diagnosis"
KILLED, WHOLE = "runs", "runs-uninterrupted"


def demo(
    folder: Annotated[
        str, typer.Option("--folder", help="Where to work; replaced if it is an earlier demo.")
    ] = "nnx-demo",
    epochs: Annotated[int, typer.Option(min=8, help="Passes over the data.")] = 150,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars.")] = False,
) -> None:
    """Kill and resume a training on real data.

    The result is compared, bit for bit, with a training that was left alone.
    """
    here = Path(folder)
    rows = _table()
    _make_room(here)
    started = time.perf_counter()

    _say(1, f"scikit-learn's breast-cancer table, written to {here / TABLE}")
    _write(here / TABLE, rows)
    print(f"{len(rows) - 1} rows, {len(rows[0]) - 1} measurements, target {TARGET!r}")

    _say(2, "train, and kill the training process half way")
    training = ["train", TABLE, "--target", TARGET, "--epochs", str(epochs)]
    training += ["--quiet"] if quiet else []
    killed_id, committed = _train_and_kill(here, training, half=epochs // 2)
    print(f"SIGKILL: run {killed_id[:8]} has {committed} of {epochs} epochs committed")

    _say(3, "resume it")
    resumed_id = _run(here, "resume", killed_id, *(["--quiet"] if quiet else []), folder=KILLED)

    _say(4, f"train the same configuration without interruption, in {WHOLE}/")
    whole_id = _run(here, *training, folder=WHOLE)

    _say(5, "compare the two")
    same = _compare(here, killed_id, resumed_id, whole_id)

    _say(6, "the runs")
    _nnx(here, "runs", folder=KILLED)
    print(f"the table, the runs and the uninterrupted run are in {here.resolve()}")
    print(f"look closer:  cd {here} && nnx show {resumed_id[:8]}")
    print(f"predict:      cd {here} && nnx predict {resumed_id[:8]} {TABLE}")
    print(f"\nthe demo took {time.perf_counter() - started:.0f} s")
    if not same:
        raise RuntimeError("the resumed training differs from the uninterrupted one")


def _table() -> list[list[Any]]:
    try:
        from sklearn.datasets import load_breast_cancer
    except ImportError:
        from nnx.plugins.siblings import install_line

        raise ImportError(
            "the demo's data comes with scikit-learn, which is not installed. "
            f"Install it with: {install_line('nnx-core', 'demo')}"
        ) from None
    data = load_breast_cancer()
    names = data.target_names[data.target]
    return [
        [*data.feature_names, TARGET],
        *([*map(float, row), str(name)] for row, name in zip(data.data, names, strict=True)),
    ]


def _write(path: Path, rows: list[list[Any]]) -> None:
    import csv

    with open(path, "w", encoding="utf-8", newline="") as stream:
        csv.writer(stream, lineterminator="\n").writerows(rows)


def _make_room(folder: Path) -> None:
    """An empty folder; only one that an earlier demo marked is replaced."""
    import shutil

    if folder.exists() and not (folder / MARKER).exists():
        raise FileExistsError(
            f"{folder} exists and is not an earlier demo; choose another place with --folder"
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / MARKER).touch()


def _say(step: int, what: str) -> None:
    print(f"\n{step}. {what}", flush=True)


def _environment(folder: str) -> dict[str, str]:
    return {**os.environ, "NNX_RUNS": folder}


def _nnx(here: Path, *arguments: str, folder: str) -> None:
    """Run ``nnx`` in the demo's folder, its output on our terminal."""
    sys.stdout.flush()
    command = [sys.executable, "-m", "nnx", *arguments]
    code = subprocess.run(command, cwd=here, env=_environment(folder)).returncode
    if code:
        raise RuntimeError(f"nnx {' '.join(arguments)} exited with {code}")


def _run(here: Path, *arguments: str, folder: str) -> str:
    """Run ``nnx`` and return the id of the run that it added."""
    before = _finished(here / folder)
    _nnx(here, *arguments, folder=folder)
    (added,) = _finished(here / folder) - before
    return added


def _finished(runs: Path) -> set[str]:
    return {file.parent.name for file in runs.glob("*/run.yaml") if not file.parent.is_symlink()}


def _train_and_kill(here: Path, arguments: list[str], *, half: int) -> tuple[str, int]:
    """Start a training, SIGKILL it once ``half`` epochs are committed; its id and epochs."""
    from nnx.store.listing import list_runs

    command = [sys.executable, "-m", "nnx", *arguments]
    process = subprocess.Popen(command, cwd=here, env=_environment(KILLED))
    try:
        while process.poll() is None:
            for row in list_runs(str(here / KILLED)) if (here / KILLED).is_dir() else ():
                if (row.epochs or 0) >= half:
                    process.kill()
            time.sleep(0.005)
    finally:
        process.kill()
        process.wait()
    print(flush=True)  # past the progress bar that was cut off
    (row,) = list_runs(str(here / KILLED))
    if process.returncode >= 0:
        raise RuntimeError(
            f"the training ended by itself (exit code {process.returncode}) before it was killed; "
            "ask for more --epochs"
        )
    return row.id, row.epochs or 0


def _compare(here: Path, killed_id: str, resumed_id: str, whole_id: str) -> bool:
    """Print and return whether all that the two trainings left is equal bit for bit."""
    from nnx.cli.screen import table
    from nnx.store.points import read_point
    from nnx.store.predictions import load_predictions
    from nnx.store.run import NNRun

    split, alone = str(here / KILLED), str(here / WHOLE)
    resumed = read_point(resumed_id, "last", root=split)
    whole = read_point(whole_id, "last", root=alone)
    first = NNRun.load(killed_id, root=split).idps or []
    second = NNRun.load(resumed_id, root=split).idps or []
    history = [record.state() for record in NNRun.load(whole_id, root=alone).idps or []]
    begun = second[0].epoch_idx if second else 0
    joined = [record.state() for record in [*first, *second]]

    def optimizer(point: Any) -> Any:
        return (point.training_state or {}).get("optimizer_state")

    def best(run: str, root: str) -> Any:
        point = read_point(run, "best", root=root).checkpoint
        return [point.net_state, point.idp.state()]

    found = best(whole_id, alone)
    stored = load_predictions(resumed_id, split), load_predictions(whole_id, alone)
    accuracies = [_accuracy(predictions[0]) for predictions in stored]
    weights = whole.checkpoint.net_state
    results = {
        f"weights ({sum(w.numel() for w in weights.values()):,} numbers)": _equal(
            resumed.checkpoint.net_state, weights
        ),
        "optimizer state": optimizer(whole) is not None
        and _equal(optimizer(resumed), optimizer(whole)),
        f"history ({len(history):,} batches, resumed at epoch {begun})": _equal(joined, history),
        f"best checkpoint (epoch {found[1]['epoch_idx']})": _equal(best(resumed_id, split), found),
        "runs/best": _equal(best("best", split), best("best", alone)),
        f"test accuracy ({accuracies[1]:.4f})": accuracies[0] == accuracies[1],
        "stored predictions": stored[0] == stored[1],
        f"nnx predict of all of {TABLE}": _predicted(here, resumed_id, KILLED)
        == _predicted(here, whole_id, WHOLE),
    }
    rows = [[name, "equal, bit for bit" if same else "DIFFERENT"] for name, same in results.items()]
    table(["killed and resumed, beside uninterrupted", ""], rows)
    return all(results.values())


def _accuracy(test: Any) -> float:
    """The share of a split's stored predictions that are right."""
    right = [wanted == found for wanted, found in zip(test.targets, test.predicted, strict=True)]
    return sum(right) / len(right)


def _predicted(here: Path, run_id: str, folder: str) -> bytes:
    """What the command writes for the whole table."""
    name = f"predicted-by-{run_id[:8]}.csv"
    _nnx(here, "predict", run_id, TABLE, "--output", name, folder=folder)
    return (here / name).read_bytes()


def _equal(left: Any, right: Any) -> bool:
    """Whether two nested states hold the same values and the same bits of tensors."""
    import torch

    if isinstance(left, torch.Tensor):
        return (
            isinstance(right, torch.Tensor)
            and left.dtype == right.dtype
            and left.shape == right.shape
            and left.contiguous().numpy().tobytes() == right.contiguous().numpy().tobytes()
        )
    if isinstance(left, dict):
        return (
            isinstance(right, dict)
            and left.keys() == right.keys()
            and all(_equal(left[key], right[key]) for key in left)
        )
    if isinstance(left, (list, tuple)):
        return (
            isinstance(right, (list, tuple))
            and len(left) == len(right)
            and all(map(_equal, left, right))
        )
    return bool(left == right or (left != left and right != right))  # a NaN is one
