"""Where runs lie."""

from __future__ import annotations

from pathlib import Path

import pytest
from nnx.store.paths import runs_root


def test_the_runs_folder_is_the_given_one_then_the_environment_s_then_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("NNX_RUNS", raising=False)
    assert runs_root() == "runs"
    monkeypatch.setenv("NNX_RUNS", "elsewhere")
    assert runs_root() == "elsewhere"
    assert runs_root(tmp_path) == str(tmp_path)
