"""Shows: what a plugin contributes is used by name, and a stored run names it without its code."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

# A distribution as pip would leave it: a module, and metadata with the entry point.
Path("acme_mini.py").write_text(
    textwrap.dedent("""
        from nnx.plugins import hookimpl

        @hookimpl
        def nnx_optimizer_factories():
            return {("acme.plain", 1): "acme_mini:build"}

        def build(param_groups, config):
            import torch
            return torch.optim.SGD(param_groups, momentum=config["momentum"])
    """),
    encoding="utf-8",
)
info = Path("acme_mini-1.0.dist-info")
info.mkdir()
(info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-mini\nVersion: 1.0\n")
(info / "entry_points.txt").write_text("[nnx]\nacme-mini = acme_mini\n")
sys.path.insert(0, str(Path.cwd()))

from nnx import NNOptimFactoryParams, NNRun, OptimizerFactorySpec  # noqa: E402
from nnx.plugins.testing import check_plugin, tiny_training  # noqa: E402

spec = OptimizerFactorySpec("acme.plain", 1, {"momentum": 0.9})
model, params = tiny_training(optim=NNOptimFactoryParams(factory=spec, max_lr=0.05))
run = model.train(params)
assert NNRun.load(run.id).train.optim.factory == spec
stored = Path("runs", run.id, "run.yaml").read_text(encoding="utf-8")
assert "acme.plain" in stored
assert "momentum" in stored

import os  # noqa: E402

os.environ["PYTHONPATH"] = str(Path.cwd())
check_plugin("acme-mini", prefix="acme.", configs={"acme.plain": {"momentum": 0.9}}).check()

# A process without the plugin still loads and prints the run.
without = {**os.environ, "NNX_PLUGINS": "-acme-mini"}
show = [sys.executable, "-m", "nnx", "show", run.id]
shown = subprocess.run(show, env=without, text=True, capture_output=True)
assert shown.returncode == 0, shown.stderr
assert "acme.plain@v1" in shown.stdout
print("trained with acme.plain@v1, conforms, and is shown without the plugin")
