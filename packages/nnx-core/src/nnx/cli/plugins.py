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
    columns = ["plugin", "distribution", "status", "ms", "from", "contributes"]
    columns += ["imported at load"] if timing else []
    rows = []
    for plugin in loaded:
        counts = (_count(len(names), kind) for kind, names in plugin.contributes.items())
        row = [
            plugin.name,
            f"{plugin.distribution} {plugin.version}",
            plugin.status,
            f"{plugin.seconds * 1000:.1f}",
            _short(plugin.location) if plugin.location else plugin.reference,
            plugin.error or ", ".join(counts) or "-",
        ]
        if timing:
            row.append(", ".join(plugin.heavy_modules) or "-")
        rows.append(row)
    wrapped = ["from", "contributes", "imported at load"]
    table(columns, rows, right=["ms"], fold=wrapped)
    heavy = [plugin for plugin in loaded if timing and plugin.heavy_modules]
    for plugin in heavy:
        console().print(
            f"{plugin.owner} makes every `import nnx` import "
            f"{', '.join(plugin.heavy_modules)}: its {plugin.reference} should only name what "
            "it contributes, as 'package.module:attribute'.",
            soft_wrap=True,
        )


def _count(n: int, kind: str) -> str:
    plurals = {"optimizer factory": "optimizer factories", "model factory": "model factories"}
    return f"{n} {kind if n == 1 else plurals.get(kind, kind + 's')}"


def _short(path: str) -> str:
    """A path from the working directory or the home folder, where that is shorter."""
    import os

    for base, shown in ((os.getcwd(), ""), (os.path.expanduser("~"), "~" + os.sep)):
        if path.startswith(base + os.sep) and len(base) > 1:
            return shown + path[len(base) + 1 :]
    return path
