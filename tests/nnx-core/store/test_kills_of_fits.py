"""``NNModel.train`` in real processes, killed at random moments and resumed.

The suite kills a few; ``nox -s faults`` kills hundreds (``NNX_KILLS``).
"""

from __future__ import annotations

import os
import random
import signal
import time
import traceback

import pytest
import torch
from nnx import NNModel
from nnx.enums import Activations, Checkpoints, Devices, Losses, Nets, Optims
from nnx.history import HistoryJournal, iter_history
from nnx.params import NNModelParams, NNOptimParams, NNParams, NNTrainParams
from nnx.provenance import ExperimentManifest
from nnx.store import NNCheckpoint, NNRun, RunWriter
from nnx.store.committed import NOTHING, committed_epoch
from nnx.store.listing import list_runs
from nnx.store.paths import RunPaths
from nnx.store.pointer import best_run_id
from nnx.store.points import read_manifest, step_is_newer
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

EPOCHS, BATCHES = 4, 6
KILLS = int(os.environ.get("NNX_KILLS", "5"))
FOLDER = 20  # kills in one runs folder


def fit(salt: str, source: str | None = None, kind: str = "table") -> None:
    """One fit with momentum, dropout, shuffling, BEST and points inside its epochs."""
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the model's first weights
    stream = torch.Generator().manual_seed(3)
    rows = TensorDataset(
        torch.randn(48, 4, generator=stream), torch.randint(0, 2, (48,), generator=stream)
    )
    loader = DataLoader(rows, 8, shuffle=True, generator=torch.Generator().manual_seed(5))
    resume = {}
    if source is not None:
        resume = {
            "resume_from_run_id": source, "resume_from_checkpoint": "latest",
            "resume_mode": "stateful", "resume_epochs": "planned",
        }  # fmt: skip
    model = NNModel(
        net_params=NNParams(
            input_dim=4, output_dim=2, hidden_dims=[8], dropout_prob=0.2,
            activation=Activations.RELU,
        ),
        params=NNModelParams(net=Nets.FEED_FWD, device=Devices.CPU, loss=Losses.CROSS_ENTROPY),
    )  # fmt: skip
    optim = NNOptimParams(name=Optims.ADAM, max_lr=0.01, weight_decay=0.0, momentum=(0.9, 0.99))
    params = NNTrainParams(
        n_epochs=EPOCHS, train_loader=loader, val_loader=DataLoader(rows, 48), seed=0,
        optim=optim, checkpoint_every=2, overwrite_existing=kind == "overwrite", **resume,
    )  # fmt: skip
    journal = HistoryJournal(retention=100, chunk_size=4) if kind == "journal" else None
    plan = ExperimentManifest(config={"kind": kind})
    model.train(params, salt=salt, history=journal, provenance=plan)


def start(
    salt: str, source: str | None = None, kind: str = "table", progress: int | None = None
) -> int:
    """Fork a process that trains; it tells ``progress`` of each commit, before and after."""
    child = os.fork()
    if child:
        return child
    try:
        if progress is not None:
            tell_commits(progress)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        fit(salt, source, kind)
    except BaseException:
        with open(f"error-{salt}", "w") as log:
            log.write(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def tell_commits(progress: int) -> None:
    for name, done in (("commit_step", b""), ("commit_epoch", b"e")):
        real = getattr(RunWriter, name)

        def commit(self, *args, _real=real, _done=done, **options):
            os.write(progress, b".")
            result = _real(self, *args, **options)
            os.write(progress, _done)
            return result

        setattr(RunWriter, name, commit)


def killed(salt: str, kind: str, moments: random.Random, duration: float) -> int:
    """Train and kill: at any moment, or just after a random commit has begun.

    The number of epochs that were committed for sure.
    """
    reading, writing = os.pipe()
    child = start(salt, kind=kind, progress=writing)
    os.close(writing)
    told = b""
    if moments.random() < 0.5:
        time.sleep(moments.uniform(0, duration))
    else:
        commits = moments.randint(1, 3 * EPOCHS)  # three an epoch
        while told.count(b".") < commits and (more := os.read(reading, 1)):
            told += more
        time.sleep(moments.uniform(0, 0.03))
    os.kill(child, signal.SIGKILL)
    end(child)
    with open(reading, "rb") as pipe:
        told += pipe.read()
    return told.count(b"e")


def end(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def by_salt(salt: str) -> NNRun | None:
    return next((NNRun.load(row.id) for row in list_runs() if row.salt == salt), None)


def same(left: object, right: object) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


@pytest.fixture(autouse=True)
def _quiet(root, monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")
    monkeypatch.setenv("NNX_RUNS", "")


@pytest.mark.timeout(0 if KILLS > 50 else 300)
def test_a_killed_fit_keeps_its_epochs_and_resumes_to_the_uninterrupted_one(
    check_sound, tmp_path, monkeypatch
):
    fit("whole")  # here, so that the processes below find what it imports
    began = time.perf_counter()
    assert end(start("timed")) == 0
    duration = time.perf_counter() - began
    whole = by_salt("whole")
    expected = NNCheckpoint.load_with_training_state(whole.id, Checkpoints.LAST)
    moments = random.Random(1)
    last_epochs: list[int] = []
    resumes = 0
    for kill in range(KILLS):
        if kill % FOLDER == 0:
            (tmp_path / f"folder{kill}").mkdir()
            monkeypatch.chdir(tmp_path / f"folder{kill}")
        kind = ("table", "journal", "overwrite")[kill % 3]
        salt = f"killed{kill}"
        if kind == "overwrite":
            assert end(start(salt, kind=kind)) == 0
        known = killed(salt, kind, moments, duration)
        assert not os.path.lexists("runs/best") or best_run_id() is not None
        run = by_salt(salt)
        if run is None:
            assert known == 0
            continue
        paths = RunPaths("runs", run.id)
        last = committed_epoch(paths)
        last_epochs.append(last)
        assert last + 1 >= known
        assert run.idps == [r for r in whole.idps if r.epoch_idx <= last]
        assert list(iter_history(run.id)) == run.idps
        best = read_manifest(run.id, Checkpoints.BEST)
        assert (NOTHING if best is None else best["record"]["epoch_idx"]) <= last
        if last < EPOCHS - 1 and (last != NOTHING or step_is_newer(paths)):
            resumes += 1
            check_resumed(kill, run, last, whole, expected)
        if kill % FOLDER == FOLDER - 1 or kill == KILLS - 1:
            check_sound("runs", batches=BATCHES)
    print(f"{KILLS} kills, {resumes} resumes; last committed epochs {sorted(last_epochs)}")
    assert resumes > 0 or KILLS < 4


def check_resumed(kill: int, run: NNRun, last: int, whole: NNRun, expected) -> None:
    """The next resume trains exactly what the killed process would have trained."""
    assert end(start(f"resumed{kill}", run.id)) == 0, f"see error-resumed{kill}"
    resumed = by_salt(f"resumed{kill}")
    whole_checkpoint, whole_state = expected
    checkpoint, state = NNCheckpoint.load_with_training_state(resumed.id, Checkpoints.LAST)
    assert same(dict(checkpoint.net_state), dict(whole_checkpoint.net_state))
    for part in ("optimizer_state", "rng_state", "components", "counters"):
        assert same(state[part], whole_state[part]), part
    assert resumed.idps == whole.idps[len(whole.idps) - len(resumed.idps) :]
    assert resumed.idps[0].epoch_idx == last + 1
    assert resumed.idps[0].batch_idx == 0


def test_processes_racing_to_train_one_configuration_leave_one_training():
    fit("warm")
    racers = [start("raced") for _ in range(3)]
    codes = sorted(end(racer) for racer in racers)
    assert codes == [0, 1, 1]
    run = by_salt("raced")
    assert len(run.idps) == EPOCHS * BATCHES
    with open("error-raced") as log:
        refusal = log.read()
    assert "RunBusyError" in refusal or "FileExistsError" in refusal
