"""What the processes of the tests do: ``worker.py SCENARIO OUTPUT [JSON]`` under torchrun."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from nnx import (
    Callback,
    EarlyStopping,
    LRMonitor,
    MetricSpec,
    ModelCheckpoint,
    MonitorSpec,
    Nets,
    NNModel,
    NNModelParams,
    NNOptimParams,
    NNParams,
    NNSchedulerParams,
    NNTrainParams,
    PrecisionPolicy,
    TaskSpec,
    default_train_step,
    supervised_objective,
)
from nnx.distributed import (
    DDP,
    DistributedFailure,
    init_process_group,
    shutdown,
    train_loader,
    validation_loader,
    writer_only,
)
from nnx.history import HistoryJournal
from torch.utils.data import TensorDataset

RANK = WORLD = 0


def data(n=78, seed=0, ignored=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=generator)
    y = (2 * x[:, 0] + x[:, 1] > 0).long() + (x[:, 2] > 1).long()
    if ignored:
        y[::ignored] = -100
    return TensorDataset(x, y)


def model(seed=1, **options):
    torch.manual_seed(seed)
    return NNModel(
        net_params=NNParams(
            input_dim=8, output_dim=3, hidden_dims=[16], dropout_prob=options.pop("dropout", 0.0)
        ),
        params=NNModelParams(net=Nets.FEED_FWD, **options),
    )


def params(global_batch=12, *, n=78, ignored=0, accumulate=1, clip=None, **options):
    """The same training whatever the number of processes: the union of batches is fixed."""
    optim = NNOptimParams.builder().adam(max_lr=0.01).accumulate_grad(accumulate)
    if clip is not None:
        optim = optim.grad_clip(clip)
    given = {
        "n_epochs": 2,
        "seed": 0,
        "optim": optim.build(),
        "train_loader": train_loader(data(n, ignored=ignored), global_batch // WORLD, seed=3),
        "val_loader": validation_loader(data(53, seed=1, ignored=ignored), 16),
    }
    return NNTrainParams(**{**given, **options})


def summary(run, trained):
    """What every rank must agree on, as plain values."""
    return {
        "weights": [p.double().flatten().tolist() for p in trained.net.state_dict().values()],
        "loss": [r.train_edp.loss for r in run.idps],
        "accuracy": [r.train_edp.accuracy for r in run.idps],
        "f1": [r.train_edp.f1 for r in run.idps],
        "lr": [r.lr for r in run.idps],
        "val": [r.val_edp.state() for r in run.idps if r.val_edp is not None],
        "summary": [r.train_summary.state() for r in run.idps if r.train_summary is not None],
        "improved": [r.selection.improved for r in run.idps if r.selection is not None],
        "id": run.id,
    }


def fit(name, *, given=None, trained=None, **options):
    trained = trained or model()
    run = trained.train(given or params(), distributed=DDP(), salt=name, **options)
    return summary(run, trained)


def one_row():
    """A validation that most processes have no row of."""
    return validation_loader(data(1, seed=1), 4)


def normalized():
    """With running statistics, which every process collects from its own rows."""
    torch.manual_seed(1)
    layers = (torch.nn.Linear(8, 7), torch.nn.BatchNorm1d(7), torch.nn.ReLU())
    net = torch.nn.Sequential(*layers, torch.nn.Linear(7, 3))
    return NNModel(params=NNModelParams(), module=net)


# Scenarios --------------------------------------------------------------------------------------


def equal(_args):
    """Runs whose updates must be those of one process."""
    plateau = NNSchedulerParams.builder().reduce_on_plateau(
        min_lr=1e-6, factor=0.5, patience=0, cooldown=0, threshold=0.5
    )
    warm = NNSchedulerParams.builder().linear_warmup_decay(
        warmup_steps=3, total_steps=30, min_lr=1e-7, factor=0.5, patience=3, cooldown=1,
        threshold=1e-3,
    ).clock("optimizer_update")  # fmt: skip
    nll = {"metrics": [MetricSpec("nll"), MetricSpec("f1")], "monitor": MonitorSpec("nll")}
    task = {"task": TaskSpec.categorical(3, ignore_index=-100)}
    cases = {
        "plain": lambda: fit("plain"),
        "accumulated": lambda: fit("accumulated", given=params(accumulate=4)),
        "masked": lambda: fit("masked", given=params(ignored=3), trained=model(**task)),
        "monitored": lambda: fit("monitored", given=params(**nll)),
        "clipped": lambda: fit("clipped", given=params(clip=0.05)),
    }
    if WORLD < 3:
        cases |= {
            "tiny": lambda: fit("tiny", given=params(val_loader=one_row())),
            "batch_norm": lambda: fit("batch_norm", trained=normalized()),
            "plateau": lambda: fit("plateau", given=params(n_epochs=4, scheduler=plateau.build())),
            "warm": lambda: fit("warm", given=params(scheduler=warm.build())),
            "objective": lambda: fit(
                "objective", given=params(accumulate=2), objective=supervised_objective()
            ),
            "function": lambda: fit("function", train_step_fn=lambda ctx: default_train_step(ctx)),
            "journal": lambda: fit("journal", history=HistoryJournal(retention=10, chunk_size=5)),
            "extra": lambda: fit(
                "extra", given=params(extra_metrics={"n": lambda y, p: float(len(y))})
            ),
            "bf16": lambda: fit("bf16", trained=model(precision=PrecisionPolicy("bf16"))),
        }
    return {name: case() for name, case in cases.items()}


class Note(Callback):
    rank_behaviour = "every"

    def __init__(self):
        self.epochs = []

    def on_epoch_end(self, ctx):
        self.epochs.append((ctx.idp.val_edp.loss, len(ctx.idps)))


class StopAt(Callback):
    """Asks to stop from one rank only."""

    rank_behaviour = "every"

    def __init__(self, *, rank, epoch=None, update=None):
        self.rank, self.epoch, self.update = rank, epoch, update

    def on_train_begin(self, ctx):
        if self.update is not None and self.rank == RANK:
            ctx.update_listeners.append(self.after_update)
        self.ctx = ctx

    def after_update(self):
        if self.ctx.committed_updates == self.update:
            self.ctx.stop_at_update = True

    def on_epoch_end(self, ctx):
        if self.epoch == ctx.epoch and self.rank == RANK:
            ctx.should_stop = True


def callbacks(_args):
    """Callbacks in every process, in the writer, undeclared; stops from one rank."""
    built = []

    class Silent(Callback):
        pass

    def build():
        built.append(RANK)
        return Silent()

    note, rates = Note(), LRMonitor()
    fit("declared", callbacks=[note, rates, ModelCheckpoint([1], tag="snap"), writer_only(build)])
    found = {"note": note.epochs, "rates": rates.history, "built": built}
    found["refused"] = failure(lambda: fit("undeclared", callbacks=[Silent()]))
    found["function"] = failure(lambda: fit("function", callbacks=[lambda idps: None]))
    stopping = EarlyStopping(monitor="val_edp.loss", patience=0, min_delta=10.0)
    found["early"] = len(fit("early", given=params(n_epochs=5), callbacks=[stopping])["val"])
    asks = StopAt(rank=WORLD - 1, epoch=1)
    found["asked"] = len(fit("asked", given=params(n_epochs=5), callbacks=[asks])["val"])
    inside = StopAt(rank=WORLD - 1, update=10)
    found["inside"] = fit("inside", given=params(n_epochs=5), callbacks=[inside])["loss"]
    return found


def resume(_args):
    """A split run with dropout: every process has its own stream."""
    whole = model(dropout=0.3)
    together = summary(whole.train(params(n_epochs=4), distributed=DDP(), salt="whole"), whole)

    class Interrupt(Callback):
        rank_behaviour = "every"

        def on_epoch_end(self, ctx):
            ctx.should_stop = ctx.epoch == 1

    half = model(dropout=0.3)
    first = half.train(params(n_epochs=4), distributed=DDP(), callbacks=[Interrupt()], salt="half")
    again = replace(
        params(n_epochs=4), resume_from_run_id=first.id, resume_mode="stateful",
        resume_epochs="planned",
    )  # fmt: skip
    rest = model(seed=9, dropout=0.3)
    run = rest.train(again, distributed=DDP())
    other_data = replace(again, train_loader=train_loader(data(), 4, seed=8))

    class Fail(Callback):
        rank_behaviour = "every"

        def on_epoch_begin(self, ctx):
            if ctx.epoch == 2:
                raise OSError("the power is gone")

    script = params(n_epochs=4, on_existing="resume")
    failure(
        lambda: model(dropout=0.3).train(
            script, distributed=DDP(), callbacks=[Fail()], salt="script"
        )
    )
    scripts = []
    for seed in (10, 11):  # continued, and then found finished
        trained = model(seed=seed, dropout=0.3)
        scripts.append(summary(trained.train(script, distributed=DDP(), salt="script"), trained))
    return {
        "whole": together,
        "rest": summary(run, rest),
        "scripts": scripts,
        "status": run.resume_status.mode,
        "other_data": failure(
            lambda: model(dropout=0.3).train(other_data, distributed=DDP(), salt="o")
        ),
    }


def resume_elsewhere(args):
    """Another number of processes: refused, unless the weights are all that is wanted."""
    base = replace(params(n_epochs=1), resume_from_run_id=args["run"])
    trained = model(dropout=0.3)
    stateful = failure(
        lambda: trained.train(replace(base, resume_mode="stateful"), distributed=DDP())
    )
    run = trained.train(
        replace(base, resume_mode="weights_only"), distributed=DDP(), salt=f"w{WORLD}"
    )
    return {"stateful": stateful, "mode": run.resume_status.mode}


class Faulty(TensorDataset):
    def __getitem__(self, index):
        raise OSError("the disk is gone")


def failures(_args):
    """A failure anywhere ends every process, with its own error where it happened."""
    found = {}
    good = params()
    found["mismatch"] = failure(
        lambda: fit(
            "mismatch", given=replace(good, train_loader=train_loader(data(), 4, seed=RANK))
        )
    )
    found["model"] = failure(
        lambda: model().train(
            params() if RANK == 0 else replace(params(), n_epochs=3), distributed=DDP(), salt="m"
        )
    )
    bad = replace(good, train_loader=_lazy(Faulty(*data().tensors) if RANK == 1 else data()))
    found["data"] = failure(lambda: fit("data", given=bad))
    found["plain_loader"] = failure(
        lambda: fit("plain", given=replace(good, train_loader=[(torch.ones(2, 8), torch.ones(2))]))
    )

    class Breaks(Callback):
        rank_behaviour = "every"

        def on_epoch_end(self, ctx):
            if RANK == WORLD - 1:
                raise ValueError("a callback broke")

    found["callback"] = failure(lambda: fit("callback", callbacks=[Breaks()]))
    fit("exists")
    found["exists"] = failure(lambda: fit("exists"))

    class Disk(Callback):
        distributed = "writer"

        def on_epoch_begin(self, ctx):
            raise OSError("no space")

    found["writer"] = failure(lambda: fit("writer", callbacks=[Disk()]))

    def drifting(ctx):
        record = default_train_step(replace(ctx, accumulation_state=None))
        return record

    found["drifting"] = failure(lambda: fit("drifting", train_step_fn=drifting))
    found["after"] = len(fit("after")["loss"])  # the group is still whole
    return found


def _lazy(dataset):
    """Fetched row by row, so that a faulty row fails in the middle of an epoch."""
    return train_loader(
        dataset, 4, seed=3, collate_fn=lambda rows: tuple(map(torch.stack, zip(*rows)))
    )


def lost(args):
    """A process is killed or stopped in the middle of an epoch."""

    class Vanish(Callback):
        rank_behaviour = "every"

        def on_epoch_begin(self, ctx):
            if ctx.epoch == 1 and RANK == WORLD - 1:
                os.kill(os.getpid(), getattr(signal, args["signal"]))

    begun = time.monotonic()
    told = failure(lambda: fit(args["signal"], given=params(n_epochs=3), callbacks=[Vanish()]))
    return {"error": told, "seconds": time.monotonic() - begun}


def failure(call):
    """The message that ended a fit here; of this process's own error, with its type."""
    try:
        call()
    except DistributedFailure as error:
        return str(error)
    except Exception as error:
        return f"own {type(error).__name__}: {error}"
    return None


def main():
    global RANK, WORLD
    scenario, output = sys.argv[1], Path(sys.argv[2])
    args = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    torch.set_num_threads(1)
    RANK, WORLD = init_process_group(timeout_seconds=args.get("timeout", 60))
    found = globals()[scenario](args)
    (output / f"{scenario}-{WORLD}-{RANK}.json").write_text(json.dumps(found))
    shutdown(timeout_seconds=60)
    left = backend_threads()
    if left and scenario != "lost":  # one of them could abort the process while it ends
        sys.exit(f"threads of the backend outlive shutdown: {left}")


def backend_threads():
    """The names of gloo's threads in this process, where the system tells."""
    tasks = Path("/proc/self/task").glob("*/comm")
    return [name for name in (t.read_text().strip() for t in tasks) if "gloo" in name]


if __name__ == "__main__":
    main()
