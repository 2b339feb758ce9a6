"""Follow runs of docs/examples/plugin-lion through environments with it and without it.

python tools/check_plugin.py train FOLDER      # with acme-lion: one whole run, one stopped
python tools/check_plugin.py without FOLDER    # uninstalled: both load and print, no resume
python tools/check_plugin.py resume FOLDER     # installed again: it ends as the whole one
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import nnx
import torch
from nnx.plugins import manager
from nnx.plugins.testing import tiny_training

LION = nnx.NNOptimFactoryParams(
    factory=nnx.OptimizerFactorySpec("acme.lion", 1, {"betas": [0.9, 0.98]}),
    max_lr=0.003,
    weight_decay=0.1,
)
KAPPA = [nnx.MetricSpec("acme.kappa")]
IDS = Path("ids.json")


class StopAfterOne(nnx.Callback):
    def on_epoch_end(self, ctx: Any) -> None:
        ctx.should_stop = True


def training(**resume: Any) -> tuple[Any, Any]:
    return tiny_training(n_epochs=3, optim=LION, metrics=KAPPA, **resume)


def resume(source: str) -> tuple[Any, Any]:
    model, params = training(resume_from_run_id=source, resume_epochs="planned")
    return model, model.train(params, salt="resumed")


def installed() -> bool:
    return any(p.distribution == "acme-lion" for p in manager.default().plugins)


def train() -> None:
    assert "site-packages" in Path(str(nnx.__file__)).parts, f"not a wheel: {nnx.__file__}"
    model, params = training()
    whole = model.train(params)
    model, params = training()
    stopped = model.train(params, callbacks=[StopAfterOne()], salt="stopped")
    IDS.write_text(json.dumps({"whole": whole.id, "stopped": stopped.id}), encoding="utf-8")


def without() -> None:
    assert not installed()
    ids = json.loads(IDS.read_text(encoding="utf-8"))
    for id in ids.values():
        run = nnx.NNRun.load(id)
        assert run.id == id
        shown = str(run)
        assert "acme.lion@v1" in shown, shown
        assert "acme.kappa" in shown, shown
        # Only the optimizer is foreign, so the weights are usable too.
        nnx.NNModel.from_checkpoint(nnx.NNCheckpoint.load(id, nnx.Checkpoints.LAST))
    before = sorted(os.listdir("runs"))
    try:
        resume(ids["stopped"])
    except ValueError as error:
        message = str(error)
    else:
        raise AssertionError("a resume without the plugin was not refused")
    for part in (f"Run {ids['stopped']} used it from acme-lion", 'pip install "acme-lion=='):
        assert part in message, message
    assert sorted(os.listdir("runs")) == before
    print(f"refused: {message}")


def again() -> None:
    ids = json.loads(IDS.read_text(encoding="utf-8"))
    model, run = resume(ids["stopped"])
    whole = nnx.NNCheckpoint.load(ids["whole"], nnx.Checkpoints.LAST)
    expected = nnx.NNModel.from_checkpoint(whole).net.state_dict()
    for name, tensor in model.net.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    shown = [r.val_edp.metrics["acme.kappa"] for r in run.idps if r.val_edp is not None]
    assert shown, "kappa was not recorded"
    print(f"resumed to the same bits; kappa {shown[-1]:.3f}")


if __name__ == "__main__":
    phase, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    {"train": train, "without": without, "resume": again}[phase]()
