"""A run that uses a plugin: reloaded without it, and resumed with it, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from nnx.plugins import manager
from nnx.plugins.manager import registry
from nnx.plugins.testing.problems import Problems
from nnx.plugins.testing.training import tiny_training

Keys = Sequence[tuple[str, str, int]]


def check(
    plugin: manager.LoadedPlugin,
    keys: Keys,
    configs: Mapping[str, Mapping[str, Any]],
    batches: Mapping[str, tuple[Any, Any]],
) -> Problems:
    """Train what a run can name, reload it elsewhere, compare."""
    problems: Problems = []
    runs: dict[str, str] = {}
    for label, build in _trainings(keys, configs, batches):
        try:
            runs[label] = _check_resume(label, build, problems)
        except Exception as error:
            problems.append(f"a run with {label} fails: {type(error).__name__}: {error}")
    if runs:
        problems += _reloaded(runs, select=f"-{plugin.name}", how="without the plugin")
        problems += _reloaded(runs, select=plugin.name, how="with the plugin")
    return problems


def _trainings(
    keys: Keys,
    configs: Mapping[str, Mapping[str, Any]],
    batches: Mapping[str, tuple[Any, Any]],
) -> list[tuple[str, dict[str, Any]]]:
    """One training for each model factory and optimizer, and one for the metrics of each input."""
    import nnx

    found: list[tuple[str, dict[str, Any]]] = []
    metrics: dict[bool, list[Any]] = {}
    for kind, id, version in keys:
        config = configs.get(id, {})
        if kind == "model factory":
            spec = nnx.ModelSpec(id, version, config)
            found.append((f"{id}@v{version}", {"net": spec, "batch": batches.get(id)}))
        elif kind == "optimizer factory":
            factory = nnx.OptimizerFactorySpec(id, version, config)
            found.append(
                (
                    f"{id}@v{version}",
                    {"optim": nnx.NNOptimFactoryParams(factory=factory, max_lr=0.01)},
                )
            )
        elif kind == "metric":
            continuous = registry("metric").resolve(id, version).input == "continuous"
            metrics.setdefault(continuous, []).append(nnx.MetricSpec(id, version, config))
    for continuous, specs in metrics.items():
        label = ", ".join(spec.versioned_id for spec in specs)
        found.append((label, {"metrics": specs, "batch": _regression() if continuous else None}))
    return found


def _regression() -> tuple[Any, Any]:
    import torch

    X = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
    return X, X.sum(1, keepdim=True)


def _check_resume(label: str, build: dict[str, Any], problems: Problems) -> str:
    """Train whole, train in two parts, compare bit for bit; the id of the whole run."""
    import torch

    import nnx

    class StopAfterOne(nnx.Callback):
        def on_epoch_end(self, ctx: Any) -> None:
            ctx.should_stop = True

    model, params = tiny_training(**build, overwrite_existing=True)
    whole = model.train(params, salt="conformance, whole")
    half, params = tiny_training(**build, overwrite_existing=True)
    first = half.train(params, callbacks=[StopAfterOne()], salt="conformance, first part")
    rest, params = tiny_training(
        **build, overwrite_existing=True, resume_from_run_id=first.id, resume_epochs="planned"
    )
    rest.train(params, salt="conformance, second part")
    one, other = model.net.state_dict(), rest.net.state_dict()
    if any(not torch.equal(one[name], other[name]) for name in one):
        problems.append(
            f"a run with {label} that is resumed ends with other weights than one that is not: "
            "something it needs is not in its state_dict()"
        )
    return whole.id


def _reloaded(runs: Mapping[str, str], *, select: str, how: str) -> Problems:
    done = subprocess.run(
        [sys.executable, "-W", "error::nnx.plugins.manager.PluginWarning", "-c", _RELOAD],
        env={**os.environ, manager.SELECT_VARIABLE: select},
        input=json.dumps([dict(runs), not select.startswith("-")]),
        text=True,
        capture_output=True,
    )
    if done.returncode:
        return [f"a process {how} cannot reload its runs: {done.stderr.strip().splitlines()[-1]}"]
    return [f"{problem} {how}" for problem in json.loads(done.stdout.splitlines()[-1])]


_RELOAD = """
import json, socket, sys

def offline(*args, **kwargs):
    raise OSError("the conformance check allows no network")

socket.socket.connect = socket.create_connection = socket.getaddrinfo = offline
from nnx import Checkpoints, NNCheckpoint, NNModel, NNRun
runs, rebuild = json.load(sys.stdin)
problems = []
for label, id in runs.items():
    try:
        run = NNRun.load(id)
        assert run.id == id and len(run.idps) > 0 and id in str(run)
        if rebuild:
            NNModel.from_checkpoint(NNCheckpoint.load(id, Checkpoints.LAST))
    except Exception as error:
        problems.append(f"a run with {label} cannot be reloaded ({error})")
print(json.dumps(problems))
"""
