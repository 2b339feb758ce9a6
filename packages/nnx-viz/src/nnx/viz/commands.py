"""The ``nnx report`` and ``nnx watch`` commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from nnx.cli.options import RunsFolder, use_runs
from nnx.cli.output import check_output


def report(
    run: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Run ids, or their beginnings.")
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="Where to write the page.")
    ] = "report.html",
    title: Annotated[str | None, typer.Option(help="The page's title.")] = None,
    runs: RunsFolder = None,
) -> None:
    """Write one self-contained HTML page about one or more runs.

    Curves, what differs between the runs, stored predictions, lineage,
    checkpoint integrity, environment. Open it in any browser; it needs no
    network. Example: nnx report best 3f2a -o compared.html
    """
    from nnx.store.pointer import resolve_run_id
    from nnx.viz.report import write_report

    use_runs(runs)
    check_output(output)
    _refuse_to_replace_other_files(output)
    path = write_report([resolve_run_id(name) for name in run], output, title=title)
    print(f"Report written to {path}")


def _refuse_to_replace_other_files(output: str) -> None:
    """Refuse an existing file that is no page: it would be lost."""
    path = Path(output)
    if path.is_file() and path.stat().st_size:
        with open(path, "rb") as stream:
            if not stream.read(64).lstrip().lower().startswith((b"<!doctype html", b"<html")):
                raise FileExistsError(
                    f"{output} is there and is no HTML page; choose another file with --output"
                )


def watch(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run id, or its beginning.")],
    interval: Annotated[float, typer.Option(help="Seconds between looks.", min=0.1)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one view and end.")] = False,
    runs: RunsFolder = None,
) -> None:
    """Follow a run that is being trained, until it ends or Ctrl-C.

    Reads the committed history only; the training process does not notice.
    Example: nnx watch 3f2a --interval 5
    """
    from nnx.store.pointer import resolve_run_id
    from nnx.viz.watch import watch as follow

    use_runs(runs)
    follow(resolve_run_id(run), interval=interval, once=once)
