"""Shows: an objective of one method trains what no (inputs, target) loss describes."""

from __future__ import annotations

import torch
from nnx import (
    Losses,
    LossTerm,
    NNModel,
    NNModelParams,
    NNTrainParams,
    Objective,
    ObjectiveContext,
    ObjectiveResult,
    PositionalInputs,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 12))

    def forward(self, x):
        return self.decoder(self.encoder(x))


class Reconstruction(Objective):
    """Squared error of the reconstruction, and a light penalty on the code."""

    def __call__(self, ctx: ObjectiveContext) -> ObjectiveResult:
        (x,) = ctx.batch
        code = ctx.model.net.encoder(x)
        error = (ctx.model.net.decoder(code) - x).square().mean(1)
        # A term is a sum and what it is a mean over, so that uneven batches add up.
        return ObjectiveResult(
            terms=(
                LossTerm("reconstruction", error.sum(), len(x)),
                LossTerm("code", code.square().mean(1).sum(), len(x), weight=1e-3),
            )
        )


generator = torch.Generator().manual_seed(0)
X = torch.randn(256, 3, generator=generator) @ torch.randn(3, 12, generator=generator) / 2
torch.manual_seed(0)
model = NNModel(
    module=Autoencoder(),
    params=NNModelParams(loss=Losses.MEAN_SQUARED_ERROR),
    batch_adapter=PositionalInputs(1),
)
run = model.train(
    NNTrainParams(
        n_epochs=60,
        seed=0,
        train_loader=DataLoader(TensorDataset(X), batch_size=24, shuffle=True),
    ),
    objective=Reconstruction(),
)

with torch.no_grad():
    left = (model.net(X) - X).square().mean() / X.var()
print(f"12 numbers through 3: {float(left):.1%} of the variance is lost")
assert left < 0.1
