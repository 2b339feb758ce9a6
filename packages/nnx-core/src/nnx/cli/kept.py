"""What a command keeps inside a run, so that another one can go on with it."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nnx.callbacks import Callback
from nnx.cli.output import write_output
from nnx.params import NNTrainParams
from nnx.store.paths import RunPaths
from nnx.utils.files import atomic_write


class Keep(Callback):
    """Writes a JSON file into the run before its first epoch is committed."""

    def __init__(self, name: str, state: Mapping[str, Any]) -> None:
        self._name = name
        self._state = state
        self.run_id: str | None = None

    def on_epoch_end(self, ctx: Any) -> None:
        self.run_id = ctx.run.id
        path = kept_file(ctx.run.id, self._name)
        if not path.exists():
            with atomic_write(path) as stream:
                json.dump(self._state, stream, indent=1)


def kept_file(run_id: str, name: str) -> Path:
    """Where a run keeps a file of a command."""
    return Path(RunPaths.of(run_id).dir) / name


def read_kept(run_id: str, name: str, formats: Sequence[str], *, command: str) -> dict[str, Any]:
    """What ``command`` kept in a run; ``ValueError`` says what is wrong with it."""
    path = kept_file(run_id, name)
    try:
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"run {run_id} was not made by {command}: it has no {name}, so how its inputs were "
            "prepared is unknown. Use NNModel.from_checkpoint in a script"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if state.get("format") not in formats:
        raise ValueError(f"{path} has format {state.get('format')!r}, not {formats[0]!r}")
    return state


def continuing(train: NNTrainParams, run_id: str, epochs: int | None) -> NNTrainParams:
    """The training that goes on from a run's LAST: to its planned end, or ``epochs`` more."""
    return dataclasses.replace(
        train,
        n_epochs=train.n_epochs if epochs is None else epochs,
        resume_from_run_id=run_id,
        resume_from_checkpoint="last",
        resume_mode="stateful",
        resume_epochs="planned" if epochs is None else "additional",
    )


def write_predictions(output: str | None, header: Sequence[str], rows: Sequence[Any]) -> None:
    """Write a table of predictions as CSV to a file, or to the terminal."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    write_output(output, text.getvalue())
