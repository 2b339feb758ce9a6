"""The sessions of the workspace. ``nox -l`` lists them.

Two environments are shared by almost everything and rebuilt only when what
they hold changes, so a warm session starts at once:

- ``.nox/libraries``: the third-party libraries of every distribution and the tools;
- ``.nox/workspace``: all distributions, editable, on top of those libraries.

``.nox/bench`` is such a workspace with the trainers that NNx is measured against.
``minimal``, ``isolation`` and ``plugin`` install built wheels into fresh environments;
``oldest`` and ``newest`` bring another Python or torch, which takes gigabytes.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PACKAGES = ROOT / "packages"
CORE = "nnx-core"
SIBLINGS = tuple(sorted(p.parent.name for p in PACKAGES.glob("*/pyproject.toml")))
EXTENSIONS = tuple(name for name in SIBLINGS if name != CORE)
CONSTRAINTS = ROOT / "constraints.txt"
# One thread per process: tests run two at a time, and sums come out in one order.
ENV = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "", "NNX_PLUGINS": ""}

nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "types", "layers", "tests"]
nox.options.reuse_existing_virtualenvs = True


# -- environments ---------------------------------------------------------------


@functools.cache
def project(name: str) -> dict:
    return nox.project.load_toml(PACKAGES / name / "pyproject.toml")


@functools.cache
def dependency_groups() -> dict[str, list[str]]:
    return nox.project.load_toml(ROOT / "pyproject.toml")["dependency-groups"]


def third_party() -> list[str]:
    """Every requirement that any distribution declares, and the workspace's tools."""
    apart = ("bench", "peers")
    shared = (items for name, items in dependency_groups().items() if name not in apart)
    wanted = {item for items in shared for item in items}
    for name in SIBLINGS:
        table = project(name)["project"]
        wanted.update(table["dependencies"])
        wanted.update(i for e in table.get("optional-dependencies", {}).values() for i in e)
    return sorted(w for w in wanted if not w.startswith(SIBLINGS))


def interpreter(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def fresh(session: nox.Session, folder: Path) -> Path:
    """An empty environment at ``folder``; its interpreter."""
    shutil.rmtree(folder, ignore_errors=True)
    session.run(sys.executable, "-m", "virtualenv", "--quiet", str(folder), external=True)
    return interpreter(folder)


def python_of(version: str) -> str:
    """An interpreter of ``version``, on the path or under pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [shutil.which(f"python{version}"), *pyenv.glob(f"versions/{version}*/bin/python")]
    for candidate in filter(None, found):
        shown = subprocess.run([candidate, "--version"], capture_output=True, text=True)
        if shown.returncode == 0:
            return str(candidate)
    raise FileNotFoundError(f"there is no Python {version}: install it, for example with pyenv")


def borrow(folder: Path, lender: Path) -> None:
    """Let ``folder`` import the libraries of ``lender`` (but see none of its editables)."""
    libraries = next(lender.glob("lib/python*/site-packages"), lender / "Lib/site-packages")
    own = next(folder.glob("lib/python*/site-packages"), folder / "Lib/site-packages")
    (own / "zz_libraries.pth").write_text(f"{libraries}\n", encoding="utf-8")


def is_current(folder: Path, parts: Iterable[str]) -> tuple[Path, str, bool]:
    """The stamp of an environment, what it should say, and whether it says so."""
    text = "\n".join([sys.version, str(folder), *parts])
    stamp, digest = folder / "stamp", hashlib.sha256(text.encode()).hexdigest()
    return stamp, digest, stamp.exists() and stamp.read_text(encoding="utf-8") == digest


def libraries(session: nox.Session) -> Path:
    folder = ROOT / ".nox" / "libraries"
    wanted = third_party()
    stamp, digest, current = is_current(folder, [CONSTRAINTS.read_text(), *wanted])
    if not current:
        python = fresh(session, folder)
        session.run(
            str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
            "-c", str(CONSTRAINTS), *wanted, external=True,
        )  # fmt: skip
        stamp.write_text(digest, encoding="utf-8")
    return folder


def pip(session: nox.Session, python: Path, *arguments: str) -> None:
    """Install our own distributions into an environment, from this tree only."""
    installer = interpreter(libraries(session))
    session.run(
        str(installer), "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps",
        "--no-index", "--disable-pip-version-check", *arguments, external=True,
    )  # fmt: skip


def workspace(session: nox.Session, name: str = "workspace", extra: Iterable[str] = ()) -> str:
    """The interpreter that sees every distribution, editable, and the libraries in ``extra``."""
    shared = libraries(session)
    folder = ROOT / ".nox" / name
    texts = [(PACKAGES / name / "pyproject.toml").read_text(encoding="utf-8") for name in SIBLINGS]
    stamp, digest, current = is_current(folder, [(shared / "stamp").read_text(), *texts, *extra])
    if not current:
        python = fresh(session, folder)
        borrow(folder, shared)
        editable = [x for name in SIBLINGS for x in ("-e", str(PACKAGES / name))]
        pip(session, python, "--no-build-isolation", *editable)
        if extra:  # what the shared libraries satisfy is not installed again
            session.run(
                str(interpreter(shared)), "-m", "pip", "--python", str(python), "install",
                "--quiet", "--disable-pip-version-check", "-c", str(CONSTRAINTS), *extra,
                external=True,
            )  # fmt: skip
        stamp.write_text(digest, encoding="utf-8")
    return str(interpreter(folder))


@functools.cache
def wheels() -> Path:
    """Where the wheels go; see :func:`build_wheels`."""
    return ROOT / "build" / "wheels"


_built: list[Path] = []


def build_wheels(session: nox.Session) -> dict[str, Path]:
    """Build the wheel of every distribution, once per run of nox."""
    if not _built:
        shutil.rmtree(wheels(), ignore_errors=True)
        python = workspace(session)
        for name in SIBLINGS:
            with session.chdir(PACKAGES / name):
                session.run(
                    python, "-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels()),
                    external=True, silent=True,
                )  # fmt: skip
        _built.extend(sorted(wheels().glob("*.whl")))
    return {path.name.split("-")[0].replace("_", "-"): path for path in _built}


def merged(session: nox.Session, python: str) -> dict[str, str]:
    """One tree of all sources for static tools; the environment that finds it."""
    session.run(python, "tools/merged_tree.py", external=True, silent=True)
    tree = str(ROOT / "build" / "merged")
    return {"MYPYPATH": tree, "PYTHONPATH": tree}


# -- sessions -------------------------------------------------------------------


@nox.session
def demo(session: nox.Session) -> None:
    """Install everything and train, kill, resume and compare a real model."""
    options = session.posargs or ["--folder", "build/demo"]
    session.run(workspace(session), "-m", "nnx", "demo", *options, external=True)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests with all distributions installed; arguments go to pytest."""
    python = workspace(session)
    pytest = (python, "-m", "pytest")
    if session.posargs:
        session.run(*pytest, *session.posargs, env=ENV, external=True)
        return
    session.run(*pytest, "-n", "2", "--durations", "20", env=ENV, external=True)


@nox.session
def faults(session: nox.Session) -> None:
    """Fail or kill every disk operation of the store, and kill 300 real trainings (an hour)."""
    tests = ("test_faults.py", "test_kills.py", "test_kills_of_fits.py")
    paths = [f"tests/nnx-core/store/{name}" for name in tests]
    env = {**ENV, "NNX_THOROUGH": "1", "NNX_KILLS": os.environ.get("NNX_KILLS", "300")}
    session.run(
        workspace(session), "-m", "pytest", "-n", "2", "--timeout", "0", *paths, *session.posargs,
        env=env, external=True,
    )  # fmt: skip


@nox.session
def minimal(session: nox.Session) -> None:
    """Only nnx-core and what it declares, in a fresh environment."""
    wheel = build_wheels(session)[CORE]
    python = fresh(session, ROOT / ".nox" / "minimal")
    session.run(
        str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
        "-c", str(CONSTRAINTS), str(wheel), "pytest>=8", "pytest-timeout>=2.3", external=True,
    )  # fmt: skip
    session.run(str(python), "-m", "pip", "check", external=True)
    session.run(str(python), "-m", "pytest", "tests/minimal", env=ENV, external=True)


def with_versions(session: nox.Session, version: str, *pinned: str) -> None:
    """The tests of core and of peft with another Python and other libraries."""
    folder = ROOT / ".nox" / session.name
    shutil.rmtree(folder, ignore_errors=True)
    session.run(
        sys.executable, "-m", "virtualenv", "--quiet", "-p", python_of(version), str(folder),
        external=True,
    )  # fmt: skip
    groups = dependency_groups()
    extras = "demo,tabular,testing,tensorboard,wandb,data"
    session.run(
        str(interpreter(folder)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
        *pinned, *groups["tests"], *groups["oracles"],
        "-e", f"{PACKAGES / CORE}[{extras}]", "-e", f"{PACKAGES / 'nnx-peft'}[quantize]",
        external=True,
    )  # fmt: skip
    for tests in ("tests/nnx-core", "tests/nnx-peft"):
        pytest = (str(interpreter(folder)), "-m", "pytest", "-n", "2", tests)
        session.run(*pytest, *session.posargs, env=ENV, external=True)


@nox.session
def oldest(session: nox.Session) -> None:
    """Core and peft on the oldest Python and torch that are promised (a release step)."""
    with_versions(session, "3.10", "torch==2.4.*")


@nox.session
def newest(session: nox.Session) -> None:
    """Core and peft on the newest torch, and torchvision beside it (a release step)."""
    with_versions(session, "3.13", "torch", "torchvision")


@nox.session
def isolation(session: nox.Session) -> None:
    """Each extension as a wheel with only core beside it; names select some."""
    built = build_wheels(session)
    shared = libraries(session)
    for name in session.posargs or EXTENSIONS:
        folder = ROOT / ".nox" / f"isolation-{name}"
        python = fresh(session, folder)
        borrow(folder, shared)
        pip(session, python, str(built[CORE]), str(built[name]))
        session.run(str(python), "tools/check_isolated.py", name, env=ENV, external=True)
        if any((ROOT / "tests" / name).rglob("test_*.py")):
            pytest = (str(python), "-m", "pytest", "-n", "2", f"tests/{name}")
            session.run(*pytest, env=ENV, external=True)


@nox.session
def plugin(session: nox.Session) -> None:
    """The example plugin as a wheel with core beside it: trained with, shown without, resumed."""
    core = build_wheels(session)[CORE]
    source, target = ROOT / "docs" / "examples" / "plugin-lion", ROOT / "build" / "plugin"
    shutil.rmtree(target, ignore_errors=True)
    with session.chdir(source):
        session.run(
            workspace(session), "-m", "hatchling", "build", "-t", "wheel", "-d", str(target),
            external=True, silent=True,
        )  # fmt: skip
    (wheel,) = target.glob("*.whl")
    folder = ROOT / ".nox" / "plugin"
    python = fresh(session, folder)
    borrow(folder, libraries(session))
    pip(session, python, str(core), str(wheel))
    check = (str(python), str(ROOT / "tools" / "check_plugin.py"))
    runs = str(target / "runs")
    with session.chdir(source):
        session.run(str(python), "-m", "pytest", "-q", env=ENV, external=True)
    session.run(*check, "train", runs, env=ENV, external=True)
    remover = interpreter(libraries(session))
    session.run(
        str(remover), "-m", "pip", "--python", str(python), "uninstall", "--quiet", "--yes",
        "acme-lion", external=True,
    )  # fmt: skip
    session.run(*check, "without", runs, env=ENV, external=True)
    pip(session, python, str(wheel))
    session.run(*check, "resume", runs, env=ENV, external=True)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff: rules and formatting."""
    python = workspace(session)
    session.run(python, "-m", "ruff", "check", ".", external=True)
    session.run(python, "-m", "ruff", "format", "--check", ".", external=True)


@nox.session
def types(session: nox.Session) -> None:
    """mypy, strict, over all distributions as one tree."""
    python = workspace(session)
    env = merged(session, python)
    session.run(python, "-m", "mypy", "-p", "nnx", env=env, external=True)
    session.run(python, "-m", "mypy", "tests/workspace/typed_use.py", env=env, external=True)


@nox.session
def layers(session: nox.Session) -> None:
    """import-linter: an import only points down the rooms."""
    python = workspace(session)
    linter = "from importlinter.cli import lint_imports_command as run; run()"
    session.run(python, "-c", linter, env=merged(session, python), external=True)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation, strict; ``nox -s docs -- serve`` shows it live."""
    python = workspace(session)
    env = merged(session, python)
    command = session.posargs or ["build", "--strict", "--quiet"]
    session.run(python, "-m", "mkdocs", *command, env=env, external=True)


@nox.session
def bench(session: nox.Session) -> None:
    """Run tests/benchmarks and print one table; names select some."""
    python = workspace(session, "bench", dependency_groups()["bench"])
    session.run(python, "tests/benchmarks/run.py", *session.posargs, env=ENV, external=True)


@nox.session
def build(session: nox.Session) -> None:
    """Wheels and source distributions of everything, checked."""
    python = workspace(session)
    target = ROOT / "dist"
    shutil.rmtree(target, ignore_errors=True)
    for name in SIBLINGS:
        session.run(
            python, "-m", "build", "--no-isolation", "--outdir", str(target),
            str(PACKAGES / name), external=True, silent=True,
        )  # fmt: skip
    session.run(
        python, "-m", "twine", "check", "--strict", *map(str, sorted(target.iterdir())),
        external=True,
    )  # fmt: skip
