"""The ``nnx sweep`` command. Typer annotations alone: torch comes when it runs."""

from __future__ import annotations

from typing import Annotated

import typer
from nnx.cli.options import Quiet, RunsFolder, again, use_quiet, use_runs


def sweep(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Defines sweep = Sweep(...).")],
    trials: Annotated[
        int | None, typer.Option(min=1, help="The most trials, of all workers.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes on this machine.")] = 1,
    study: Annotated[str | None, typer.Option(help="The name of the study.")] = None,
    storage: Annotated[
        str | None, typer.Option(help="A journal file or a database URL that all workers reach.")
    ] = None,
    worker: Annotated[int | None, typer.Option(hidden=True)] = None,
    runs: RunsFolder = None,
    quiet: Quiet = False,
) -> None:
    """Search for the best configuration of a plan, in several processes over one study.

    Start it again to go on with it; start it elsewhere too to help.
    Example: nnx sweep plan.py --trials 50 --workers 4
    """
    from nnx.cli.screen import table
    from nnx.search.sweep import load_sweep
    from nnx.search.sweep import sweep as run_sweep

    use_runs(runs)
    use_quiet(quiet)
    if worker is not None:
        load_sweep(file, trials=trials, study_name=study, storage=storage).work(first=worker == 0)
        return
    result = run_sweep(file, trials=trials, workers=workers, study_name=study, storage=storage)
    scored = [o for o in result.outcomes if o.monitor_value is not None]
    sign = 1 if result.direction == "min" else -1
    scored.sort(key=lambda o: sign * (o.monitor_value or 0.0))
    rows = [
        [
            str(o.number), o.reason, f"{o.monitor_value:.6g}", (o.run_id or "")[:12],
            ", ".join(f"{name}={_short(value)}" for name, value in o.params.items()),
        ]
        for o in scored[:10]
    ]  # fmt: skip
    table(["trial", "ended", result.monitor, "run", "parameters"], rows)
    states = [o.state for o in result.outcomes]
    counts = ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(states))
    print(f"{result.asked} configurations were tried ({counts}); stopped: {result.stop_reason}")
    if result.best is not None and result.best.run_id is not None:
        print(f"look at the best: {again(f'nnx show {result.best.run_id[:8]}')}")


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
