"""A run knows who provided its parts, so a place without the plugin can say what to install."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Install = Callable[..., None]
Run = Callable[..., subprocess.CompletedProcess[str]]

PLUGIN = """
    from nnx.plugins import hookimpl

    @hookimpl
    def nnx_optimizer_factories():
        return {("acme.plain", 1): "acme_plain:build"}

    def build(groups, config):
        import torch
        return torch.optim.SGD(groups, momentum=0.9)
"""
TRAIN = """
    from nnx import NNOptimFactoryParams, NNRun, OptimizerFactorySpec
    from nnx.plugins.testing import tiny_training
    factory = OptimizerFactorySpec("acme.plain", 1)
    optim = NNOptimFactoryParams(factory=factory, max_lr=0.01)
    model, params = tiny_training(n_epochs=1, optim=optim, **{resume})
    print("id", model.train(params, salt="{salt}").id)
"""


def train(run: Run, *, plugins: str = "", salt: str = "whole", **resume: str):
    return run(TRAIN.replace("{resume}", repr(resume)).replace("{salt}", salt), plugins=plugins)


def test_a_run_loads_and_prints_without_its_plugin_and_a_resume_says_what_to_install(
    install: Install, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NNX_RUNS", str(tmp_path / "runs"))
    install("acme-plain", PLUGIN)
    trained = train(run)
    assert trained.returncode == 0, trained.stderr
    id = re.search(r"id (\w+)", trained.stdout).group(1)
    metadata = (tmp_path / "runs" / id / "metadata.yaml").read_text()
    assert "optimizer factory acme.plain@v1: acme-plain 1.2.3" in metadata.replace("'", "")

    shown = run("show", id, plugins="-acme-plain")
    assert shown.returncode == 0, shown.stderr
    assert "acme.plain@v1" in shown.stdout

    refused = train(run, plugins="-acme-plain", salt="more", resume_from_run_id=id)
    assert refused.returncode == 1
    last = refused.stderr.strip().splitlines()[-1]
    assert (
        f"MissingOptimizerFactoryError: no optimizer factory is registered as acme.plain@v1. "
        f"Run {id} used it from acme-plain 1.2.3. "
        'Install it with: pip install "acme-plain==1.2.3"'
    ) in last
    there = {path.parent.name for path in (tmp_path / "runs").glob("*/run.yaml")}
    assert there - {"best"} == {id}
    assert train(run, salt="more", resume_from_run_id=id).returncode == 0
