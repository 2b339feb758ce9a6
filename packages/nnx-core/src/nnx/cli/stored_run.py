"""Using a run that ``nnx train`` made: predict with it, continue it."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch

from nnx.cli.kept import continuing, read_kept, write_predictions
from nnx.cli.options import again
from nnx.cli.output import check_output
from nnx.cli.preparation import Preparation
from nnx.cli.source import Source, is_regular
from nnx.cli.table import delimiter_of, read_table
from nnx.cli.table_run import EARLIER_FORMAT, FILE, FORMAT, Job, load_model
from nnx.components import ComponentRestoreError
from nnx.engine.resume import ResumeError
from nnx.nn_model import NNModel
from nnx.store.committed import committed_epoch
from nnx.store.paths import RunPaths
from nnx.store.pointer import resolve_run_id
from nnx.store.run import NNRun


def predict(
    run: str, data: str, *, checkpoint: str, output: str | None, delimiter: str = ","
) -> None:
    """Write a CSV of predictions for each row of ``data``."""
    run_id = resolve_run_id(run)
    if output is not None:
        check_output(output, inputs=[data])
    fitted = stored_preparation(run_id)
    table = read_table(data, delimiter=delimiter_of(delimiter))
    inputs = fitted.inputs(table)
    filled = fitted.filled(table)
    if filled:
        print(f"nnx: missing cells filled: {filled}", file=sys.stderr)
    model = load_model(run_id, checkpoint)
    header, rows = _predictions(model, fitted, inputs)
    write_predictions(output, header, rows)
    if output is not None:
        print(f"{len(rows)} predictions of {fitted.target.name!r} in {output}")


def resume(run: str, *, epochs: int | None = None, data: str | None = None) -> str:
    """Train on from a run's LAST checkpoint as a new run; its id."""
    run_id = resolve_run_id(run)
    job = open_job(run_id, data=data)
    found = NNRun.load(run_id)
    if found.net is None:
        raise ValueError(f"run {run_id} has no built-in network")
    params = continuing(found.train, run_id, epochs)
    if epochs is None and _is_finished(run_id, found.train.n_epochs):
        raise ValueError(
            f"run {run_id} has finished its {found.train.n_epochs} epochs; "
            f"`{again(f'nnx resume {run_id[:8]} --epochs 10')}` trains 10 more"
        )
    if not found.model.device.is_available:
        raise ValueError(
            f"run {run_id} was trained on {found.model.device.value}, which this machine has not "
            "(`nnx doctor` shows the devices), so it cannot be continued exactly here; train a "
            "new run with `nnx train`"
        )
    model = NNModel(net_params=found.net, params=found.model)
    try:
        return job.train(model, params, salt=found.salt)
    except (ResumeError, ComponentRestoreError) as error:
        problems = "".join(f"\n  - {problem}" for problem in error.problems)
        raise ValueError(
            f"run {run_id} cannot be continued exactly here:{problems}\nContinue it where it was "
            f"begun, or train a new run with `nnx train`"
        ) from None


def open_job(run_id: str, *, data: str | None = None) -> Job:
    """The table that a run was trained on, split and prepared as it was then.

    ``data`` says where the same table is now. Another content is refused.
    """
    stored = _stored(run_id)
    source = Source.from_state(stored["source"], earlier=stored["format"] == EARLIER_FORMAT)
    if data is not None:
        source = dataclasses.replace(source, path=data)
    if data is None and not is_regular(source.path):
        raise FileNotFoundError(
            f"{source.path}, which run {run_id} was trained on, is gone or was a pipe; "
            "pass --data DATA.csv to say where the same table is now"
        )
    job = Job.open(source, Preparation.from_state(stored["preparation"]))
    if job.table.digest != stored["content"]:
        raise ValueError(
            f"{source.path} is not what run {run_id} was trained on (its content changed), so "
            "the run cannot continue; train a new run on it"
        )
    return job


def stored_preparation(run_id: str) -> Preparation:
    """How a run of ``nnx train`` prepared its inputs."""
    return Preparation.from_state(_stored(run_id)["preparation"])


def _is_finished(run_id: str, planned: int) -> bool:
    last = committed_epoch(RunPaths.of(run_id))
    return last is not None and last + 1 >= planned


def _stored(run_id: str) -> dict[str, Any]:
    return read_kept(run_id, FILE, (FORMAT, EARLIER_FORMAT), command="nnx train")


def _predictions(
    model: NNModel, fitted: Preparation, inputs: torch.Tensor
) -> tuple[list[str], list[list[Any]]]:
    labels = fitted.target.labels
    name = f"predicted {fitted.target.name}"
    with torch.random.fork_rng(devices=[]):
        logits = model.predict(inputs.to(model.device)).logits
    if labels is None:
        return [name], [[repr(float(v))] for v in fitted.target.restore(logits[:, 0])]
    chances = torch.from_numpy(logits).softmax(dim=1)
    header = [name, *(f"probability {label}" for label in labels)]
    best = chances.argmax(dim=1).tolist()
    rows: list[list[Any]] = [
        [labels[index], *(f"{p:.9g}" for p in row)]  # all digits of a float32
        for index, row in zip(best, chances.tolist(), strict=True)
    ]
    return header, rows
