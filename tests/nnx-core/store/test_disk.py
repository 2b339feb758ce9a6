"""Nothing changes the disk but through ``files.disk``, or a fault there would not be tried."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# A real training, its resume, an overwrite, a migration, a removal and a collection, while
# Python's own audit events say what the interpreter does to the disk.
WATCHED = """
import os, sys, threading
from nnx.utils import files

inside, missed, seen = threading.local(), [], set()
CHANGES = {"os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink",
           "os.truncate", "os.chmod", "os.utime", "shutil.rmtree", "shutil.move",
           "shutil.copyfile", "tempfile.mkstemp", "tempfile.mkdtemp"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
ROOT = os.path.abspath("runs")

def below(value):
    return isinstance(value, (str, os.PathLike)) and (
        os.path.abspath(os.fspath(value)).startswith(ROOT))

def watch(event, args):
    if event == "open":
        changes = bool(args[2] & WRITING) and below(args[0])
    else:
        changes = event in CHANGES and (any(map(below, args)) or event == "os.truncate")
    if changes:
        seen.add(event)
        if not getattr(inside, "disk", False):
            missed.append((event, args))

class Noting(files.Disk):
    pass

for name in vars(files.Disk):
    if not name.startswith("_"):
        def operation(self, *args, _real=getattr(files.Disk, name), **options):
            inside.disk = True
            try:
                return _real(self, *args, **options)
            finally:
                inside.disk = False
        setattr(Noting, name, operation)
files.disk = Noting()
sys.addaudithook(watch)

import torch
from nnx import (Devices, Losses, ModelCheckpoint, NNModel, NNModelParams, NNParams,
                 NNTrainParams, Nets)
from nnx.history import HistoryJournal, migrate_history
from nnx.enums import Activations
from nnx.provenance import ExperimentManifest
from nnx.store import NNCheckpoint, NNRun, cleanup, lease
from nnx.store.paths import RunPaths
from nnx.store.predictions import save_predictions

batches = [(torch.randn(4, 3), torch.randint(0, 2, (4,))) for _ in range(2)]

def train(**options):
    runtime = ("resume", "overwrite")
    more = {key: options.pop(key) for key in list(options) if key.startswith(runtime)}
    model = NNModel(
        net_params=NNParams(input_dim=3, output_dim=2, hidden_dims=[4], dropout_prob=0.0,
                            activation=Activations.RELU),
        params=NNModelParams(net=Nets.FEED_FWD, device=Devices.CPU, loss=Losses.CROSS_ENTROPY))
    params = NNTrainParams(n_epochs=8, train_loader=batches, val_loader=batches, seed=0,
                           checkpoint_every=1, **more)
    return model.train(params, **options)

plan = ExperimentManifest(config={"a": 1})
first = train(provenance=plan, callbacks=[ModelCheckpoint(epochs=[1])])
train(overwrite_existing=True, provenance=plan)
journal = train(salt="journal", history=HistoryJournal(retention=4, chunk_size=1))
train(resume_from_run_id=first.id, resume_from_checkpoint="last", salt="resumed")
NNRun.load(first.id).save()
NNCheckpoint.load(first.id, "last").save(first.id, "best")
NNCheckpoint.load(first.id, "last").to_file("runs/elsewhere/x.pt")
save_predictions(first.id, "val", targets=[1], predicted=[0])
migrate_history(first.id)
inside.disk = True  # this one is ours
os.symlink("nowhere", "runs/.best.0123456789ab")
inside.disk = False
cleanup.collect()
lease.remove(RunPaths.of(journal.id))
assert not missed, missed
print(*sorted(seen))
"""


@pytest.mark.skipif(os.name == "nt", reason="locks are filelock's there")
def test_every_change_of_a_runs_folder_goes_through_the_one_object(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WATCHED], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "TQDM_DISABLE": "1", "NNX_RUNS": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = set(done.stdout.splitlines()[-1].split())
    assert seen == {
        "open", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink",
    }  # fmt: skip
