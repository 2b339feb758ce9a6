"""Options that several commands share."""

from __future__ import annotations

import os
import shlex
from typing import Annotated

import typer

RUNS_VARIABLE = "NNX_RUNS"
DEFAULT_RUNS = "runs"

RunsFolder = Annotated[
    str | None,
    typer.Option(
        "--runs", metavar="FOLDER", help=f"The runs folder (default: ${RUNS_VARIABLE} or ./runs)."
    ),
]

RunId = Annotated[str, typer.Argument(metavar="RUN", help="A run id, its beginning, or 'best'.")]

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")]


def use_runs(folder: str | None) -> str:
    """Make ``folder`` the runs folder of this process and of those that it starts.

    The runs folder that holds from then on, given or not.
    """
    if folder is not None:
        os.environ[RUNS_VARIABLE] = folder
    return os.environ.get(RUNS_VARIABLE) or DEFAULT_RUNS


def existing_runs(folder: str | None) -> str:
    """Like :func:`use_runs`; a folder that is given must be there."""
    root = use_runs(folder)
    if folder is not None and not os.path.isdir(root):
        raise FileNotFoundError(
            f"there is no folder {root}; --runs names the folder in which the runs are"
        )
    return root


def again(command: str) -> str:
    """A command about the same runs, to be typed in the same place."""
    folder = os.environ.get(RUNS_VARIABLE) or DEFAULT_RUNS
    return command if folder == DEFAULT_RUNS else f"{command} --runs {shlex.quote(folder)}"


def use_quiet(quiet: bool) -> None:
    """Switch the progress bars of this process off."""
    if quiet:
        os.environ["NNX_TQDM_DISABLE"] = "1"
