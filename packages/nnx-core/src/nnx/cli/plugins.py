"""``nnx plugins``: what joined, from where, with what, and what failed."""

from __future__ import annotations

from typing import Annotated

import typer

from nnx.plugins import manager


def plugins(
    timing: Annotated[
        bool, typer.Option("--timing", help="Add load times and heavy imports.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the plugins and what they contribute.

    Exits with 1 when one failed to load.
    """
    loaded = manager.default().plugins
    if as_json:
        import json
        from dataclasses import asdict

        print(json.dumps([asdict(plugin) for plugin in loaded], indent=2))
    else:
        _table(loaded, timing=timing)
    if any(plugin.status == "failed" for plugin in loaded):
        raise typer.Exit(1)


def _table(loaded: list[manager.LoadedPlugin], *, timing: bool) -> None:
    from nnx.cli.screen import console, table

    if not loaded:
        console().print("no plugin is installed")
        return
    columns = ["plugin", "from", "status", "contributes"]
    columns += ["ms", "imported at load"] if timing else []
    rows = []
    for plugin in loaded:
        counts = (f"{len(names)} {kind}" for kind, names in plugin.contributes.items())
        row = [
            plugin.name,
            f"{plugin.distribution} {plugin.version}",
            plugin.status,
            plugin.error or ", ".join(counts) or "-",
        ]
        if timing:
            row += [f"{plugin.seconds * 1000:.1f}", ", ".join(plugin.heavy_modules) or "-"]
        rows.append(row)
    table(columns, rows, right=["ms"], fold=["contributes", "imported at load"])
