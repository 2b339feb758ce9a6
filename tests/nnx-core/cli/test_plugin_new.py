"""``nnx plugin new``: what it writes works as it stands; a bad name leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from nnx.cli.plugin_new import Project

PARTS = ("model", "optimizer", "objective", "metric", "exporter", "command")


def new(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nnx", "plugin", "new", *arguments],
        cwd=folder, text=True, capture_output=True, timeout=120,
    )  # fmt: skip


def environment(folder: Path) -> Path:
    """A new environment that sees the libraries of this one; its interpreter."""
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    seen = [path for path in sys.path if path and os.path.isdir(path)]
    (site / "zz_seen.pth").write_text("\n".join(seen), encoding="utf-8")
    return folder / "bin" / "python"


def install(python: Path, project: Path) -> None:
    """Editable, from this machine alone."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps",
         "--no-index", "--no-build-isolation", "-e", str(project)],
        text=True, capture_output=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def run_tests(python: Path, project: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=project, text=True, capture_output=True, timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.slow  # a whole project is generated, installed and tested, in real processes
def test_a_generated_project_passes_its_own_tests(tmp_path: Path) -> None:
    done = new(tmp_path, "acme-demo", "--optimizer", "signs", "--command", "demo-weights")
    assert (done.returncode, done.stderr) == (0, "")
    project = tmp_path / "acme-demo"
    python = environment(tmp_path / "env")
    install(python, project)
    tested = run_tests(python, project)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert "11 passed" in tested.stdout
    shown = subprocess.run(
        [str(python), "-m", "nnx", "plugins", "--json"], text=True, capture_output=True
    ).stdout
    for id in ("acme.encoder@v1", "acme.signs@v1", "acme.focal@v1", "acme.kappa@v1", "acme.npz",
               "demo-weights"):  # fmt: skip
        assert f'"{id}"' in shown


def test_parts_are_chosen_and_named_and_nothing_else_is_written(tmp_path: Path) -> None:
    others = [option for part in PARTS if part != "metric" for option in (f"--{part}", "none")]
    done = new(tmp_path, "zoo.agreement", "--namespace", "wild", "--metric", "kappa2", *others)
    assert done.returncode == 0, done.stderr
    project = tmp_path / "zoo.agreement"
    written = sorted(str(f.relative_to(project)) for f in project.rglob("*") if f.is_file())
    assert written == [
        ".gitignore",
        "README.md",
        "pyproject.toml",
        "src/zoo_agreement/__init__.py",
        "src/zoo_agreement/metric.py",
        "src/zoo_agreement/plugin.py",
        "src/zoo_agreement/py.typed",
        "tests/conftest.py",
        "tests/test_metric.py",
        "tests/test_plugin.py",
    ]
    plugin = (project / "src/zoo_agreement/plugin.py").read_text()
    assert 'return {("wild.kappa2", 1): "zoo_agreement.metric:DEFINITION"}' in plugin
    assert plugin.count("@hookimpl") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["zoo.agreement"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["9lives"], "'9lives' is no name for a distribution: it is letters and digits"),
        (["a/b"], "'a/b' is no name for a distribution"),
        (["nnx-lion"], "'nnx-lion' reads as a part of NNx itself; begin with a name of your own, "
                       "for example 'acme-lion'"),
        (["json"], "'json' cannot be imported as a module of yours: Python has its own"),
        (["class"], "'class' cannot be imported as a module of yours"),
        (["torch"], "a module 'torch' is installed already; choose another name"),
        (["acme", "--namespace", "nnx"], "the namespace 'nnx' belongs to NNx"),
        (["acme", "--namespace", "A B"], "'A B' is no name for the namespace"),
        (["acme", "--metric", "Kappa"], "'Kappa' is no name for the metric"),
        (["acme", "--command", "train"], "`nnx train` is taken by NNx; choose another --command"),
        (["acme", *(o for p in PARTS for o in (f"--{p}", "none"))], "every part is 'none'"),
        (["acme", "--folder", "nowhere"], "there is no folder nowhere; make it"),
    ],
)  # fmt: skip
def test_a_bad_name_is_refused_with_the_reason_and_leaves_nothing(
    tmp_path: Path, arguments: list[str], reason: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from nnx.cli.app import build

    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        build()(["plugin", "new", *arguments])
    assert left.value.code == 1
    assert capsys.readouterr().err.startswith(f"nnx: {reason}")
    assert list(tmp_path.iterdir()) == []


def test_a_project_that_is_there_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "acme-demo").mkdir()
    (tmp_path / "acme-demo" / "mine.txt").write_text("mine")
    done = new(tmp_path, "acme-demo")
    assert done.returncode == 1
    assert done.stderr == ("nnx: acme-demo is already there; choose another name or --folder\n")
    assert [p.name for p in (tmp_path / "acme-demo").iterdir()] == ["mine.txt"]
    assert [p.name for p in tmp_path.iterdir()] == ["acme-demo"]


def test_a_failure_in_the_middle_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = Project.checked("acme-demo", namespace=None, names={"metric": "kappa"})
    monkeypatch.setattr(Project, "files", lambda self: {"README.md": "text", "src": None})
    with pytest.raises(TypeError):
        project.write(tmp_path)
    assert list(tmp_path.iterdir()) == []
