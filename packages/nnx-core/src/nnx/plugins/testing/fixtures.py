"""Fixtures of pytest: ``from nnx.plugins.testing.fixtures import *`` in ``conftest.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

try:
    import pytest
except ImportError as error:
    from nnx.plugins.siblings import install_line

    raise ImportError(f"the fixtures need pytest: {install_line('nnx-core', 'testing')}") from error

from nnx.plugins import manager
from nnx.plugins.testing.training import tiny_training

__all__ = ["nnx_plugins", "nnx_runs", "nnx_training"]


@pytest.fixture
def nnx_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory; the folder of its runs, as ``$NNX_RUNS`` names it."""
    runs = tmp_path / "runs"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NNX_RUNS", str(runs))
    monkeypatch.setenv("NNX_TQDM_DISABLE", "1")
    return runs


@pytest.fixture
def nnx_training(nnx_runs: Path) -> Callable[..., tuple[Any, Any]]:
    """:func:`nnx.plugins.testing.tiny_training`, with its runs in a folder of the test."""
    return tiny_training


@pytest.fixture
def nnx_plugins() -> Iterator[manager.PluginManager]:
    """The process's plugin manager; what the test registers or removes is undone."""
    plugins = manager.default()
    with plugins.restored():
        yield plugins
