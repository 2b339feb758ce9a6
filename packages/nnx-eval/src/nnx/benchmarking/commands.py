"""The ``nnx bench`` command. Typer annotations alone: torch comes when it runs."""

from __future__ import annotations

from typing import Annotated

import typer
from nnx.cli.options import RunId, RunsFolder, use_runs


def bench(
    run: RunId,
    batch: Annotated[str, typer.Option(help="Batch sizes, with commas.")] = "1,8,64",
    shape: Annotated[
        str | None, typer.Option(help="The shape of one input, with commas: 3,32,32.")
    ] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Measure compiled too.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls for each size.")] = 20,
    checkpoint: Annotated[str, typer.Option(help="Which checkpoint.")] = "last",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    runs: RunsFolder = None,
) -> None:
    """Measure a stored model: latency by batch size, throughput, memory, FLOPs, layers.

    Example: nnx bench best --batch 1,32 --compile
    """
    import json

    from nnx.benchmarking import benchmark_run
    from nnx.cli.screen import table
    from nnx.params import CompileSpec
    from nnx.store.pointer import resolve_run_id

    root = use_runs(runs)
    found = benchmark_run(
        resolve_run_id(run, root), checkpoint=checkpoint, batch_sizes=_sizes("batch", batch),
        shape=None if shape is None else _sizes("shape", shape), repeats=repeats,
        compile=CompileSpec() if compiled else None, root=root,
    )  # fmt: skip
    if as_json:
        print(json.dumps(found.state(), indent=1))
        return
    rows = []
    for report in (*found.eager, *found.compiled):
        interval = report.median_interval()
        shown = "too few calls" if interval is None else f"{_ms(interval[0])} - {_ms(interval[1])}"
        memory = report.peak_memory_bytes
        rows.append(
            [
                report.label, _ms(report.first_call_seconds), _ms(report.median_seconds), shown,
                f"{report.throughput:.0f}", "-" if memory is None else f"{memory / 2**20:.1f} MiB",
            ]
        )  # fmt: skip
    header = ["forward", "first call", "median", "95 % interval", "samples/s", "peak memory"]
    table(header, rows, right=header[1:])
    costs = sorted(found.layers, key=lambda cost: -cost.seconds)[:12]
    table(
        ["layer", "kind", "median", "FLOPs"],
        [[cost.name, cost.kind, _ms(cost.seconds), f"{cost.flops:,}"] for cost in costs],
        right=["median", "FLOPs"],
    )
    print(
        f"{found.n_parameters:,} parameters ({found.parameter_bytes / 2**20:.2f} MiB), "
        f"{found.flops:,} FLOPs for the largest batch, on {found.eager[0].device}"
    )


def _sizes(name: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--{name} takes integers with commas, not {text!r}") from None


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
