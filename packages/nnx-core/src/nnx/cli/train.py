"""``nnx train``, ``nnx predict`` and ``nnx resume``: tables in, runs and predictions out."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nnx.cli.options import Quiet, RunId, RunsFolder, use_quiet, use_runs

if TYPE_CHECKING:
    from nnx.cli.table_run import Job

DataFile = Annotated[str, typer.Argument(metavar="DATA.csv", help="A CSV file with a header.")]


def train(
    data: DataFile,
    target: Annotated[str, typer.Option("--target", help="The column to predict.")],
    regression: Annotated[
        bool, typer.Option("--regression", help="Predict a number instead of a class.")
    ] = False,
    config: Annotated[
        str | None,
        typer.Option("--config", metavar="RUN.yaml", help="Train a stored run's configuration."),
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.  [default: 50]")] = None,
    hidden: Annotated[
        str | None,
        typer.Option(help="Sizes of the hidden layers, or 'none'.  [default: 64,64]"),
    ] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Of Adam.  [default: 0.001]")] = None,
    dropout: Annotated[float | None, typer.Option(help="Dropout.  [default: 0]")] = None,
    batch_size: Annotated[int, typer.Option(help="Rows per update.", min=1)] = 32,
    patience: Annotated[
        int | None, typer.Option(help="Stop after this many epochs without improvement.", min=1)
    ] = None,
    tune: Annotated[
        int | None,
        typer.Option(
            metavar="TRIALS",
            help="First try this many sizes, rates and dropouts on the validation rows.",
            min=1,
        ),
    ] = None,
    tune_seconds: Annotated[
        float | None, typer.Option(help="Begin no trial after this many seconds.", min=0.001)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of training.  [default: 0]")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or mps.  [default: cpu]")] = None,
    validation: Annotated[float, typer.Option(help="Share of the rows to validate on.")] = 0.15,
    test: Annotated[float, typer.Option(help="Share of the rows to test on.")] = 0.15,
    split_seed: Annotated[int, typer.Option(help="Of the split.")] = 0,
    split_column: Annotated[
        str | None,
        typer.Option(help="A column that says train, validation or test.", metavar="COLUMN"),
    ] = None,
    impute: Annotated[
        bool,
        typer.Option("--impute", help="Fill missing cells, and no others, from the training rows."),
    ] = False,
    drop: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="Leave a column out.")
    ] = None,
    numeric: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="Read a column as numbers.")
    ] = None,
    categorical: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="Read a column as categories.")
    ] = None,
    delimiter: Annotated[str, typer.Option(help="Between the cells: one character, or tab.")] = ",",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a run of the same configuration.")
    ] = False,
    runs: RunsFolder = None,
    quiet: Quiet = False,
) -> None:
    """Train a network on a CSV file and test it.

    Columns that hold mostly numbers are standardized, the others become one
    input per category; what is fitted is fitted on the training rows alone
    and stored with the run, as are the predictions of the held-out rows.
    """
    use_runs(runs)
    use_quiet(quiet)
    from nnx.cli import table_run
    from nnx.cli.source import Source
    from nnx.cli.table import delimiter_of

    source = Source(
        path=data, target=target, regression=regression, delimiter=delimiter_of(delimiter), impute=impute,
        drop=tuple(drop or ()), numeric=tuple(numeric or ()), categorical=tuple(categorical or ()),
        validation=validation, test=test, split_seed=split_seed, split_column=split_column,
        batch_size=batch_size, patience=patience,
    )  # fmt: skip
    if tune_seconds is not None and tune is None:
        raise ValueError("--tune-seconds is a limit of --tune TRIALS, which is not given")
    job = table_run.Job.open(source)
    salt = None
    if config is not None:
        given = {"--hidden": hidden, "--dropout": dropout, "--device": device, "--tune": tune}
        for option, value in given.items():
            if value is not None:
                raise ValueError(f"{option} cannot be given with --config, which says it")
        with _said_as_options():
            model, params, salt = job.configured_by(
                config, epochs=epochs, learning_rate=learning_rate, seed=seed
            )
    else:
        fixed = {"hidden": hidden, "learning_rate": learning_rate, "dropout": dropout}
        with _said_as_options():
            model, params = _configured(
                job, {name: value for name, value in fixed.items() if value is not None},
                trials=tune, seconds=tune_seconds, epochs=50 if epochs is None else epochs,
                seed=0 if seed is None else seed, device=device or "cpu",
            )  # fmt: skip
    job.train(model, params, salt=salt, overwrite=overwrite)


def _configured(
    job: Job, chosen: dict[str, Any], *, trials: int | None, seconds: float | None, **common: Any
) -> tuple[Any, Any]:
    """The model and training of the ``chosen`` options, the others tuned in ``trials``."""
    from nnx.cli import table_run, tuning

    if trials is not None:
        chosen = tuning.tune(job, trials=trials, seconds=seconds, fixed=chosen, **common)
    model, params = job.configure(**{**table_run.DEFAULTS, **chosen}, **common)
    if trials is not None:  # BEST is elected as the trials were compared
        params = dataclasses.replace(params, monitor=tuning.MONITOR)
    return model, params


# What a refused configuration calls its fields, and what the terminal calls them.
_OPTIONS = {
    "NNTrainParams.n_epochs": "--epochs",
    "NNOptimParams.max_lr": "--learning-rate",
    "NNParams.dropout_prob": "--dropout",
    "seed": "--seed",
}


@contextlib.contextmanager
def _said_as_options() -> Iterator[None]:
    """Let a refused value be named by the option that gave it."""
    try:
        yield
    except ValueError as error:
        for field, option in _OPTIONS.items():
            if str(error).startswith(f"{field} must"):
                raise ValueError(option + str(error).removeprefix(field)) from None
        raise


def predict(
    run: RunId,
    data: DataFile,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="Write here instead of to the terminal.")
    ] = None,
    checkpoint: Annotated[str, typer.Option(help="best, last, first, q1, q2 or q3.")] = "best",
    delimiter: Annotated[str, typer.Option(help="Between the cells: one character, or tab.")] = ",",
    runs: RunsFolder = None,
) -> None:
    """Predict the rows of a CSV file with a run.

    The run must be one that nnx train made. The columns are prepared as they
    were for its training.
    """
    use_runs(runs)
    from nnx.cli import stored_run

    stored_run.predict(run, data, checkpoint=checkpoint, output=output, delimiter=delimiter)


def resume(
    run: RunId,
    epochs: Annotated[
        int | None,
        typer.Option(help="Train this many more, instead of up to what was planned.", min=1),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="DATA.csv", help="Where the data is now, if it was moved."),
    ] = None,
    runs: RunsFolder = None,
    quiet: Quiet = False,
) -> None:
    """Continue a run from its last committed epoch.

    The continuation is a run of its own, which names its parent. It needs the
    file that the run was trained on, unchanged.
    """
    use_runs(runs)
    use_quiet(quiet)
    from nnx.cli import stored_run

    stored_run.resume(run, epochs=epochs, data=data)
