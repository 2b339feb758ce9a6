"""Training configurations for the exactness matrix, run in this process or in another.

Every pair of values of two dimensions occurs in at least one case (a pairwise
covering array). Run as a script, it resumes the runs named in a job file and writes
what they ended with.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
from pathlib import Path

import numpy as np
import torch
from nnx import (
    Activations,
    Callback,
    ComponentSpec,
    Devices,
    EarlyStopping,
    Losses,
    MetricSpec,
    MonitorSpec,
    Nets,
    NNEvaluationDataPoint,
    NNModel,
    NNModelParams,
    NNOptimFactoryParams,
    NNOptimParams,
    NNParamGroupSpec,
    NNParams,
    NNSchedulerParams,
    NNTrainerParams,
    NNTrainParams,
    OptimizerFactorySpec,
    Optims,
    PrecisionPolicy,
    Schedulers,
    Trainer,
    register_optimizer_factory,
    registered_optimizer_factories,
    supervised_objective,
)
from torch.utils.data import DataLoader, Dataset, TensorDataset

N_EPOCHS = 3
BATCHES = 5

DIMENSIONS = {
    "facade": ("default", "objective", "step_fn", "trainer", "trainer_objective"),
    "optimizer": ("sgd", "nesterov", "adam", "amsgrad", "adamw", "factory"),
    "schedule": (
        "plateau", "step", "step/update", "cosine", "cosine/update", "one_cycle",
        "one_cycle/update", "warmup", "warmup/update",
    ),
    "accumulate": (1, 2),
    "precision": ("fp32", "bf16"),
    "state": ("none", "early_stopping", "component", "monitor"),
    "loader": ("shuffled", "generator", "list", "set_epoch", "augmented"),
}  # fmt: skip


def possible(case):
    """A trainer_step_fn owns its updates: no accumulation, full precision."""
    return case["facade"] != "trainer" or (case["accumulate"] == 1 and case["precision"] == "fp32")


def covering_cases():
    """A small set of cases that holds every possible pair of values."""
    names = list(DIMENSIONS)
    everything = [
        case
        for values in itertools.product(*DIMENSIONS.values())
        if possible(case := dict(zip(names, values)))
    ]
    pairs_of = [
        frozenset(((a, case[a]), (b, case[b])) for a, b in itertools.combinations(names, 2))
        for case in everything
    ]
    wanted = frozenset().union(*pairs_of)
    order = random.Random(0)
    chosen = []
    while wanted:
        sample = order.sample(range(len(everything)), 600)
        best = max(sample, key=lambda i: len(pairs_of[i] & wanted))
        if not pairs_of[best] & wanted:
            best = next(i for i, pairs in enumerate(pairs_of) if pairs & wanted)
        chosen.append(everything[best])
        wanted -= pairs_of[best]
    return chosen


def name_of(case):
    return "-".join(str(value).replace("/", "_per_") for value in case.values())


# Parts ---------------------------------------------------------------------------------


def data(seed=0, n=4 * BATCHES + 2):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=generator)
    return torch.randn(n, 4, generator=generator) + y[:, None], y


class Augmented(Dataset):
    """Draws from all three global streams for every sample."""

    def __init__(self):
        self.x, self.y = data()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        noise = torch.randn(4) + random.random() + np.random.random()
        return (self.x[index] + 0.1 * noise).float(), self.y[index]


class EpochShuffle:
    """Batches in an order drawn from the epoch's number, as a distributed sampler does it."""

    def __init__(self):
        self.x, self.y = data()
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return -(-len(self.x) // 4)

    def __iter__(self):
        order = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(self.epoch))
        for rows in order.split(4):
            yield self.x[rows], self.y[rows]


def make_loader(kind):
    dataset = TensorDataset(*data())
    if kind == "shuffled":
        return DataLoader(dataset, batch_size=4, shuffle=True)
    if kind == "generator":
        return DataLoader(
            dataset, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)
        )
    if kind == "list":
        return [(x, y) for x, y in DataLoader(dataset, batch_size=4)]
    if kind == "set_epoch":
        return EpochShuffle()
    return DataLoader(Augmented(), batch_size=4, shuffle=True)


class Drift(Callback):
    """Changes a weight by a random walk of its own, so that its state matters."""

    def __init__(self):
        self.level, self.events = torch.zeros(3), 0

    def on_train_begin(self, ctx):
        self.level, self.events = torch.zeros(3), 0

    def on_epoch_end(self, ctx):
        self.level = self.level * 0.5 + torch.randn(3)
        self.events += 1
        with torch.no_grad():
            list(ctx.model.net.parameters())[-1].add_(0.01 * self.level * self.events)

    def component_spec(self):
        return ComponentSpec("test.drift", version=1)

    def component_state(self):
        return {"level": self.level, "events": self.events}

    def load_component_state(self, state, *, version):
        self.level, self.events = state["level"], state["events"]


class Capture(Callback):
    """Keeps the optimizers' state and every batch's learning rates."""

    def __init__(self):
        self.rates, self.optimizers = [], {}

    def on_epoch_end(self, ctx):
        optimizers = ctx.optimizers or {"only": ctx.optimizer}
        self.rates.append(
            [ctx.epoch, {n: [g["lr"] for g in o.param_groups] for n, o in optimizers.items()}]
        )
        self.optimizers = {name: o.state_dict() for name, o in optimizers.items()}


class StopAfter(Callback):
    def __init__(self, epoch):
        self.epoch = epoch

    def on_epoch_end(self, ctx):
        ctx.should_stop = ctx.epoch >= self.epoch


def custom_step(ctx):
    """A caller's own step: accumulation by hand, autocast from the context."""
    ctx.model.net.train()
    x, y = ctx.batch
    if ctx.batch_idx % ctx.accumulate_grad_batches == 0:
        ctx.optimizer.zero_grad()
    with ctx.precision.autocast():
        loss = torch.nn.functional.cross_entropy(ctx.model.net(x), y)
    (loss / ctx.accumulate_grad_batches).backward()
    if (ctx.batch_idx + 1) % ctx.accumulate_grad_batches == 0 or ctx.is_last_batch:
        ctx.optimizer.step()
        ctx.report_update()
    value = float(loss.detach())
    return NNEvaluationDataPoint(loss=value, error=value)


def trainer_step(ctx):
    """Two optimizers in turn, each over its half of the net."""
    ctx.model.net.train()
    x, y = ctx.batch
    for name, optimizer in ctx.optimizers.items():
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(ctx.model.net(x), y)
        loss.backward()
        optimizer.step()
        ctx.report_update(name)
    value = float(loss.detach())
    return NNEvaluationDataPoint(loss=value, error=value)


def lion(groups, config):
    return torch.optim.RMSprop(groups, lr=groups[0]["lr"], alpha=config["alpha"], momentum=0.3)


def make_optim(case, pattern=None):
    if ("test.lion", 1) not in registered_optimizer_factories():
        register_optimizer_factory("test.lion", 1, lion)
    common = {
        "max_lr": 0.02,
        "weight_decay": 0.01,
        "accumulate_grad_batches": case["accumulate"],
        "grad_clip_norm": None if case["facade"] == "trainer" else 1.5,
        "param_groups": None if pattern is None else [NNParamGroupSpec(name_pattern=pattern)],
    }
    if case["optimizer"] == "factory":
        spec = OptimizerFactorySpec(id="test.lion", version=1, config={"alpha": 0.9})
        return NNOptimFactoryParams(factory=spec, **common)
    name, momentum = {
        "sgd": (Optims.SGD, 0.9),
        "nesterov": (Optims.SGD_NESTEROV, 0.8),
        "adam": (Optims.ADAM, (0.9, 0.99)),
        "amsgrad": (Optims.ADAM_AMSGRAD, (0.8, 0.99)),
        "adamw": (Optims.ADAMW, (0.9, 0.95)),
    }[case["optimizer"]]
    return NNOptimParams(name=name, momentum=momentum, **common)


def make_schedule(case):
    kind, _, clock = case["schedule"].partition("/")
    steps = N_EPOCHS * 6 if clock else N_EPOCHS
    own = {
        "plateau": {},
        "step": {"kind": Schedulers.STEP, "step_size": 2},
        "cosine": {"kind": Schedulers.COSINE_ANNEALING, "T_max": steps},
        "one_cycle": {"kind": Schedulers.ONE_CYCLE, "max_lr": 0.05, "total_steps": steps},
        "warmup": {
            "kind": Schedulers.LINEAR_WARMUP_DECAY, "warmup_steps": 2, "total_steps": steps,
        },
    }[kind]  # fmt: skip
    if clock:
        own["clock"] = "optimizer_update"
    return NNSchedulerParams(min_lr=1e-5, factor=0.5, patience=0, cooldown=0, threshold=1e-4, **own)


def make_model(case):
    torch.manual_seed(1)
    return NNModel(
        net_params=NNParams(
            input_dim=4, output_dim=3, hidden_dims=[8], dropout_prob=0.3,
            activation=Activations.TANH,
        ),
        params=NNModelParams(
            net=Nets.FEED_FWD, device=Devices.CPU, loss=Losses.CROSS_ENTROPY,
            precision=PrecisionPolicy(mode=case["precision"]),
        ),
    )  # fmt: skip


def make_callbacks(case, *more):
    own = {
        "none": [],
        "early_stopping": [EarlyStopping(monitor="train_edp.loss", patience=1)],
        "component": [Drift()],
        "monitor": [],
    }[case["state"]]
    return [*own, *more]


def run_case(case, *, n_epochs=N_EPOCHS, stop_after=None, resume=None, **extra):
    """Train a case and return what it ended with, as plain data and tensors."""
    capture = Capture()
    callbacks = make_callbacks(case, capture)
    salt = f"{name_of(case)}/{'' if resume else stop_after}"
    if stop_after is not None:
        callbacks.append(StopAfter(stop_after))
    common = {
        "n_epochs": n_epochs,
        "seed": 11,
        "train_loader": make_loader(case["loader"]),
        "val_loader": DataLoader(TensorDataset(*data(1)), batch_size=8),
        **extra,
    }
    if case["state"] == "monitor":
        common["metrics"] = (MetricSpec("nll"),)
        common["monitor"] = MonitorSpec(metric="nll", min_delta=1e-3)
    if resume is not None:
        common |= {"resume_from_run_id": resume, "resume_mode": "stateful"}
    model = make_model(case)
    if case["facade"].startswith("trainer"):
        params = NNTrainerParams(
            optims={
                "front": make_optim(case, "layers.0.*"),
                "back": make_optim(case, "layers.1.*"),
            },
            schedulers={"front": make_schedule(case), "back": make_schedule(case)},
            **common,
        )
        step = {"trainer_step_fn": trainer_step}
        if case["facade"] == "trainer_objective":
            step = {"objective": supervised_objective()}
        run = Trainer(model).train(params, callbacks=callbacks, salt=salt, **step)
    else:
        if resume is not None:
            common["resume_epochs"] = "planned"
        params = NNTrainParams(optim=make_optim(case), scheduler=make_schedule(case), **common)
        step = {
            "default": {},
            "objective": {"objective": supervised_objective()},
            "step_fn": {"train_step_fn": custom_step},
        }[case["facade"]]
        run = model.train(params, callbacks=callbacks, salt=salt, **step)
    return {
        "id": run.id,
        "weights": {k: v.clone() for k, v in model.net.state_dict().items()},
        "optimizers": capture.optimizers,
        "rates": capture.rates,
        "history": [idp.state() for idp in run.idps],
        "torch": torch.get_rng_state(),
        "python": random.random(),
        "numpy": float(np.random.random()),
    }


def main(job_path, out_path):
    jobs = json.loads(Path(job_path).read_text())
    results = {}
    for key, (case, arguments) in jobs.items():
        results[key] = run_case(case, **arguments)
    torch.save(results, out_path)


if __name__ == "__main__":
    os.environ["NNX_TQDM_DISABLE"] = "1"
    torch.set_num_threads(1)
    main(*sys.argv[1:])
