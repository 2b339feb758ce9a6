"""Which modules import each other in a circle: imports in functions and for types count too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import networkx

ROOT = Path(__file__).resolve().parents[2]

# What may stay in a circle, and why. A group that is untied goes from this list.
BENIGN = {
    ("nnx.params.net", "nnx.params.transformer"): "a base class rebuilds the subclass that wrote "
    "a state",
    ("nnx.params.precision", "nnx.precision"): "a policy says in its annotation what it resolves "
    "to on a device, where torch may be loaded",
    ("nnx.store.checkpoint", "nnx.store.points"): "a value and what loads it",
}


def sources() -> dict[str, Path]:
    found = {}
    for file in ROOT.glob("packages/*/src/nnx/**/*.py"):
        parts = file.with_suffix("").parts
        parts = parts[len(parts) - parts[::-1].index("src") :]
        found[".".join(parts).removesuffix(".__init__")] = file
    return found


def imports(module: str, file: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules that a file names anywhere, its own aside."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else node.module for name in inside]
        yield from (name for name in names if name in known and name != module)


def test_no_modules_import_each_other_but_those_that_are_listed() -> None:
    known = sources()
    graph = networkx.DiGraph((m, name) for m, f in known.items() for name in imports(m, f, known))
    groups = networkx.strongly_connected_components(graph)
    assert {tuple(sorted(group)) for group in groups if len(group) > 1} == BENIGN.keys()
