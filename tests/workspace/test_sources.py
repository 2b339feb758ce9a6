"""The sources of eight distributions make one package, and say what they need."""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {p.parent.name: p.parent for p in sorted(ROOT.glob("packages/*/pyproject.toml"))}
CORE = "nnx-core"

# Import name -> distribution name, where they differ.
DISTRIBUTIONS = {
    "mlflow": "mlflow-skinny",
    "faiss": "faiss-cpu",
    "importlib_metadata": "importlib-metadata",
    "lazy_loader": "lazy-loader",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}


def sources(package: str) -> list[Path]:
    return sorted((PACKAGES[package] / "src").rglob("*.py"))


def module_of(package: str, file: Path) -> str:
    parts = file.relative_to(PACKAGES[package] / "src").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def declared(package: str) -> tuple[set[str], set[str]]:
    """The names of what a distribution requires, and of that plus its extras."""
    table = tomllib.loads((PACKAGES[package] / "pyproject.toml").read_text())["project"]
    extras = [r for extra in table.get("optional-dependencies", {}).values() for r in extra]

    def names(requirements: list[str]) -> set[str]:
        return {normal(re.split(r"[\s<>=!~\[;]", r, maxsplit=1)[0]) for r in requirements}

    required = names(table["dependencies"])
    return required, required | names(extras)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def imports(file: Path) -> Iterator[tuple[str, bool, int]]:
    """Absolute imports as (module, runs at import, line); type-checking ones are skipped."""

    def walk(node: ast.AST, at_import: bool) -> Iterator[tuple[str, bool, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield alias.name, at_import, child.lineno
            elif isinstance(child, ast.ImportFrom) and not child.level:
                for alias in child.names:
                    yield f"{child.module}.{alias.name}", at_import, child.lineno
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Try))
            yield from walk(child, at_import and not inside)

    yield from walk(ast.parse(file.read_text(encoding="utf-8")), True)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_distribution_declares_every_library_that_it_imports(package: str) -> None:
    required, optional = declared(package)
    if package == CORE:
        # At a call, core may look for what a sibling brings, and name that sibling.
        optional |= {name for sibling in PACKAGES for name in declared(sibling)[1]}
    else:
        required |= declared(CORE)[0]
        optional |= declared(CORE)[1]
    undeclared = []
    for file in sources(package):
        for module, at_import, line in imports(file):
            top = module.split(".")[0]
            if top == "nnx" or top in sys.stdlib_module_names:
                continue
            name = normal(DISTRIBUTIONS.get(top, top))
            if name not in (required if at_import else optional):
                when = "at import" if at_import else "at a call"
                undeclared.append(f"{file.relative_to(ROOT)}:{line} imports {top} {when}")
    assert undeclared == []


def test_no_file_is_shipped_by_two_distributions() -> None:
    owners: dict[Path, list[str]] = defaultdict(list)
    for package, folder in PACKAGES.items():
        for file in (folder / "src").rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                owners[file.relative_to(folder / "src")].append(package)
    assert {str(f): o for f, o in owners.items() if len(o) > 1} == {}


@pytest.mark.parametrize("package", [p for p in PACKAGES if p != CORE])
def test_an_extension_imports_only_core_and_itself(package: str) -> None:
    owned = {module_of(p, f): p for p in PACKAGES for f in sources(p)}

    def owner(module: str) -> str | None:
        parts = module.split(".")
        return next((owned[m] for n in range(len(parts), 1, -1)
                     if (m := ".".join(parts[:n])) in owned), CORE)  # fmt: skip

    crossing = [
        f"{file.relative_to(ROOT)}:{line} imports {module} of {owner(module)}"
        for file in sources(package)
        for module, _, line in imports(file)
        if module.split(".")[0] == "nnx" and owner(module) not in (CORE, package)
    ]
    assert crossing == []


def test_core_imports_no_extension() -> None:
    extensions = {module_of(p, f) for p in PACKAGES if p != CORE for f in sources(p)}
    crossing = [
        f"{file.relative_to(ROOT)}:{line} imports {module}"
        for file in sources(CORE)
        for module, _, line in imports(file)
        if module in extensions or module.rpartition(".")[0] in extensions
    ]
    assert crossing == []


def test_all_distributions_have_one_version_and_pin_their_siblings_to_it() -> None:
    versions = set()
    for folder in PACKAGES.values():
        text = (folder / "pyproject.toml").read_text()
        versions.add(tomllib.loads(text)["project"]["version"])
        versions.update(re.findall(r'"nnx-[a-z]+==([^"]+)"', text))
        assert not re.search(r'"nnx-[a-z]+(?!==)[<>~!]', text)
    version_file = PACKAGES[CORE] / "src" / "nnx" / "_version.py"
    versions.update(re.findall(r'__version__ = "([^"]+)"', version_file.read_text()))
    assert len(versions) == 1


def test_every_distribution_has_a_readme_and_is_typed() -> None:
    for name, folder in PACKAGES.items():
        assert (folder / "README.md").read_text().startswith(f"# {name}\n")
    assert (PACKAGES[CORE] / "src" / "nnx" / "py.typed").exists()


def test_core_warns_through_the_one_place_that_finds_the_caller() -> None:
    """``stacklevel`` counts frames that move with every refactoring."""
    direct = re.compile(r"\bwarnings\.warn\(")
    called = [file for file in sources(CORE) if "cli" not in file.parts]  # a command has no caller
    found = [file.name for file in called if direct.search(file.read_text(encoding="utf-8"))]
    assert found == ["caller.py"]


def test_no_room_below_the_facades_names_one() -> None:
    facades = re.compile(
        r"^\s*(from nnx\.(nn_model|trainer) import|from nnx import .*(NNModel|Trainer))", re.M
    )
    above = {"cli", "testing", "bundles", "fitting"}
    naming = {
        str(f.relative_to(PACKAGES[CORE]))
        for f in sources(CORE)
        if facades.search(f.read_text(encoding="utf-8")) and not above & set(f.parts)
    }
    assert {Path(name).name for name in naming} <= {"trainer.py"}
