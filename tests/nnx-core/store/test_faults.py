"""Every operation on the disk fails once, and every one is the last before a SIGKILL.

By default each sweep takes a part of the operations; ``nox -s faults`` (or
``NNX_THOROUGH=1``) takes all of them, which is a matter of minutes.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from nnx.enums import Checkpoints
from nnx.history import HistoryJournal, iter_history, migrate_history
from nnx.provenance import ExperimentManifest
from nnx.records import ResumeStatus
from nnx.store import NNCheckpoint, NNRun, RunWriter, inherited, lease
from nnx.store.cleanup import collect
from nnx.store.committed import NOTHING, committed_epoch
from nnx.store.dcp import ShardWriter, save_planner
from nnx.store.paths import RunPaths
from nnx.store.pointer import best_run_id
from nnx.store.points import read_manifest
from nnx.store.shards import Shards
from nnx.utils import files

sys.path.insert(0, str(Path(__file__).parents[2]))
from failing_disk import FAULTS, FailingDisk, act, killed

THOROUGH = os.environ.get("NNX_THOROUGH") == "1"


class Scene:
    """A runs folder as it is before, something done to it, and what must hold after."""

    history: HistoryJournal | None = None
    options: dict = {}  # noqa: RUF012
    links = True

    def __init__(self, parts, root, committed):
        self.parts, self.root, self.committed = parts, root, committed
        self.run = parts.run(8, salt="the one")
        self.paths = RunPaths(root, self.run.id)

    def prepare(self):
        """Another run, which owns ``best``."""
        self.fit(self.parts.run(8, salt="first"), errors=[0.4])

    def act(self):
        self.fit(self.run, history=self.history, **self.options)

    def check(self, error):
        if error is not None:  # nobody is left to release it after a kill
            assert self.paths.exists() or not os.path.lexists(self.paths.dir)
        best = read_manifest(self.run.id, "best", self.root)
        if self.paths.exists():
            assert (best["record"]["epoch_idx"] if best else NOTHING) == committed_epoch(self.paths)

    def fit(self, run, errors=(0.3, 0.2), **options):
        """Phases, BEST, points inside the epochs, a callback's checkpoint, provenance."""
        parts = self.parts
        plan = ExperimentManifest(config={"salt": run.salt})
        with RunWriter.open(run, self.root, provenance=plan, **options) as writer:
            for epoch, error in enumerate(errors):
                writer.append(parts.record(epoch, 0))
                inside = parts.state(epoch)
                inside["counters"] = {"global_step": 2 * epoch + 1}
                writer.commit_step(parts.checkpoint(epoch), inside)
                writer.append(parts.record(epoch, 1, error=error))
                writer.commit_epoch(
                    parts.checkpoint(epoch, idp=writer.idps[-1]), parts.state(epoch),
                    phases=[(Checkpoints.FIRST, Checkpoints.Q1)[epoch]], best=True,
                    deferred={f"custom_e{epoch}": parts.checkpoint(epoch)},
                )  # fmt: skip
                self.committed(epoch)
            writer.finish()


class Table(Scene):
    pass


class Journal(Scene):
    history = HistoryJournal(retention=4, chunk_size=1)


class Copies(Scene):
    """The filesystem has no hard links."""

    links = False


class Sharded(Scene):
    """The tensors of each epoch are in files of their own."""

    def fit(self, run, errors=(0.3, 0.2), **options):
        if run is not self.run:
            super().fit(run, errors, **options)
            return
        parts = self.parts
        with RunWriter.open(run, self.root, **options) as writer:
            for epoch, error in enumerate(errors):
                writer.append(parts.record(epoch, 0))
                writer.append(parts.record(epoch, 1, error=error))
                whole = parts.checkpoint(epoch, idp=writer.idps[-1])
                tensors = {f"net/{name}": tensor for name, tensor in whole.net_state.items()}
                weights = {name: {"$shard": f"net/{name}"} for name in whole.net_state}
                checkpoint = dataclasses.replace(whole, net_state=weights)
                folder = writer.shard_folder()
                try:
                    writer.commit_epoch(
                        checkpoint, parts.state(epoch), sharded=write_shards(folder, tensors),
                        phases=[(Checkpoints.FIRST, Checkpoints.Q1)[epoch]], best=True,
                        deferred={f"custom_e{epoch}": checkpoint},
                    )  # fmt: skip
                except BaseException:
                    writer.drop_shards(folder)
                    raise
                self.committed(epoch)
            writer.finish()

    def check(self, error):
        super().check(error)
        for tag in ("last", "best", "first", "q1", "custom_e0", "custom_e1"):
            found = NNCheckpoint.load(self.run.id, tag, self.root)
            if found is not None:
                wanted = self.parts.checkpoint(found.idp.epoch_idx).net_state
                assert all(torch.equal(found.net_state[n], t) for n, t in wanted.items())


def write_shards(folder, tensors):
    """What the processes of a fit write together, by one of them."""
    storage, planner = ShardWriter(folder, 0), save_planner()
    planner.set_up_planner(tensors, is_coordinator=True)
    (plan,), metadata = planner.create_global_plan([planner.create_local_plan()])
    written = storage.write_data(planner.finish_plan(plan), planner).wait()
    storage.finish(metadata, [written])
    return Shards(folder, storage.digests)


class Continued(Scene):
    """The best of another run is taken over, and none of the own epochs is better."""

    def act(self):
        parts, status = self.parts, ResumeStatus(mode="stateful")
        source = parts.run(8, salt="first").id
        best = inherited.find(source, self.run.state(), until=0, root=self.root)
        run = self.run.with_resume_status(status)
        with RunWriter.open(run, self.root, history=self.history, best=best) as writer:
            writer.extend(parts.record(1, batch, error=0.5) for batch in range(2))
            writer.commit_epoch(parts.checkpoint(1, idp=writer.idps[-1]), parts.state(1))
            self.committed(1)
            writer.finish()

    def check(self, error):
        if self.paths.exists() and committed_epoch(self.paths) == 1:
            found = NNCheckpoint.verify(self.run.id, Checkpoints.BEST, self.root)
            assert found["origin"] == {"run_id": self.parts.run(8, salt="first").id, "epoch": 0}


class Overwrite(Scene):
    """The run that owns ``best`` is replaced."""

    options = {"overwrite": True}  # noqa: RUF012

    def prepare(self):
        super().prepare()
        self.fit(self.run)

    def check(self, error):
        assert best_run_id(self.root) is not None
        if type(self) in (Overwrite, OverwriteJournal):  # the old run, or what the new committed
            held = NNRun.load(self.run.id, self.root).idps
            assert held or read_manifest(self.run.id, "step", self.root)


class OverwriteJournal(Overwrite):
    history = HistoryJournal(retention=4, chunk_size=1)

    def prepare(self):
        Scene.prepare(self)
        self.fit(self.run, history=self.history)


class Remove(Overwrite):
    def act(self):
        lease.remove(self.paths)

    def check(self, error):
        super().check(error)
        if not self.paths.exists():
            assert not os.path.lexists(self.paths.dir)
            assert best_run_id(self.root) == self.parts.run(8, salt="first").id


class Collect(Overwrite):
    """What killed processes leave behind is removed."""

    def prepare(self):
        super().prepare()
        checkpoints = self.paths.checkpoints
        shutil.copytree(self.paths.dir, os.path.join(self.root, ".trash-x-01234567"))
        os.makedirs(os.path.join(self.root, "reserved"))
        for path in (
            f"{self.root}/reserved/.history-committed-by-last", f"{self.root}/.x.0123456789ab",
            f"{self.paths.dir}/.run.yaml.0123456789ab", f"{checkpoints}/last.pt.opt.{'0' * 32}.pt",
            f"{checkpoints}/.last.pt.opt.pt.0123456789ab", f"{checkpoints}/q2.pt.staged",
        ):  # fmt: skip
            with open(path, "w"):
                pass
        for name in ("best.pt", "best.pt.manifest.json"):  # a writer died before its renames
            os.rename(f"{checkpoints}/{name}", f"{checkpoints}/{name}.staged")
        with open(self.paths.idps_csv, "a") as table:
            table.write("4,0.1,4,2,0,1.0,0.75\n")
        os.unlink(f"{self.root}/best")
        os.symlink(self.parts.run(8, salt="first").id, f"{self.root}/best")

    def act(self):
        collect(self.root)

    def check(self, error):
        assert committed_epoch(self.paths) == 1
        collect(self.root)
        assert best_run_id(self.root) == self.run.id


class Save(Overwrite):
    def act(self):
        NNRun.load(self.run.id, self.root).save(self.root)

    def check(self, error):
        assert len(NNRun.load(self.run.id, self.root).idps) == 4


class Label(Overwrite):
    """A run is given a name and tags."""

    def act(self):
        NNRun.load(self.run.id, self.root).label(name="new", tags=["t"], root=self.root)

    def check(self, error):
        run = NNRun.load(self.run.id, self.root)
        assert (run.name, run.tags) in ((None, ()), ("new", ("t",)))
        assert run.finished
        assert len(run.idps) == 4


class Checkpoint(Overwrite):
    """One tag is written again, outside of a fit."""

    def act(self):
        fields = {"optimizer_state": {"x": 1}, "completed_epoch": 1}
        self.parts.checkpoint(1, fill=1.0).save(self.run.id, Checkpoints.Q1, self.root, **fields)

    def check(self, error):
        assert NNCheckpoint.verify(self.run.id, Checkpoints.Q1, self.root)["generation"] in (1, 2)


class Migrate(Overwrite):
    def act(self):
        migrate_history(self.run.id, self.root, spec=Journal.history)

    def check(self, error):
        records = list(iter_history(self.run.id, self.root))
        assert [record.epoch_idx for record in records] == [0, 0, 1, 1]
        migrate_history(self.run.id, self.root, spec=Journal.history)
        assert list(iter_history(self.run.id, self.root)) == records


@pytest.fixture
def sweep(parts, tmp_path, monkeypatch, check_sound):
    """Do a scene again and again, each time with the fault at another operation."""

    def prepared(scene, name):
        root = str(tmp_path / name)
        made = scene(parts, root, lambda epoch: None)
        if os.path.isdir(f"{tmp_path}/base"):
            shutil.copytree(f"{tmp_path}/base", root, symlinks=True)
        else:
            made.prepare()
        return made

    def failed(made, disk):
        """Act with one failure; the last committed epoch and the error."""
        epochs = [NOTHING]
        made.committed = epochs.append
        opened = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
        error = None
        try:
            act(made.act, disk, monkeypatch)
        except (OSError, KeyboardInterrupt) as caught:
            error = caught
        assert disk.error is not None
        if error is not None:
            # What failed is what is raised, not what failed while cleaning up after it.
            assert disk.error in (error, error.__cause__, error.__context__)
        if opened:
            assert len(os.listdir("/proc/self/fd")) == opened
        if disk.done[disk.at - 1] not in ("unlink", "rmdir") and not isinstance(made, Collect):
            for where, _, names in os.walk(made.root):
                for name in names:
                    leftover = os.path.join(where, name)
                    assert not files.is_temporary_name(name), leftover
        return epochs[-1], error

    def after_kill(made, disk):
        """Act in a process that is killed; the last epoch it committed."""
        reading, writing = os.pipe()
        made.committed = lambda epoch: os.write(writing, bytes([epoch]))
        killed(made.act, disk, monkeypatch)
        os.close(writing)
        with open(reading, "rb") as pipe:
            epochs = pipe.read()
        return (epochs[-1] if epochs else NOTHING), None

    def run(scene, fault, stride):
        base = prepared(scene, "base")
        counted = prepared(scene, "counted")
        disk = FailingDisk(links=scene.links)
        act(counted.act, disk, monkeypatch)
        counted.check(None)
        check_sound(counted.root)
        first = 1 + list(FAULTS).index(fault) * stride // len(FAULTS)
        operations = range(1, len(disk.done) + 1)
        for at in operations if THOROUGH else operations[first - 1 :: stride]:
            made = prepared(scene, f"at-{at}")
            failing = FailingDisk(at, FAULTS[fault], scene.links)
            committed, error = (after_kill if fault == "killed" else failed)(made, failing)
            try:
                made.check(error)
                check_sound(made.root, committed={made.run.id: committed})
                if scene in (Table, Journal, Copies, Sharded, Overwrite):  # nothing is in the way
                    made.committed = lambda epoch: None
                    made.fit(made.run, history=made.history, overwrite=True)
                    check_sound(made.root, committed={made.run.id: 1})
            except BaseException as problem:
                problem.args = (f"{disk.done[at - 1]}, operation {at}: {error!r}", *problem.args)
                raise
            shutil.rmtree(made.root)
        assert base.root.endswith("base")

    return run


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("scene", "stride"),
    [
        (Table, 36), (Journal, 36), (Copies, 43), (Sharded, 43), (Continued, 9),
        (Overwrite, 43), (OverwriteJournal, 47), (Remove, 5),
        (Collect, 5), (Save, 3), (Label, 2), (Checkpoint, 4), (Migrate, 5),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_whatever_fails_every_committed_epoch_is_kept(sweep, scene, stride, fault):
    if fault == "killed" and not hasattr(os, "fork"):
        pytest.skip("needs fork")
    sweep(scene, fault, stride)
