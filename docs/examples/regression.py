"""Shows: a declared regression task leaves unmeasured targets out of loss and metrics."""

from __future__ import annotations

import math

import torch
from nnx import (
    Losses,
    MetricSpec,
    MonitorSpec,
    Nets,
    NNModel,
    NNModelParams,
    NNParams,
    NNTrainParams,
    TaskSpec,
)
from torch.utils.data import DataLoader, TensorDataset

generator = torch.Generator().manual_seed(0)
X = torch.randn(300, 4, generator=generator)
y = torch.stack([X.sum(1), X[:, 0] * X[:, 1]], 1)
y[::3, 1] = math.nan  # every third row lacks its second target

torch.manual_seed(0)
model = NNModel(
    NNParams(input_dim=4, output_dim=2, hidden_dims=[64], dropout_prob=0.0),
    NNModelParams(net=Nets.FEED_FWD, loss=Losses.MEAN_SQUARED_ERROR, task=TaskSpec.regression(2)),
)
batches = DataLoader(TensorDataset(X, y), batch_size=30)
run = model.train(
    NNTrainParams(
        n_epochs=40,
        seed=0,
        train_loader=batches,
        val_loader=batches,
        metrics=[MetricSpec("mae")],
        monitor=MonitorSpec(metric="mae", split="val"),
    )
)

record = model.evaluate(batches, metrics=[MetricSpec("mae")])
measured = ~y.isnan()
with torch.no_grad():
    by_hand = (model.net.eval()(X) - y)[measured].abs().mean()
print(
    f"{record.count} of {y.numel()} targets count; mean absolute error {record.metrics['mae']:.3f}"
)
assert record.count == int(measured.sum()) == 500
assert abs(record.metrics["mae"] - float(by_hand)) < 1e-6
assert record.metrics["mae"] < 0.3
assert record.accuracy is None
