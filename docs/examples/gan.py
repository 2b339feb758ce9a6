"""Shows: two optimizers with a step of your own train a GAN that finds both modes of its data."""

from __future__ import annotations

import torch
from nnx import (
    Losses,
    NNEvaluationDataPoint,
    NNModel,
    NNModelParams,
    NNOptimParams,
    NNParamGroupSpec,
    NNTrainerParams,
    Optims,
    PositionalInputs,
    Trainer,
)
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.utils.data import DataLoader, TensorDataset


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.G = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))
        self.D = nn.Sequential(nn.Linear(1, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, noise):
        return self.G(noise)


def step(ctx) -> NNEvaluationDataPoint:
    """The step owns both updates and reports each."""
    net = ctx.model.net.train()
    (real,) = ctx.batch
    fake = net.G(torch.randn(len(real), 4))
    ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)

    ctx.optimizers["D"].zero_grad()
    d_loss = bce(net.D(real), ones) + bce(net.D(fake.detach()), zeros)
    d_loss.backward()
    ctx.optimizers["D"].step()
    ctx.report_update("D")

    ctx.optimizers["G"].zero_grad()
    g_loss = bce(net.D(fake), ones)
    g_loss.backward()
    ctx.optimizers["G"].step()
    ctx.report_update("G")
    return NNEvaluationDataPoint(loss=float(d_loss.detach()), extra={"g": float(g_loss.detach())})


generator = torch.Generator().manual_seed(0)
side = torch.randint(0, 2, (512, 1), generator=generator) * 4.0 - 2.0
data = TensorDataset(side + 0.2 * torch.randn(512, 1, generator=generator))
torch.manual_seed(0)
model = NNModel(
    module=Gan(),
    params=NNModelParams(loss=Losses.MEAN_SQUARED_ERROR),
    batch_adapter=PositionalInputs(1),
)
optims = {
    name: NNOptimParams(
        name=Optims.ADAM,
        max_lr=2e-3,
        weight_decay=0.0,
        momentum=(0.5, 0.999),
        param_groups=[NNParamGroupSpec(name_pattern=f"{name}.*")],
    )
    for name in ("G", "D")
}
Trainer(model).train(
    NNTrainerParams(
        n_epochs=40, seed=3, optims=optims, train_loader=DataLoader(data, 32, shuffle=True)
    ),
    trainer_step_fn=step,
)

torch.manual_seed(1)
with torch.no_grad():
    made = model.net(torch.randn(1000, 4))
low, high = float((made < -1).float().mean()), float((made > 1).float().mean())
print(f"of 1000 samples {low:.0%} lie near -2 and {high:.0%} near 2")
assert low > 0.2
assert high > 0.2
