"""The frame of the command: help, versions, errors, speed."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from nnx.cli.app import COMMANDS, explain

Nnx = Callable[..., subprocess.CompletedProcess[str]]


def test_help_names_every_command_with_a_line_of_what_it_does(nnx: Nnx) -> None:
    result = nnx("--help")
    assert result.returncode == 0
    rows = {line.split()[0]: line for line in result.stdout.splitlines() if line.startswith("  ")}
    for command in COMMANDS:
        assert len(rows[command].split()) > 3, command


def test_version(nnx: Nnx) -> None:
    import nnx as package

    assert nnx("--version").stdout == f"nnx {package.__version__}\n"


def test_a_misspelt_command_exits_with_two_and_names_the_near_one(nnx: Nnx) -> None:
    result = nnx("plugin")
    assert result.returncode == 2
    assert "No such command 'plugin'" in result.stderr
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


def loaded_modules(tmp_path: Path, *arguments: str) -> set[str]:
    code = (
        "import sys, atexit\n"
        "sys.argv[0] = 'nnx'\n"
        "atexit.register(lambda: print('\\n'.join(sys.modules), file=open('modules', 'w')))\n"
        "from nnx.cli import main\n"
        "main()\n"
    )
    subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, check=False
    )
    return set((tmp_path / "modules").read_text().split())


@pytest.mark.parametrize("arguments", [["plugins"], ["--help"], ["--version"]], ids=" ".join)
def test_a_listing_command_loads_no_torch(tmp_path: Path, arguments: list[str]) -> None:
    loaded = loaded_modules(tmp_path, *arguments)
    assert "nnx.cli.app" in loaded
    assert not loaded & {"torch", "numpy", "pandas"}


@pytest.mark.alone
@pytest.mark.parametrize("arguments", [["plugins"]], ids=" ".join)
def test_a_listing_command_answers_within_0_6_seconds(tmp_path: Path, arguments: list[str]) -> None:
    # Processor time, which is what it takes on a machine that does nothing else.
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "nnx", *arguments]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times) <= 0.6


def test_doctor_shows_versions_devices_precision_and_what_is_missing(nnx: Nnx) -> None:
    import torch

    result = nnx("doctor", NNX_PLUGINS="none")
    assert result.returncode == 0, result.stderr
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    for title in ("versions", "devices", "precision", "optional parts", "plugins"):
        assert title in lines
    words = {tuple(line.split()[:2]) for line in lines if len(line.split()) > 1}
    assert ("torch", torch.__version__) in words
    assert any(line.split()[:4] == ["bf16", "on", "cpu", "supported"] for line in lines)
    found = json.loads(nnx("doctor", "--json").stdout)
    assert found["versions"]["torch"] == torch.__version__
    for part, state in found["optional parts"].items():
        if state.startswith("missing"):
            assert f'pip install "{part}"' in state
