"""The diagrams of the architecture page say what the code does."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

import grimp
import nnx
import pytest
from nnx.plugins import hookspecs, manager

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
DIAGRAMS = re.findall(r"^```mermaid\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
NODE = re.compile(r'(\w+)\["([^"]+)"\]')
EDGE = re.compile(r'(\w+)(?:\["[^"]+"\])? (-->|-\.->)(?:\|[^|]*\|)? (\w+)')


@cache
def imports() -> grimp.ImportGraph:
    return grimp.build_graph("nnx", exclude_type_checking_imports=True, cache_dir=None)


def layers() -> list[list[str]]:
    """The rooms of core from top to bottom, as the import-linter contract lists them."""
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (rooms,) = contract["tool"]["importlinter"]["contracts"]
    return [[r.strip(" ()") for r in tier.split(":")] for tier in rooms["layers"]]


def test_the_rooms_are_those_of_the_contract() -> None:
    shown = [label.split(", ") for _, label in NODE.findall(DIAGRAMS[0])]
    extensions, *core = layers()
    assert shown[0] == ["the extensions"]
    assert shown[1:] == core
    arrows = [(a, b) for a, _, b in EDGE.findall(DIAGRAMS[0])]
    assert arrows == [(f"tier{n}", f"tier{n + 1}") for n in range(len(core))]
    assert extensions


def test_every_room_of_core_is_in_the_contract() -> None:
    rooms = {m.split(".")[1] for m in imports().modules if m.count(".") == 1}
    private = {room for room in rooms if room.startswith("_")}
    assert rooms - private <= {room for tier in layers() for room in tier}


@pytest.mark.parametrize("diagram", DIAGRAMS[1:], ids=["batch", "file", "doors"])
def test_an_arrow_of_a_diagram_is_an_import(diagram: str) -> None:
    labels = dict(NODE.findall(diagram))
    edges = EDGE.findall(diagram)
    assert len(edges) >= 6
    unknown = [m for m in labels.values() if f"nnx.{m}" not in imports().modules]
    assert [m for m in unknown if not m.startswith(("your ", "<i>"))] == []

    def follows(above: str, below: str) -> bool:
        """Directly, or through a module of the room that ``below`` is in."""
        importer, imported = f"nnx.{above}", f"nnx.{below}"
        direct = imports().find_modules_directly_imported_by(importer)
        room = imported.rpartition(".")[0]
        return imported in direct or (room.count(".") == 1 and room in direct)

    wrong = [
        f"{labels[a]} --> {labels[b]}"
        for a, arrow, b in edges
        if arrow == "-->" and not follows(labels[a], labels[b])
    ]
    assert wrong == []


def test_the_doors_are_the_hooks_and_their_registries() -> None:
    table = dict(re.findall(r"^\| `(nnx_\w+)` \| ([a-z ]+) \|", PAGE, re.MULTILINE))
    assert table.pop("nnx_public_names") == "public names"
    assert table == manager._HOOKS
    assert all(hasattr(hookspecs, hook) for hook in table)


def test_modules_and_files_that_the_page_names_exist() -> None:
    named = set(re.findall(r"`nnx\.([a-z_.]+)`", PAGE))
    packages = [Path(entry) for entry in nnx.__path__]
    missing = [
        name
        for name in named
        if not any(
            (p / Path(*name.split("."))).with_suffix(".py").exists()
            or (p / Path(*name.split("."))).is_dir()
            for p in packages
        )
    ]
    assert missing == []
