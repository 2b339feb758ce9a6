"""The command as a person runs it: in a directory, as a process or within this one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Outcome:
    """What a command did."""

    returncode: int
    stdout: str
    stderr: str


Nnx = Callable[..., Outcome]


@pytest.fixture
def nnx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nnx:
    """Run ``nnx`` with arguments in ``tmp_path``, in this process: torch is loaded once."""
    from nnx.cli.app import build
    from typer.testing import CliRunner

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("NNX_RUNS", "NNX_TQDM_DISABLE"):  # commands set them; they are put back
        monkeypatch.setenv(name, "")

    def nnx(*arguments: str) -> Outcome:
        os.environ["NNX_RUNS"] = os.environ["NNX_TQDM_DISABLE"] = ""
        result = CliRunner().invoke(build(), arguments, catch_exceptions=True)
        # What a terminal reads never tells it to pass an argument of Python.
        assert not re.search(r"\b[a-z_]+=(True|False|None|\W|$)", result.stderr), result.stderr
        return Outcome(result.exit_code, result.stdout, result.stderr)

    return nnx


@pytest.fixture
def process(tmp_path: Path) -> Nnx:
    """Run ``nnx`` with arguments in ``tmp_path``, as a process."""

    def process(*arguments: str, **environment: str) -> Outcome:
        done = subprocess.run(
            [sys.executable, "-m", "nnx", *arguments],
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "120", "OMP_NUM_THREADS": "1", **environment},
            text=True,
            capture_output=True,
            timeout=120,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    return process
