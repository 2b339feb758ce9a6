"""Shows: two processes train to the weights of one that reads both of their batches."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import torch
from nnx import Checkpoints, Nets, NNCheckpoint, NNModel, NNModelParams, NNParams, NNTrainParams
from nnx.distributed import DDP, init_process_group, shutdown, train_loader, validation_loader
from torch.utils.data import TensorDataset


def training(batch_size: int) -> tuple[NNModel, NNTrainParams]:
    """The same script in every process; ``batch_size`` rows for each of them."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(240, 5, generator=generator)
    rows = TensorDataset(X, (X.sum(1) > 0).long())
    torch.manual_seed(0)
    model = NNModel(
        NNParams(input_dim=5, output_dim=2, hidden_dims=[16], dropout_prob=0.0),
        NNModelParams(net=Nets.FEED_FWD),
    )
    return model, NNTrainParams(
        n_epochs=4,
        seed=0,
        train_loader=train_loader(rows, batch_size),
        val_loader=validation_loader(rows, batch_size),
    )


if "RANK" in os.environ:  # one of the two processes that torchrun started
    rank, world = init_process_group("gloo")
    assert world == 2
    model, params = training(batch_size=10)
    run = model.train(params, distributed=DDP(), salt="two processes")
    if rank == 0:
        print(f"run {run.id}")
    shutdown()
    sys.exit()

torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
two = subprocess.run([*torchrun, __file__], text=True, stdout=subprocess.PIPE, check=True)
id = re.search(r"^run (\w+)$", two.stdout, re.MULTILINE)[1]

model, params = training(batch_size=20)
model.train(params, salt="one process")
theirs = NNCheckpoint.load(id, Checkpoints.LAST).net_state
ours = model.net.state_dict()
largest = max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
print(f"2 processes: the largest difference is {largest:.1e}")
assert largest < 1e-5
