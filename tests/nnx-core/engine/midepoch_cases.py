"""Runs that are killed inside an epoch; run as a script to be killed, or to finish them."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import signal
import sys
from pathlib import Path

import torch
from nnx import (
    Callback,
    NNEvaluationDataPoint,
    NNTrainerParams,
    NNTrainParams,
    Trainer,
    supervised_objective,
)
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

_SPEC = importlib.util.spec_from_file_location(
    "exactness_cases", Path(__file__).with_name("exactness_cases.py")
)
exact = sys.modules.get("exactness_cases") or importlib.util.module_from_spec(_SPEC)
if "exactness_cases" not in sys.modules:
    sys.modules["exactness_cases"] = exact
    _SPEC.loader.exec_module(exact)

N_EPOCHS = 3
KILL_EPOCH = 1
POINT_EVERY = {1: 5, 2: 2}  # updates, by accumulation: a point lies before the kill
BATCHES = 9


def case(**choices):
    base = {
        "facade": "default", "optimizer": "adam", "schedule": "warmup/update", "accumulate": 1,
        "precision": "fp32", "state": "component", "loader": "shuffled",
    }  # fmt: skip
    return {**base, **choices}


CASES = {
    "default": case(),
    "accumulated": case(accumulate=2, state="early_stopping"),
    "monitored": case(state="monitor", schedule="plateau"),
    "objective": case(facade="objective", accumulate=2, optimizer="sgd"),
    "bf16": case(precision="bf16", loader="generator"),
    "augmented": case(loader="augmented"),
    "epoch_shuffle": case(loader="set_epoch"),
    "list": case(loader="list"),
    "step_fn": case(facade="step_fn", schedule="cosine/update"),
    "trainer": case(facade="trainer"),
    "trainer_uneven": case(facade="trainer", state="none"),
    "trainer_objective": case(facade="trainer_objective", accumulate=2),
    "workers": case(loader="workers"),
    "unsized": case(loader="unsized"),
    "unsized_step_fn": case(facade="step_fn", loader="unsized"),
    "unsized_stateful": case(facade="step_fn", loader="unsized_stateful"),
    "stateful": case(loader="stateful"),
    "stateful_workers": case(loader="stateful_workers"),
}


def data(seed=0):
    return exact.data(seed, n=4 * BATCHES)


class Unsized(IterableDataset):
    """Samples in order, with noise from the global stream; nobody knows how many."""

    def __iter__(self):
        for x, y in zip(*data()):
            yield x + 0.1 * torch.randn(4), y


def make_loader(kind):
    if kind == "unsized":
        return DataLoader(Unsized(), batch_size=4)
    if kind == "unsized_stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(Unsized(), batch_size=4)
    dataset = TensorDataset(*data())
    if kind == "workers":
        return DataLoader(dataset, batch_size=4, shuffle=True, num_workers=2)
    if kind.startswith("stateful"):
        from torchdata.stateful_dataloader import StatefulDataLoader

        workers = 2 if kind.endswith("workers") else 0
        torch.manual_seed(5)  # its sampler seeds itself when it is built
        return StatefulDataLoader(dataset, batch_size=4, shuffle=True, num_workers=workers)
    if kind == "list":
        return list(DataLoader(dataset, batch_size=4))
    if kind == "generator":
        generator = torch.Generator().manual_seed(3)
        return DataLoader(dataset, batch_size=4, shuffle=True, generator=generator)
    if kind in ("augmented", "set_epoch"):
        source = exact.make_loader(kind)
        target = source.dataset if kind == "augmented" else source
        target.x, target.y = data()
        return source
    return DataLoader(dataset, batch_size=4, shuffle=True)


def train(name, *, kill=False, resume=None):
    choices = CASES[name]
    capture = exact.Capture()
    callbacks = exact.make_callbacks(choices, capture)
    if kill:
        forwards = 2 if choices["facade"] == "trainer" else 1  # one per optimizer
        callbacks.append(KillAt(KILL_EPOCH, 6 * forwards))
    loader = make_loader(choices["loader"])
    common = {
        "n_epochs": N_EPOCHS,
        "seed": 11,
        "data_id": name,
        "checkpoint_every": POINT_EVERY[choices["accumulate"]] if kill else None,
        "train_loader": loader,
        "val_loader": DataLoader(TensorDataset(*exact.data(1)), batch_size=8),
    }
    if choices["state"] == "monitor":
        common["metrics"] = (exact.MetricSpec("nll"),)
        common["monitor"] = exact.MonitorSpec(metric="loss", split="train", min_delta=1e-3)
    if resume is not None:
        common |= {
            "resume_from_run_id": resume,
            "resume_from_checkpoint": "step",
            "resume_mode": "stateful",
        }
    model = exact.make_model(choices)
    steps = {"total_steps": 60, "T_max": 60}
    schedule = exact.make_schedule(choices)
    if choices["schedule"] != "plateau":
        field = "T_max" if schedule.T_max else "total_steps"
        schedule = dataclasses.replace(schedule, **{field: steps[field]})
    fn = {"default": {}, "objective": {"objective": supervised_objective()},
          "step_fn": {"train_step_fn": exact.custom_step}}  # fmt: skip
    if choices["facade"].startswith("trainer"):
        if resume is not None:
            common["n_epochs"] = N_EPOCHS - KILL_EPOCH
        params = NNTrainerParams(
            optims={
                "front": exact.make_optim(choices, "layers.0.*"),
                "back": exact.make_optim(choices, "layers.1.*"),
            },
            schedulers={"front": schedule, "back": schedule},
            **common,
        )
        step = (
            {"trainer_step_fn": uneven_step if name == "trainer_uneven" else exact.trainer_step}
            if choices["facade"] == "trainer"
            else {"objective": supervised_objective()}
        )
        run = Trainer(model).train(params, callbacks=callbacks, **step)
    else:
        if resume is not None:
            common["resume_epochs"] = "planned"
        params = NNTrainParams(optim=exact.make_optim(choices), scheduler=schedule, **common)
        run = model.train(params, callbacks=callbacks, **fn[choices["facade"]])
    history = [idp.state() for idp in run.idps]
    if choices["facade"].startswith("trainer"):
        for row in history:
            row["iter_idx"] = row["epoch_idx"] * BATCHES + row["batch_idx"]
    return {
        "weights": {k: v.clone() for k, v in model.net.state_dict().items()},
        "optimizers": capture.optimizers,
        "rates": [row for row in capture.rates if row[0] >= KILL_EPOCH],
        "history": history,
        "torch": torch.get_rng_state(),
        "python": exact.random.random(),
        "numpy": float(exact.np.random.random()),
    }


def uneven_step(ctx):
    """One optimizer steps every batch; the other gathers gradients over three."""
    ctx.model.net.train()
    x, y = ctx.batch
    front, back = ctx.optimizers["front"], ctx.optimizers["back"]
    for _ in range(2):  # as many forwards as the other trainer step
        loss = torch.nn.functional.cross_entropy(ctx.model.net(x), y)
    front.zero_grad()
    loss.backward()
    front.step()
    ctx.report_update("front")
    if ctx.batch_idx % 3 == 2:
        back.step()
        back.zero_grad()
        ctx.report_update("back")
    value = float(loss.detach())
    return NNEvaluationDataPoint(loss=value, error=value)


class KillAt(Callback):
    """Kills the process when the net has run forward so many times in an epoch."""

    def __init__(self, epoch, forwards):
        self.epoch, self.left = epoch, forwards

    def on_epoch_begin(self, ctx):
        if ctx.epoch != self.epoch:
            return

        def count(module, inputs):
            self.left -= 1
            if self.left < 0:
                Path(ctx.run.train.data_id).write_text(ctx.run.id)
                os.kill(os.getpid(), signal.SIGKILL)

        ctx.model.net.register_forward_pre_hook(count)


def kill_all(names):
    """Train each case in a process that dies inside an epoch; the runs they left."""
    killed = {}
    for name in names:
        pid = os.fork()
        if pid == 0:
            try:
                train(name, kill=True)
            finally:
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        if os.WTERMSIG(status) != signal.SIGKILL:
            raise RuntimeError(f"{name} was not killed")
        killed[name] = Path(name).read_text()
    return killed


def main(mode):
    torch.set_num_threads(1)
    if mode == "kill":
        Path("killed.json").write_text(json.dumps(kill_all(CASES)))
        return
    killed = json.loads(Path("killed.json").read_text())
    results = {
        name: {"whole": train(name), "resumed": train(name, resume=run)}
        for name, run in killed.items()
    }
    torch.save(results, "results.pt")


if __name__ == "__main__":
    main(sys.argv[1])
