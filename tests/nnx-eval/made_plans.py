"""A small classification to plan experiments with."""

from __future__ import annotations

import torch
from nnx import MetricSpec, MonitorSpec, Nets, NNModelParams, NNParams, NNTrainParams
from nnx.plans import ExperimentPlan

_draw = torch.Generator().manual_seed(0)
X = torch.randn(60, 4, generator=_draw)
Y = (X[:, 0] + 0.5 * torch.randn(60, generator=_draw) > 0).long()


def train_data():
    rows = torch.utils.data.TensorDataset(X[:40], Y[:40])
    return torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True)


def val_data():
    return [(X[40:50], Y[40:50]), (X[50:], Y[50:])]


def net(**changes) -> NNParams:
    values = {"input_dim": 4, "output_dim": 2, "hidden_dims": [8], "dropout_prob": 0.1}
    return NNParams(**{**values, **changes})


def training(**changes) -> NNTrainParams:
    values = {"n_epochs": 3, "metrics": [MetricSpec("nll")], "monitor": MonitorSpec("nll")}
    return NNTrainParams(**{**values, **changes})


def plan(**changes) -> ExperimentPlan:
    values = {
        "net": net(), "model": NNModelParams(net=Nets.FEED_FWD), "train": training(),
        "train_data": train_data, "val_data": val_data, "seed": 7,
    }  # fmt: skip
    return ExperimentPlan(**{**values, **changes})
