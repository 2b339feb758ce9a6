"""Shows: a classifier trains, is scored on data it never saw, and is read back from disk."""

from __future__ import annotations

import torch
from nnx import (
    Checkpoints,
    Nets,
    NNCheckpoint,
    NNModel,
    NNModelParams,
    NNParams,
    NNRun,
    NNTrainParams,
)
from torch.utils.data import DataLoader, TensorDataset


def spirals(n: int, seed: int) -> TensorDataset:
    """Three interleaved arms, which no straight line separates."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 3
    radius = torch.rand(n, generator=generator)
    angle = 4 * radius + y * 2 * torch.pi / 3 + 0.1 * torch.randn(n, generator=generator)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], 1), y)


torch.manual_seed(0)
model = NNModel(
    NNParams(input_dim=2, output_dim=3, hidden_dims=[32, 32], dropout_prob=0.0),
    NNModelParams(net=Nets.FEED_FWD),
)
run = model.train(
    NNTrainParams(
        n_epochs=25,
        seed=0,
        train_loader=DataLoader(spirals(600, seed=1), batch_size=32, shuffle=True),
        val_loader=DataLoader(spirals(300, seed=2), batch_size=100),
    )
)

test = DataLoader(spirals(300, seed=3), batch_size=100)
accuracy = model.evaluate(test).accuracy
assert accuracy > 0.9, accuracy

loaded = NNRun.load(run.id)
best = NNModel.from_checkpoint(NNCheckpoint.load(loaded.id, Checkpoints.BEST))
print(f"accuracy on unseen points: {accuracy:.3f}; of BEST: {best.evaluate(test).accuracy:.3f}")
assert best.evaluate(test).accuracy > 0.9
