"""Trains on sampled nodes, alone or as one of two processes; run by test_ranks.py."""

from __future__ import annotations

import os
import sys

import torch
from nnx import (
    Activations,
    Losses,
    Nets,
    NNModel,
    NNModelParams,
    NNOptimParams,
    NNParams,
    NNTrainParams,
    set_seed,
)
from nnx.distributed import DDP, init_process_group, shutdown
from nnx.graph import NeighborBatches
from torch_geometric.datasets import KarateClub

os.environ["NNX_TQDM_DISABLE"] = "1"
together = "RANK" in os.environ
rank, world = init_process_group("gloo") if together else (0, 1)
graph = KarateClub()[0]
set_seed(0)
shape = NNParams(input_dim=34, output_dim=4, hidden_dims=[8], dropout_prob=0.0,
                 activation=Activations.RELU)  # fmt: skip
model = NNModel(
    net_params=shape, params=NNModelParams(net=Nets.GRAPH_SAGE, loss=Losses.CROSS_ENTROPY)
)


def loader(nodes, *, shuffle: bool) -> NeighborBatches:
    return NeighborBatches(
        graph, [3, 3], nodes=nodes, batch_size=8 // world, shuffle=shuffle, seed=5
    )


run = model.train(
    NNTrainParams(
        n_epochs=2, seed=0, optim=NNOptimParams.builder().sgd(max_lr=0.1).build(),
        train_loader=loader(range(32), shuffle=True), val_loader=loader(range(34), shuffle=False),
    ),
    distributed=DDP() if together else None,
)  # fmt: skip
if rank == 0:
    torch.save(
        {"weights": model.net.state_dict(), "val": [p.val_edp.loss for p in run.idps if p.val_edp]},
        sys.argv[1],
    )
if together:
    shutdown()
