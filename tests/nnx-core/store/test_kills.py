"""Real training processes, killed with SIGKILL at random moments."""

from __future__ import annotations

import os
import random
import signal
import time
import traceback

import pytest
import torch
from nnx.store import NNCheckpoint, NNRun, RunBusyError, RunWriter, read_point
from nnx.store.cleanup import collect
from nnx.store.committed import committed_epoch
from nnx.store.paths import RunPaths
from nnx.store.pointer import best_run_id

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

EPOCHS, BATCHES = 5, 2
KILLS = int(os.environ.get("NNX_KILLS", "24"))  # the benchmark session asks for hundreds


class Training:
    """A small exact training: weights, momentum and a random stream."""

    def __init__(self, parts, run, root):
        self.parts, self.run, self.root = parts, run, root
        self.net = torch.nn.Linear(4, 2)
        self.momentum = [torch.zeros_like(p) for p in self.net.parameters()]
        self.stream = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.zero_()
        self.epoch, self.batch = 0, 0
        self.records: list = []  # of the epoch that is running

    def restore(self, point):
        self.net.load_state_dict(point.checkpoint.net_state)
        state = point.training_state
        self.momentum = list(state["optimizer_state"]["momentum"])
        self.stream.set_state(state["rng_state"]["stream"])
        position = state.get("position") or {"epoch": point.completed_epoch + 1, "batch": 0}
        self.epoch, self.batch = position["epoch"], position["batch"]
        record = type(point.checkpoint.idp)
        self.records = [record.from_state(r) for r in position.get("records", ())]

    def fit(self, on_step=lambda: None):
        with RunWriter.open(self.run, self.root) as writer:
            writer.extend(self.records)
            on_step()
            for epoch in range(self.epoch, EPOCHS):
                for batch in range(self.batch, BATCHES):
                    self.step()
                    on_step()
                    writer.append(self.record(epoch, batch))
                    if batch < BATCHES - 1:
                        rows = [r.state() for r in list(writer.idps)[-(batch + 1) :]]
                        position = {"epoch": epoch, "batch": batch + 1, "records": rows}
                        writer.commit_step(*self.point(writer), position=position)
                self.batch = 0
                checkpoint, state = self.point(writer)
                writer.commit_epoch(
                    checkpoint, state, best=True, phases=["first"] if epoch == 0 else (),
                    deferred={f"custom_e{epoch}": checkpoint} if epoch == 1 else {},
                )  # fmt: skip
            return writer.finish()

    def step(self):
        with torch.no_grad():
            for parameter, moment in zip(self.net.parameters(), self.momentum):
                moment.mul_(0.9).add_(torch.randn(parameter.shape, generator=self.stream))
                parameter.sub_(moment, alpha=0.01)

    def record(self, epoch, batch):
        record = self.parts.record(epoch, batch)
        loss = float(self.net.weight.detach().sum())
        return type(record)(
            lr=0.01, iter_idx=epoch * BATCHES + batch, epoch_idx=epoch, batch_idx=batch,
            train_edp=record.train_edp.with_loss(loss), val_edp=record.val_edp,
        )  # fmt: skip

    def point(self, writer):
        last = writer.idps[-1]
        state = {
            "optimizer_state": {"momentum": self.momentum},
            "rng_state": {"stream": self.stream.get_state()},
            "completed_epoch": last.epoch_idx,
            "counters": {"global_step": last.iter_idx + 1},
        }
        checkpoint = NNCheckpoint(
            net_params=self.run.net, model_params=self.run.model, idp=last,
            net_state=self.net.state_dict(),
        )  # fmt: skip
        return checkpoint, state


@pytest.fixture(autouse=True)
def _positions(monkeypatch):
    real = RunWriter.commit_step

    def commit_step(self, checkpoint, state, *, position):
        return real(self, checkpoint, {**state, "position": position})

    monkeypatch.setattr(RunWriter, "commit_step", commit_step)


def in_child(act) -> tuple[int, int]:
    """Fork; the child says "ready" through the pipe and runs ``act(ready)``."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    code = 1
    try:
        os.close(reading)
        act(lambda: os.write(writing, b"r"))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def finish(child: int, reading: int) -> int:
    os.close(reading)
    return os.waitpid(child, 0)[1]


def test_a_killed_run_keeps_its_epochs_and_continues_exactly(parts, root, check_sound):
    whole = Training(parts, parts.run(EPOCHS, salt="whole"), root)
    started = time.perf_counter()
    whole_run = whole.fit()
    duration = time.perf_counter() - started
    moments = random.Random(0)
    seen = set()
    for kill in range(KILLS):
        run = parts.run(EPOCHS, salt=f"killed {kill}")
        child, reading = in_child(Training(parts, run, root).fit)
        for _ in range(moments.randint(1, 1 + EPOCHS * BATCHES)):  # however fast it goes
            assert os.read(reading, 1) == b"r"
        time.sleep(moments.uniform(0, 2 * duration / (EPOCHS * BATCHES)))
        os.kill(child, signal.SIGKILL)
        finish(child, reading)
        paths = RunPaths(root, run.id)
        if not os.path.exists(paths.run_yaml):
            continue
        loaded = NNRun.load(run.id, root)
        last = committed_epoch(paths)
        assert loaded.idps == whole_run.idps[: (last + 1) * BATCHES]
        seen.add(last)
        resumed = Training(parts, parts.run(EPOCHS, salt=f"resumed {kill}"), "resumed")
        try:
            resumed.restore(read_point(run.id, "latest", root))
        except FileNotFoundError:
            assert last == -1  # killed before its first point
        continued = resumed.fit()
        for name, tensor in whole.net.state_dict().items():
            assert torch.equal(resumed.net.state_dict()[name], tensor)
        assert all(map(torch.equal, resumed.momentum, whole.momentum))
        assert torch.equal(resumed.stream.get_state(), whole.stream.get_state())
        assert continued.idps == whole_run.idps[len(whole_run.idps) - len(continued.idps) :]
    check_sound(root)
    assert best_run_id(root) is not None
    assert collect(root) == []
    if KILLS >= 24:
        assert len(seen) > 1  # the kills did hit different epochs


def test_two_processes_racing_for_a_run_leave_exactly_one_training(parts, root):
    run = parts.run(EPOCHS, salt="raced")
    go_reading, go_writing = os.pipe()

    def race(ready):
        os.close(go_writing)
        ready()
        os.read(go_reading, 1)  # returns for all when the parent closes
        try:
            Training(parts, run, root).fit()
        except (RunBusyError, FileExistsError):
            os._exit(42)

    racers = [in_child(race) for _ in range(4)]
    for _, reading in racers:
        assert os.read(reading, 1) == b"r"
    os.close(go_writing)
    codes = sorted(os.waitstatus_to_exitcode(finish(*racer)) for racer in racers)
    os.close(go_reading)
    assert codes == [0, 42, 42, 42]
    assert len(NNRun.load(run.id).idps) == EPOCHS * BATCHES


def test_a_lease_ends_with_its_process_though_a_forked_worker_lives_on(parts, root):
    run = parts.run(EPOCHS, salt="leased")

    def hold(ready):
        with RunWriter.open(run, root):
            worker = os.fork()  # as a DataLoader does
            if worker == 0:
                time.sleep(3)
                os._exit(0)
            ready()
            time.sleep(30)

    child, reading = in_child(hold)
    os.read(reading, 1)
    with pytest.raises(RunBusyError):
        run.ensure_writable()
    os.kill(child, signal.SIGKILL)
    finish(child, reading)
    run.ensure_writable()
