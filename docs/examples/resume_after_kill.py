"""Shows: a training killed without warning resumes to the very bits of one left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import torch
from nnx import (
    Callback,
    Checkpoints,
    Nets,
    NNCheckpoint,
    NNModel,
    NNModelParams,
    NNParams,
    NNTrainParams,
)
from torch.utils.data import DataLoader, TensorDataset


def training(**resume):
    """A model and its training; dropout and shuffling draw random numbers all along."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(128, 5, generator=generator)
    rows = TensorDataset(X, (X.sum(1) > 0).long())
    torch.manual_seed(0)
    model = NNModel(
        NNParams(input_dim=5, output_dim=2, hidden_dims=[16], dropout_prob=0.3),
        NNModelParams(net=Nets.FEED_FWD),
    )
    loader = DataLoader(rows, batch_size=16, shuffle=True)
    return model, NNTrainParams(n_epochs=6, seed=1, train_loader=loader, **resume)


class KillMe(Callback):
    """Dies in the middle of the fourth epoch, as a power cut would have it."""

    def on_epoch_begin(self, ctx):
        if ctx.epoch == 3:
            print(ctx.run.id, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


if len(sys.argv) > 1:
    model, params = training()
    model.train(params, callbacks=[KillMe()], salt="killed")

child = subprocess.run([sys.executable, __file__, "die"], stdout=subprocess.PIPE, text=True)
assert child.returncode == -signal.SIGKILL
killed = child.stdout.split()[-1]
committed = NNCheckpoint.load(killed, Checkpoints.LAST).idp.epoch_idx + 1

resumed, params = training(resume_from_run_id=killed, resume_epochs="planned")
run = resumed.train(params, salt="resumed")
whole, params = training()
whole.train(params, salt="left alone")

print(f"killed after {committed} committed epochs of 6, resumed as {run.id[:8]}")
pairs = zip(resumed.net.parameters(), whole.net.parameters())
assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
print("the weights are equal bit for bit")
