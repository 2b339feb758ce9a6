"""What the documents show runs as it stands."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from nnx.errors import NNxError

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted(ROOT.glob("packages/*/README.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
]
VARIABLE = re.compile(r"\bNNX_[A-Z_]+\b")
BLOCK = re.compile(r"^```(?:python|py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def program(page: Path) -> str:
    """The Python blocks of a page as one program whose line numbers are the page's."""
    text = page.read_text(encoding="utf-8")
    lines = [""] * text.count("\n")
    for block in BLOCK.finditer(text):
        first = text.count("\n", 0, block.start(1))
        for offset, line in enumerate(block.group(1).splitlines()):
            lines[first + offset] = line
    return "\n".join(lines) + "\n"


RUNNABLE = [page for page in PAGES if program(page).strip()]


@pytest.mark.parametrize("page", RUNNABLE, ids=[str(p.relative_to(ROOT)) for p in RUNNABLE])
def test_the_python_of_a_page_runs_in_an_empty_directory(page: Path, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text(program(page), encoding="utf-8")
    work = tmp_path / "work"
    work.mkdir()
    # A command that ran in this process may have left its runs folder in the environment.
    env = {k: v for k, v in os.environ.items() if not k.startswith("NNX_")}
    env["OMP_NUM_THREADS"] = "1"
    result = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:nnx", str(script)],
        cwd=work, env=env, text=True, capture_output=True,
        timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, f"{page.relative_to(ROOT)}:\n{result.stderr}"


def test_the_quickstart_is_a_whole_training_in_twelve_lines() -> None:
    first = BLOCK.search((ROOT / "README.md").read_text(encoding="utf-8"))
    assert first is not None
    lines = [line for line in first.group(1).splitlines() if line.strip()]
    assert len(lines) <= 12
    assert "nnx.fit(" in first.group(1)


@pytest.mark.parametrize("page", PAGES, ids=[str(p.relative_to(ROOT)) for p in PAGES])
def test_links_between_files_of_the_repository_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    broken = [
        target
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
        if not re.match(r"[a-z]+:", target)
        and not (page.parent / target).exists()
        and not target.startswith(("api/", "../api/"))  # generated pages
    ]
    assert broken == []


def test_the_documents_name_no_machine_and_no_work_in_progress() -> None:
    words = re.compile(r"\b(?:TODO|FIXME|XXX)\b|/(?:home|root|work)/")
    found = [
        f"{page.relative_to(ROOT)}: {match.group()}"
        for page in PAGES
        for match in words.finditer(page.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_the_guide_names_every_environment_variable_of_the_sources() -> None:
    sources = ROOT.glob("packages/*/src/**/*.py")
    read = {name for path in sources for name in VARIABLE.findall(path.read_text(encoding="utf-8"))}
    page = (ROOT / "docs/guide/environment.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(NNX_\w+)` .*\| `([\w.]+)` \|$", page, re.MULTILINE)
    assert {name for name, _ in rows} == read
    for name, module in rows:
        found = importlib.util.find_spec(module)
        assert found is not None
        assert found.origin is not None
        assert name in Path(found.origin).read_text(encoding="utf-8")


def test_the_site_has_every_page_of_the_guide() -> None:
    listed = set(re.findall(r"^  - ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    pages = {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")}
    assert listed == {page for page in pages if not page.startswith("examples/")}


def test_the_tour_names_modules_and_functions_that_exist() -> None:
    page = (ROOT / "docs/tour.md").read_text(encoding="utf-8")
    named = re.findall(r"`(nnx(?:\.\w+)+)(?::([\w.]+))?`", page)
    assert len(named) > 40
    for module, path in named:
        value = importlib.import_module(module)
        for name in filter(None, path.split(".")):
            value = getattr(value, name)
            # The walk leads to where a thing is defined, not to a name that passes it on.
            assert getattr(value, "__module__", module) == module


def test_the_guide_of_errors_names_classes_with_the_bases_that_it_says() -> None:
    page = (ROOT / "docs/guide/errors.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(nnx[\w.]+)\.(\w+)` \| ([`\w, ]+) \|", page, re.MULTILINE)
    assert len(rows) > 10
    for module, name, bases in rows:
        error = getattr(importlib.import_module(module), name)
        assert issubclass(error, NNxError)
        known = {base.__name__ for base in error.__mro__}
        assert set(re.findall(r"\w+", bases)) <= known
