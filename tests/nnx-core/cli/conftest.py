"""The command as a person runs it: a process in a directory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Nnx = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def nnx(tmp_path: Path) -> Nnx:
    """Run ``nnx`` with arguments in ``tmp_path``."""

    def nnx(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "nnx", *arguments],
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "120", "OMP_NUM_THREADS": "1", **environment},
            text=True,
            capture_output=True,
            timeout=120,
        )

    return nnx
