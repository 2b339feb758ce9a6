"""A hook of mkdocs: one API page per public module, generated from its docstrings."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

TREE = Path(__file__).resolve().parent.parent / "build" / "merged"


def public_modules() -> Iterator[tuple[str, str]]:
    """Each public module with something to show, and the first line of its docstring."""
    for path in sorted((TREE / "nnx").rglob("*.py")):
        parts = path.relative_to(TREE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name == "nnx" or name.startswith("nnx.cli") or "._" in name:
            continue
        summary = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        yield name, " ".join(summary.partition("\n\n")[0].split())


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    pages = [{name: f"api/{name}.md"} for name, _ in public_modules()]
    config.nav = [*(config.nav or []), {"API": ["api/index.md", *pages]}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    lines = ["# API\n", "Every public module, from its docstrings.\n"]
    for name, summary in public_modules():
        lines.append(f"- [`{name}`]({name}.md): {summary}")
        page = f"# `{name}`\n\n::: {name}\n"
        files.append(File.generated(config, f"api/{name}.md", content=page))
    files.append(File.generated(config, "api/index.md", content="\n".join(lines) + "\n"))
    return files
