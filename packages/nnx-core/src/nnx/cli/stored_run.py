"""Using a run that ``nnx train`` made: predict with it, continue it."""

from __future__ import annotations

import csv
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch

from nnx.cli.preparation import Preparation
from nnx.cli.source import Source
from nnx.cli.table import read_table
from nnx.cli.table_run import EARLIER_FORMAT, FILE, FORMAT, Job, load_model, table_file
from nnx.nn_model import NNModel
from nnx.store.listing import find_run
from nnx.store.run import NNRun
from nnx.utils.files import atomic_write


def predict(
    run: str, data: str, *, checkpoint: str, output: str | None, delimiter: str = ","
) -> None:
    """Write a CSV of predictions for each row of ``data``."""
    run_id = find_run(run)
    job = _stored(run_id)
    fitted = Preparation.from_state(job["preparation"])
    table = read_table(data, delimiter=delimiter)
    inputs = fitted.inputs(table)
    model = load_model(run_id, checkpoint)
    header, rows = _predictions(model, fitted, inputs)
    if output is None:
        csv.writer(sys.stdout, lineterminator="\n").writerows([header, *rows])
        return
    with atomic_write(output) as stream:
        csv.writer(stream, lineterminator="\n").writerows([header, *rows])
    print(f"{len(rows)} predictions of {fitted.target.name!r} in {output}")


def resume(run: str, *, epochs: int | None = None, data: str | None = None) -> str:
    """Train on from a run's LAST checkpoint as a new run; its id."""
    run_id = find_run(run)
    stored = _stored(run_id)
    source = Source.from_state(stored["source"], earlier=stored["format"] == EARLIER_FORMAT)
    if data is not None:
        source = dataclasses.replace(source, path=data)
    if not Path(source.path).exists():
        raise FileNotFoundError(
            f"{source.path}, which run {run_id} was trained on, is gone; "
            "pass --data DATA.csv if it was moved"
        )
    job = Job.open(source, Preparation.from_state(stored["preparation"]))
    if job.digest != stored["content"]:
        raise ValueError(
            f"{source.path} is not what run {run_id} was trained on (its content changed), so "
            "the run cannot continue; train a new run on it"
        )
    found = NNRun.load(run_id)
    if found.net is None:
        raise ValueError(f"run {run_id} has no built-in network")
    params = dataclasses.replace(
        found.train,
        n_epochs=found.train.n_epochs if epochs is None else epochs,
        resume_from_run_id=run_id,
        resume_from_checkpoint="last",
        resume_mode="stateful",
        resume_epochs="planned" if epochs is None else "additional",
    )
    model = NNModel(net_params=found.net, params=found.model)
    return job.train(model, params, salt=found.salt)


def _stored(run_id: str) -> dict[str, Any]:
    path = table_file(run_id)
    try:
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"run {run_id} was not made by nnx train: it has no {FILE}, so how its inputs were "
            "prepared is unknown. Use NNModel.from_checkpoint in a script"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if state.get("format") not in (FORMAT, EARLIER_FORMAT):
        raise ValueError(f"{path} has format {state.get('format')!r}, not {FORMAT!r}")
    return state


def _predictions(
    model: NNModel, fitted: Preparation, inputs: torch.Tensor
) -> tuple[list[str], list[list[Any]]]:
    labels = fitted.target.labels
    name = f"predicted {fitted.target.name}"
    with torch.random.fork_rng(devices=[]):
        logits = model.predict(inputs.to(model.device)).logits
    if labels is None:
        return [name], [[f"{value:.7g}"] for value in fitted.target.restore(logits[:, 0])]
    chances = torch.from_numpy(logits).softmax(dim=1)
    header = [name, *(f"probability {label}" for label in labels)]
    best = chances.argmax(dim=1).tolist()
    rows: list[list[Any]] = [
        [labels[index], *(f"{p:.6f}" for p in row)]
        for index, row in zip(best, chances.tolist(), strict=True)
    ]
    return header, rows
