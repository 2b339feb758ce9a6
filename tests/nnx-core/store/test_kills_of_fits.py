"""``NNModel.train`` in real processes, killed at random moments and resumed."""

from __future__ import annotations

import os
import random
import signal
import time
import traceback

import pytest
import torch
from nnx.enums import Checkpoints, Losses, Nets
from nnx.params import NNModelParams, NNParams, NNTrainParams
from nnx.store import NNCheckpoint, NNRun, RunWriter
from nnx.store.committed import NOTHING, committed_epoch
from nnx.store.paths import RunPaths
from nnx.store.points import read_manifest, step_is_newer

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

EPOCHS = 4
KILLS = int(os.environ.get("NNX_KILLS", "24")) // 6


def fit(salt: str, source: str | None = None) -> None:
    """One fit with momentum, dropout, shuffling, BEST and points inside its epochs."""
    from nnx import NNModel
    from nnx.enums import Activations, Devices, Optims
    from nnx.params import NNOptimParams
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(1)
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
        optim=optim, checkpoint_every=2, **resume,
    )  # fmt: skip
    model.train(params, salt=salt)


def start(salt: str, source: str | None = None, progress: int | None = None) -> int:
    """Fork a process that trains; it writes a byte to ``progress`` at each commit."""
    child = os.fork()
    if child:
        return child
    try:
        if progress is not None:
            tell_commits(progress)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        fit(salt, source)
    except BaseException:
        with open(f"error-{salt}", "w") as log:
            log.write(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def tell_commits(progress: int) -> None:
    for name in ("commit_step", "commit_epoch"):
        real = getattr(RunWriter, name)

        def commit(self, *args, _real=real, **options):
            os.write(progress, b".")
            return _real(self, *args, **options)

        setattr(RunWriter, name, commit)


def killed_inside(salt: str, moments: random.Random) -> None:
    """Train until a random commit has begun, and kill a moment later."""
    reading, writing = os.pipe()
    child = start(salt, progress=writing)
    os.close(writing)
    for _ in range(moments.randint(1, 3 * EPOCHS)):  # three commits an epoch
        os.read(reading, 1)
    time.sleep(moments.uniform(0, 0.03))
    os.kill(child, signal.SIGKILL)
    os.close(reading)
    end(child)


def end(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def by_salt(salt: str) -> NNRun | None:
    return next((run for run in NNRun.all() if run.salt == salt), None)


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


def test_a_killed_fit_keeps_its_epochs_and_resumes_to_the_uninterrupted_one(check_sound):
    assert end(start("whole")) == 0
    whole = by_salt("whole")
    expected, expected_state = NNCheckpoint.load_with_training_state(whole.id, Checkpoints.LAST)
    moments = random.Random(1)
    resumes = 0
    for kill in range(KILLS):
        killed_inside(f"killed{kill}", moments)
        killed = by_salt(f"killed{kill}")
        if killed is None:
            continue
        paths = RunPaths("runs", killed.id)
        last = committed_epoch(paths)
        assert killed.idps == [r for r in whole.idps if r.epoch_idx <= last]
        best = read_manifest(killed.id, Checkpoints.BEST)
        assert (NOTHING if best is None else best["record"]["epoch_idx"]) <= last
        if last == EPOCHS - 1 or (last == NOTHING and not step_is_newer(paths)):
            continue
        resumes += 1
        assert end(start(f"resumed{kill}", killed.id)) == 0, f"see error-resumed{kill}"
        resumed = by_salt(f"resumed{kill}")
        checkpoint, state = NNCheckpoint.load_with_training_state(resumed.id, Checkpoints.LAST)
        assert same(dict(checkpoint.net_state), dict(expected.net_state))
        for part in ("optimizer_state", "rng_state", "components", "counters"):
            assert same(state[part], expected_state[part]), part
        assert resumed.idps == whole.idps[len(whole.idps) - len(resumed.idps) :]
        assert resumed.idps[0].epoch_idx == last + 1
        assert resumed.idps[0].batch_idx == 0
    assert resumes > 0 or KILLS < 4
    check_sound("runs", batches=6)


def test_processes_racing_to_train_one_configuration_leave_one_training():
    racers = [start("raced") for _ in range(3)]
    codes = sorted(end(racer) for racer in racers)
    assert codes == [0, 1, 1]
    run = by_salt("raced")
    assert len(run.idps) == EPOCHS * 6
    with open("error-raced") as log:
        refusal = log.read()
    assert "RunBusyError" in refusal or "FileExistsError" in refusal
