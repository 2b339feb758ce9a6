"""What the processes of the sharded tests do: ``fsdp_worker.py SCENARIO OUTPUT [JSON]``."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import time
from pathlib import Path

import torch
import worker
from nnx import (
    Callback,
    EarlyStopping,
    LossTerm,
    MetricSpec,
    ModelCheckpoint,
    MonitorSpec,
    NNEvaluationDataPoint,
    NNModel,
    NNModelParams,
    NNOptimParams,
    NNSchedulerParams,
    ObjectiveResult,
    Optims,
    PrecisionPolicy,
    TaskSpec,
    default_train_step,
    supervised_objective,
)
from nnx.distributed import DDP, FSDP, init_process_group, shutdown
from nnx.history import HistoryJournal
from nnx.store import dcp
from torch.nn import functional
from worker import failure, model, normalized, one_row, params, replace, summary

SPEC = FSDP()


def fit(name, *, given=None, trained=None, spec=None, **options):
    trained = trained or model()
    run = trained.train(given or params(), distributed=spec or SPEC, salt=name, **options)
    return summary(run, trained)


class Look(Callback):
    """What this process holds in the middle of training."""

    rank_behaviour = "every"

    def on_train_begin(self, ctx):
        self.ctx = ctx

    def on_epoch_end(self, ctx):
        net, optimizer = ctx.model.net, ctx.optimizer
        self.parameters = {
            name: [list(p.shape), list(p.to_local().shape)] for name, p in net.named_parameters()
        }
        self.moments = [
            list(state["exp_avg"].to_local().shape) for state in optimizer.state.values()
        ]
        self.gradients = [list(p.grad.to_local().shape) for p in net.parameters()]


def two_terms(ctx):
    """Two means over different samples; a process may have none for the second."""
    rows, labels = ctx.batch
    logits = ctx.model.net(rows)
    zero = labels == 0
    return ObjectiveResult(
        [
            LossTerm("ce", functional.cross_entropy(logits, labels, reduction="sum"), len(labels)),
            LossTerm("small", logits[zero].pow(2).sum(), int(zero.sum()), weight=0.3),
        ]
    )


def momentum():
    return NNOptimParams(
        name=Optims.SGD_NESTEROV, max_lr=0.05, momentum=0.9, weight_decay=0.01,
        grad_clip_norm=1.0, accumulate_grad_batches=2,
    )  # fmt: skip


def validated(n, batch_size):
    return params(val_loader=worker.validation_loader(worker.data(n, seed=1), batch_size))


def evaluate(ctx):
    """Runs the network as often as this process has rows."""
    ctx.model.net.eval()
    with torch.no_grad():
        for rows, _ in ctx.val_loader:
            loss = ctx.model.net(rows).sum()
    return NNEvaluationDataPoint(loss=float(loss) * 0 + 1.0, error=0.5)


def frozen():
    trained = model()
    trained.net.layers[0].requires_grad_(False)
    return trained


def narrow():
    """Of some parameters a process has no row."""
    torch.manual_seed(1)
    return module(torch.nn.Linear(8, 2), torch.nn.Tanh(), torch.nn.Linear(2, 3))


class Tied(torch.nn.Module):
    """A small transformer whose head is its embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 8)
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = torch.nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, rows):
        hidden = self.embedding((rows.abs() * 5).long().clamp(max=19))
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden.mean(1))[:, :3]


def tied():
    torch.manual_seed(1)
    return NNModel(params=NNModelParams(), module=Tied())


def module(*layers):
    return NNModel(params=NNModelParams(), module=torch.nn.Sequential(*layers))


def equal(_args):
    nll = {"metrics": [MetricSpec("nll"), MetricSpec("f1")], "monitor": MonitorSpec("nll")}
    task = {"task": TaskSpec.categorical(3, ignore_index=-100)}
    plateau = NNSchedulerParams.builder().reduce_on_plateau(
        min_lr=1e-6, factor=0.5, patience=0, cooldown=0, threshold=0.5
    )
    cases = {
        "plain": lambda: fit("plain"),
        "accumulated": lambda: fit("accumulated", given=params(accumulate=4)),
        "masked": lambda: fit("masked", given=params(ignored=3), trained=model(**task)),
        "monitored": lambda: fit("monitored", given=params(**nll)),
        "clipped": lambda: fit("clipped", given=params(clip=0.05)),
        "sparse": lambda: fit(
            "sparse", given=params(6, ignored=2, accumulate=2), trained=model(**task)
        ),
        "narrow": lambda: fit("narrow", trained=narrow()),
        "terms": lambda: fit("terms", given=params(6, accumulate=2), objective=two_terms),
    }
    if worker.WORLD < 3:
        cases |= {
            "objective": lambda: fit(
                "objective", given=params(accumulate=2), objective=supervised_objective()
            ),
            "function": lambda: fit("function", train_step_fn=lambda ctx: default_train_step(ctx)),
            "bf16": lambda: fit("bf16", trained=model(precision=PrecisionPolicy("bf16"))),
            "tied": lambda: fit("tied", given=params(optim=momentum()), trained=tied()),
            "sgd": lambda: fit("sgd", given=params(optim=momentum())),
            "plateau": lambda: fit(
                "plateau",
                given=params(n_epochs=4, scheduler=plateau.build()),
                callbacks=[EarlyStopping(monitor="val_edp.loss", patience=2, min_delta=0.2)],
            ),
            "journal": lambda: fit("journal", history=HistoryJournal(retention=10, chunk_size=5)),
            "uneven": lambda: fit("uneven", given=validated(53, 26)),
            "tiny": lambda: fit("tiny", given=params(val_loader=one_row())),
            "evaluator": lambda: fit("evaluator", given=validated(53, 26), eval_step_fn=evaluate),
            "frozen": lambda: fit("frozen", trained=frozen()),
            "container": lambda: fit("container", trained=direct(outside=False)),
            "outside": lambda: fit(
                "outside", trained=direct(outside=True), spec=SPEC and FSDP(blocks=())
            ),
            "batch_norm": lambda: fit("batch_norm", trained=normalized()),
            "root": lambda: fit("root", spec=SPEC and FSDP(blocks=())),
        }
    return {name: case() for name, case in cases.items()}


def sharded(_args):
    """What each process holds during training, and what the caller's model is afterwards."""
    look, trained = Look(), model()
    before = trained.net
    kinds = [type(m).__name__ for m in before.modules()]
    attributes = [sorted(vars(m)) for m in before.modules()]
    parameters = list(before.parameters())
    found = fit("sharded", trained=trained, callbacks=[look, ModelCheckpoint([1], tag="snap")])
    net = trained.net
    return {
        **found,
        "parameters": look.parameters,
        "moments": look.moments,
        "gradients": look.gradients,
        "same_net": net is before,
        "same_kinds": [type(m).__name__ for m in net.modules()] == kinds,
        "same_attributes": [sorted(vars(m)) for m in net.modules()] == attributes,
        "hooks": [n for m in net.modules() for n, v in vars(m).items() if "hooks" in n and v],
        "pickled": len(pickle.dumps(net)) > 0,
        "same_parameters": all(a is b for a, b in zip(parameters, net.parameters())),
        "predicted": trained.predict(worker.data(5).tensors[0]).logits.tolist(),
        "again": fit("again", trained=trained)["loss"],  # sharded once more
        "doubled": fit(
            "doubled",
            given=params(n_epochs=2),
            callbacks=[ModelCheckpoint([0, 1], tag="then"), Double()],
        )["id"],
    }


class Double(Callback):
    """Changes the weights after a checkpoint of them was asked for."""

    rank_behaviour = "every"

    def on_epoch_end(self, ctx):
        with torch.no_grad():
            for parameter in ctx.model.net.parameters():
                parameter.mul_(2)


class Interrupt(Callback):
    rank_behaviour = "every"

    def on_epoch_end(self, ctx):
        ctx.should_stop = ctx.epoch == 1


def resume(_args):
    """A run of four epochs, whole and in two halves, with dropout."""
    spec = FSDP(writer_rank=worker.WORLD - 1)
    whole = model(dropout=0.3)
    together = fit("whole", given=params(n_epochs=4), trained=whole, spec=spec)
    half = model(dropout=0.3)
    first = half.train(params(n_epochs=4), distributed=spec, callbacks=[Interrupt()], salt="half")
    rest = model(seed=9, dropout=0.3)
    again = replace(
        params(n_epochs=4), resume_from_run_id=first.id, resume_mode="stateful",
        resume_epochs="planned",
    )  # fmt: skip
    run = rest.train(again, distributed=spec)
    other = replace(again, train_loader=worker.train_loader(worker.data(), 4, seed=8))
    return {
        "whole": together,
        "rest": summary(run, rest),
        "status": run.resume_status.mode,
        "half": first.id,
        "other": failure(lambda: fit("other", given=other, trained=model(dropout=0.3))),
    }


def continued(args):
    """Go on with a run that another number of processes, or one, has begun."""
    given = replace(
        params(n_epochs=4), resume_from_run_id=args["run"], resume_mode="stateful",
        resume_epochs="planned",
    )  # fmt: skip
    found = fit(args["salt"], given=given, trained=model(seed=9))
    return {**found, "run": found["id"]}


def whole():
    """All four epochs."""
    return fit("whole", given=params(n_epochs=4))


def begun(_args):
    """Two of four epochs, without dropout: the same whatever the number of processes."""
    half = model()
    run = half.train(
        params(n_epochs=4), distributed=FSDP(), callbacks=[Interrupt()], salt=f"begun{worker.WORLD}"
    )
    return {"run": run.id, **summary(run, half)}


def crossed(_args):
    """From replicas to shards and from shards to replicas."""
    found = {}
    for first, second in ((DDP(), FSDP()), (FSDP(), DDP())):
        half, rest = model(), model(seed=9)
        name = type(first).__name__
        run = half.train(
            params(n_epochs=4), distributed=first, callbacks=[Interrupt()], salt=f"from{name}"
        )
        given = replace(
            params(n_epochs=4), resume_from_run_id=run.id, resume_mode="stateful",
            resume_epochs="planned",
        )  # fmt: skip
        found[name] = fit(f"after{name}", given=given, trained=rest, spec=second)
    return found


def state_of(trained):
    return [p.double().flatten().tolist() for p in trained.net.state_dict().values()]


def failures(_args):
    """A failure anywhere ends every process with the same error and a whole model."""
    found = {}
    own = model(seed=worker.RANK)  # the writer's weights are taken only once nothing is refused
    before = state_of(own)
    for name, given, options in (
        ("pattern", params(), {"spec": FSDP(blocks=("nothing.*",))}),
        ("plain", params(train_loader=[(torch.ones(2, 8), torch.ones(2))]), {}),
        ("checkpoint_every", params(checkpoint_every=2), {}),
        ("scalar", params(), {"trained": with_parameter(torch.tensor(1.0))}),
        ("empty", params(), {"trained": with_parameter(torch.ones(0, 2))}),
        ("strided", params(), {"trained": with_parameter(torch.ones(3, 2).t())}),
    ):
        found[name] = failure(
            lambda g=given, o=options: fit("no", given=g, **{"trained": own, **o})
        )
    found["refused_changes_nothing"] = state_of(own) == before
    found["left"] = sorted(os.listdir("runs")) if os.path.isdir("runs") else []

    rows = worker.data()
    faulty = worker.Faulty(*rows.tensors) if worker.RANK == 1 else rows
    trained = model()
    given = params(train_loader=worker._lazy(faulty))
    found["data"] = failure(lambda: fit("data", given=given, trained=trained))
    found["weights"] = state_of(trained)
    labels = worker.data()
    if worker.RANK == 1:
        labels.tensors[1][:] = 7  # no such class: the loss fails, after the forward
    given = params(train_loader=worker.train_loader(labels, 6))
    found["loss"] = failure(lambda: fit("loss", given=given, trained=trained))

    found["inside"] = failure(lambda: fit("inside", trained=picky(at=9)))
    found["inside_first"] = failure(lambda: fit("inside", trained=picky(at=1)))
    blocks = FSDP(blocks=() if worker.RANK else None)
    found["blocks"] = failure(lambda: fit("blocks", spec=blocks))
    found["outside"] = failure(lambda: fit("outside", trained=direct(outside=True)))

    class Alone(Callback):
        rank_behaviour = "writer"

        def on_epoch_end(self, ctx):
            ctx.model.predict(torch.zeros(1, 8))

    found["alone"] = failure(lambda: fit("alone", callbacks=[Alone()]))

    class Full(Callback):
        """The disk of one process is full at the second epoch."""

        rank_behaviour = "every"

        def on_epoch_end(self, ctx):
            if ctx.epoch == 1 and worker.RANK == 1:
                dcp.HashingFile = broken

    kept = dcp.HashingFile
    found["full"] = failure(lambda: fit("full", callbacks=[Full()], trained=trained))
    dcp.HashingFile = kept
    found["after"] = fit("after", trained=trained)["loss"]
    return found


class Picky(torch.nn.Module):
    """Fails in the middle of a forward, in one process."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def forward(self, rows):
        self.at -= 1
        if self.at == 0 and worker.RANK == 1:
            raise ArithmeticError("not these rows")
        return rows


def picky(at):
    torch.manual_seed(1)
    linear = torch.nn.Linear
    return module(linear(8, 7), Picky(at), linear(7, 5), linear(5, 3))


class Direct(torch.nn.Module):
    """Its lists hold parameters, and one layer whose weight it uses itself."""

    __module__ = "fsdp_worker"  # in the processes that is the main module

    def __init__(self):
        super().__init__()
        own = torch.nn.ParameterList([torch.nn.Parameter(torch.eye(8))])
        self.stack = torch.nn.ModuleList([own, torch.nn.Linear(8, 3)])
        self.outside = False

    def forward(self, rows):
        (own,), last = self.stack
        rows = rows @ own
        if self.outside:
            return functional.linear(rows, last.weight, last.bias)
        return last(rows)


def direct(*, outside):
    torch.manual_seed(1)
    net = Direct()
    net.outside = outside
    return NNModel(params=NNModelParams(), module=net)


def with_parameter(tensor):
    """A network that cannot be sharded."""
    trained = model()
    trained.net.odd = torch.nn.Parameter(tensor)
    return trained


def broken(path, *_args):
    raise OSError(28, "no space left on this disk", str(path))


def killed(_args):
    """One process is killed while all of them write the second epoch's checkpoint."""

    class Kill(dcp.ShardWriter):
        def write_data(self, plan, planner):
            done = super().write_data(plan, planner)
            if worker.RANK == 1 and Kill.epoch == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return done

    class Epoch(Callback):
        rank_behaviour = "every"

        def on_epoch_end(self, ctx):
            Kill.epoch = ctx.epoch

    dcp.ShardWriter = Kill
    trained = model()
    return {"error": failure(lambda: fit("killed", trained=trained, callbacks=[Epoch()]))}


def stopped(args):
    """One process no longer answers, in the middle of an epoch."""

    class Stop(Callback):
        rank_behaviour = "every"

        def on_train_begin(self, ctx):
            ctx.update_listeners.append(lambda: self.after_update(ctx))

        def after_update(self, ctx):
            if ctx.committed_updates == 9 and worker.RANK == worker.WORLD - 1:
                os.kill(os.getpid(), signal.SIGSTOP)

    begun = time.monotonic()
    told = failure(lambda: fit("stopped", callbacks=[Stop()]))
    return {"error": told, "seconds": time.monotonic() - begun}


def several(args):
    """Many scenarios in the same processes; what others go on with is in one folder."""
    found, top = {}, Path.cwd()
    for name in args["of"]:
        folder = top / ("shared" if name in ("begun", "continued") else f"{name}-{worker.WORLD}")
        folder.mkdir(exist_ok=True)
        os.chdir(folder)
        found[name] = globals()[name](args)
    return found


def main():
    scenario, output = sys.argv[1], Path(sys.argv[2])
    args = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    torch.set_num_threads(1)
    worker.RANK, worker.WORLD = init_process_group(timeout_seconds=args.get("timeout", 60))
    found = globals()[scenario](args)
    (output / f"{scenario}-{worker.WORLD}-{worker.RANK}.json").write_text(json.dumps(found))
    shutdown(timeout_seconds=5)
    left = worker.backend_threads()
    if left and scenario == "several":  # one of them could abort the process while it ends
        sys.exit(f"threads of the backend outlive shutdown: {left}")


if __name__ == "__main__":
    main()
