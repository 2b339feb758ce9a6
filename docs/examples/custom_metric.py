"""Shows: a metric of your own decides which epoch is BEST and when training stops."""

from __future__ import annotations

import numpy as np
import torch
from nnx import (
    Checkpoints,
    EarlyStopping,
    MetricSpec,
    MonitorSpec,
    Nets,
    NNCheckpoint,
    NNModel,
    NNModelParams,
    NNParams,
    NNTrainParams,
    register_metric,
)
from torch.utils.data import DataLoader, TensorDataset


class BalancedAccuracy:
    """The mean of the classes' recalls; counts add up over batches and parts."""

    def __init__(self):
        self.right, self.all = np.zeros(2, int), np.zeros(2, int)

    def update(self, target, prediction):
        self.all += np.bincount(target, minlength=2)
        self.right += np.bincount(target[target == prediction], minlength=2)

    def result(self):
        return float(np.mean(self.right / self.all)) if self.all.all() else None

    def merge(self, other):
        self.right += other.right
        self.all += other.all


register_metric(
    "example.balanced_accuracy", 1, lambda config: BalancedAccuracy(), input="labels", mode="max"
)


def rare(n: int, seed: int) -> TensorDataset:
    """One row in ten is of class 1."""
    generator = torch.Generator().manual_seed(seed)
    y = (torch.arange(n) % 10 == 0).long()
    return TensorDataset(torch.randn(n, 4, generator=generator) + 1.2 * y[:, None], y)


torch.manual_seed(0)
model = NNModel(
    NNParams(input_dim=4, output_dim=2, hidden_dims=[16], dropout_prob=0.0),
    NNModelParams(net=Nets.FEED_FWD),
)
metric = MetricSpec("example.balanced_accuracy", name="balanced")
monitor = MonitorSpec(metric="balanced", split="val")
run = model.train(
    NNTrainParams(
        n_epochs=60,
        seed=0,
        train_loader=DataLoader(rare(400, seed=1), batch_size=32, shuffle=True),
        val_loader=DataLoader(rare(400, seed=2), batch_size=100),
        metrics=[metric],
        monitor=monitor,
    ),
    callbacks=[EarlyStopping(monitor=monitor, patience=4)],
)

scores = {r.epoch_idx: r.val_edp.metrics["balanced"] for r in run.idps if r.val_edp is not None}
best = NNCheckpoint.load(run.id, Checkpoints.BEST).idp.epoch_idx
print(f"{len(scores)} of 60 epochs; BEST is epoch {best}, balanced accuracy {scores[best]:.3f}")
assert scores[best] == max(scores.values())
assert len(scores) == best + 1 + 4, "it stopped 4 epochs after the best one"
