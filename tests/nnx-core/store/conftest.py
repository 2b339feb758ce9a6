"""Small real parts for the store: a network with Adam, its records and its run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from nnx.enums import Activations, Devices, Losses, Nets
from nnx.params import MonitorSpec, NNModelParams, NNParams, NNTrainParams
from nnx.records import NNEvaluationDataPoint, NNIterationDataPoint
from nnx.store import NNCheckpoint, NNRun

NET = NNParams(
    input_dim=4, output_dim=2, hidden_dims=[8], dropout_prob=0.0, activation=Activations.RELU
)
MODEL = NNModelParams(net=Nets.FEED_FWD, device=Devices.CPU, loss=Losses.CROSS_ENTROPY)


def make_run(
    n_epochs: int = 3, *, salt: str | None = None, monitor: bool = False, **train
) -> NNRun:
    spec = MonitorSpec(metric="loss", split="val") if monitor else None
    train = NNTrainParams(n_epochs=n_epochs, seed=0, monitor=spec, val_loader=[1], **train)
    return NNRun(net=NET, model=MODEL, train=train, salt=salt)


def make_record(epoch: int, batch: int = 0, *, batches: int = 2, error: float | None = None):
    """A record; an epoch's last one carries validation scores."""
    train = NNEvaluationDataPoint(loss=1.0 / (1 + epoch) + batch / 7, error=0.75, f1=1 / 3)
    val = None
    if batch == batches - 1:
        val = NNEvaluationDataPoint(loss=2.0 / (3 + epoch), error=error or 0.5 / (1 + epoch))
    return NNIterationDataPoint(
        lr=0.1 / (1 + epoch), iter_idx=epoch * batches + batch, epoch_idx=epoch, batch_idx=batch,
        train_edp=train, val_edp=val,
    )  # fmt: skip


def make_checkpoint(epoch: int, fill: float | None = None, **changes) -> NNCheckpoint:
    generator = torch.Generator().manual_seed(epoch)
    state = torch.nn.Linear(4, 2).state_dict()
    for tensor in state.values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) if fill is None else fill)
    record = changes.pop("idp", None) or make_record(epoch, 1)
    return NNCheckpoint(net_params=NET, model_params=MODEL, net_state=state, idp=record, **changes)


def make_state(epoch: int) -> dict:
    generator = torch.Generator().manual_seed(1000 + epoch)
    moments = {i: {"exp_avg": torch.randn(4, 2, generator=generator)} for i in range(2)}
    return {
        "optimizer_state": {"state": moments, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999)}]},
        "completed_epoch": epoch,
        "counters": {
            "global_step": 2 * (epoch + 1),
            "committed_updates": 2 * (epoch + 1),
            "planned_n_epochs": 3,
        },
    }


@pytest.fixture
def parts() -> SimpleNamespace:
    return SimpleNamespace(
        run=make_run, record=make_record, checkpoint=make_checkpoint, state=make_state
    )


@pytest.fixture
def root(tmp_path, monkeypatch) -> str:
    """An empty working directory's ``runs``."""
    monkeypatch.chdir(tmp_path)
    return "runs"


@pytest.fixture
def train(parts, root):
    """Write a run as a fit does, epoch by epoch; returns it."""
    from nnx.store import RunWriter

    def run_epochs(run=None, epochs=3, *, best=True, errors=None, on_epoch=None, **options):
        run = run or parts.run(epochs)
        with RunWriter.open(run, **options) as writer:
            for epoch in range(epochs):
                for batch in range(2):
                    error = errors[epoch] if errors else None
                    writer.append(parts.record(epoch, batch, error=error))
                checkpoint = parts.checkpoint(epoch, idp=writer.idps[-1])
                writer.commit_epoch(
                    checkpoint, parts.state(epoch), phases=["first"] if epoch == 0 else [],
                    best=best,
                )  # fmt: skip
                if on_epoch:
                    on_epoch(writer, epoch)
            return writer.finish()

    return run_epochs


@pytest.fixture
def check_sound():
    """What must hold of a runs folder whatever was interrupted there."""
    import os

    from nnx.store import NNCheckpoint, standing
    from nnx.store.cleanup import collect
    from nnx.store.committed import NOTHING, committed_epoch
    from nnx.store.paths import RunPaths, run_names
    from nnx.store.pointer import best_run_id
    from nnx.store.points import verify_point, written_tags
    from nnx.utils.files import is_temporary_name
    from nnx.utils.yamlio import read_yaml

    def look(paths, committed: int, batches: int) -> None:
        run = NNRun.load(paths.id, paths.root)
        assert run.id == paths.id
        last = committed_epoch(paths)
        assert last is not None
        assert last >= committed, paths.id
        epochs = sorted({record.epoch_idx for record in run.idps})
        resumed = run.resume_status is not None and run.resume_status.mode != "fresh"
        first = epochs[0] if resumed and epochs else 0
        assert epochs == list(range(first, last + 1))
        assert len(run.idps) == batches * len(epochs)
        for tag in written_tags(paths):
            manifest = verify_point(paths.id, tag, paths.root)
            if manifest is None and tag == "step":
                continue  # its removal was interrupted: nobody reads it any more
            assert manifest is not None
            checkpoint, state = NNCheckpoint.load_with_training_state(paths.id, tag, paths.root)
            assert checkpoint.idp.epoch_idx == manifest["record"]["epoch_idx"]
            assert (state is None) == (manifest["training_state_id"] is None)

    def check(root: str, *, committed: dict[str, int] | None = None, batches: int = 2) -> None:
        known = committed or {}
        for name in run_names(root):
            paths = RunPaths.seen(root, name)
            if paths.exists() and os.path.exists(paths.run_yaml):
                look(paths, known.get(name, NOTHING), batches)
        collect(root)
        for where, folders, names in os.walk(root):
            assert not where.endswith(".dcp") or len(folders) == 1, where  # one generation
            for name in (*folders, *names):
                assert not is_temporary_name(name), os.path.join(where, name)
                assert not name.endswith(".staged"), os.path.join(where, name)
                assert not name.startswith(".trash"), os.path.join(where, name)
        found = {}
        for name in run_names(root):
            paths = RunPaths(root, name)
            assert paths.exists()
            look(paths, known.get(name, NOTHING), batches)
            best = NNCheckpoint.load(name, "best", root)
            if best is not None and committed_epoch(paths) != NOTHING:
                found[name] = standing.of_record(
                    best.idp, standing.grounds(read_yaml(paths.run_yaml))
                )
        holder = best_run_id(root)
        assert (holder is None) == (not any(found.values()))
        if holder is not None:
            assert not any(one and one.beats(found[holder]) for one in found.values())
        assert collect(root) == []

    return check
