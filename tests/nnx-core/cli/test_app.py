"""The frame of the command: help, versions, errors, speed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from nnx.cli.app import COMMANDS, explain
from nnx.plugins import siblings

Nnx = Callable[..., subprocess.CompletedProcess[str]]


def test_help_names_every_command_with_a_line_of_what_it_does(nnx: Nnx) -> None:
    result = nnx("--help")
    assert result.returncode == 0
    rows = {line.split()[0]: line for line in result.stdout.splitlines() if line.startswith("  ")}
    for command in COMMANDS:
        assert len(rows[command].split()) > 3, command


def test_version(process: Nnx) -> None:
    import nnx as package

    assert process("--version").stdout == f"nnx {package.__version__}\n"


def test_a_misspelt_command_exits_with_two_and_names_the_near_one(process: Nnx) -> None:
    result = process("plugns")
    assert result.returncode == 2
    assert "No such command 'plugns'" in result.stderr
    assert "'plugins'" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("seed must be >= 0"), "seed must be >= 0"),
        (KeyError("no such key"), "no such key"),
        (PermissionError(13, "Permission denied", "/x/runs"), "/x/runs: Permission denied"),
        (ZeroDivisionError("division"), "ZeroDivisionError: division (`nnx --debug ...` shows"),
        (ValueError(), "ValueError: "),
    ],
)
def test_an_error_is_one_message(error: Exception, message: str) -> None:
    assert explain(error).startswith(message)


LISTINGS = (["plugins"], ["runs"], ["show", "best"])


@pytest.fixture
def listed(tmp_path: Path, nnx: Nnx) -> Path:
    """A folder with a run."""
    (tmp_path / "data.csv").write_text("x,y\n" + "".join(f"{n},{n % 2}\n" for n in range(20)))
    trained = nnx("train", "data.csv", "--target", "y", "--epochs", "2", "--quiet")
    assert trained.returncode == 0, trained.stderr
    return tmp_path


@pytest.mark.parametrize("arguments", [*LISTINGS, ["--help"]], ids=" ".join)
def test_a_listing_command_loads_no_torch(listed: Path, arguments: list[str]) -> None:
    code = (
        "import sys, atexit\n"
        "atexit.register(lambda: print('\\n'.join(sys.modules), file=open('modules', 'w')))\n"
        "from nnx.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=listed, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    loaded = set((listed / "modules").read_text().split())
    assert "nnx.cli.app" in loaded
    assert not loaded & {"torch", "numpy", "pandas"}


def test_doctor_shows_versions_devices_precision_and_what_is_missing(process: Nnx) -> None:
    import torch

    result = process("doctor", NNX_PLUGINS="none")
    assert result.returncode == 0, result.stderr
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    for title in ("versions", "devices", "precision", "optional parts", "plugins"):
        assert title in lines
    words = {tuple(line.split()[:2]) for line in lines if len(line.split()) > 1}
    assert ("torch", torch.__version__) in words
    assert any(line.split()[:4] == ["bf16", "on", "cpu", "supported"] for line in lines)
    found = json.loads(process("doctor", "--json").stdout)
    assert found["versions"]["torch"] == torch.__version__
    for part, state in found["optional parts"].items():
        if state.startswith("missing"):
            distribution, _, extra = part.rstrip("]").partition("[")
            assert siblings.install_line(distribution, extra or None) in state
