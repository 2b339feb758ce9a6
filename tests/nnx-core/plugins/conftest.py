"""Real distributions on a real path, seen by a real interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

Install = Callable[..., None]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def install(tmp_path: Path) -> Install:
    """Install a distribution of one module that is an NNx plugin."""

    def install(
        distribution: str, source: str, *, plugin: str | None = None, version: str = "1.2.3"
    ) -> None:
        module = distribution.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(source))
        info = tmp_path / f"{module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        )
        (info / "entry_points.txt").write_text(f"[nnx]\n{plugin or distribution} = {module}\n")

    return install


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run Python code, or ``nnx`` arguments, with the installed plugins."""

    def run(*command: str, plugins: str = "") -> subprocess.CompletedProcess[str]:
        if len(command) == 1 and "\n" in command[0]:
            command = ("-c", textwrap.dedent(command[0]))
        else:
            command = ("-m", "nnx", *command)
        path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, "PYTHONPATH": path, "NNX_PLUGINS": plugins, "COLUMNS": "320"}
        return subprocess.run(
            [sys.executable, *command], env=env, text=True, capture_output=True, timeout=120
        )

    return run
