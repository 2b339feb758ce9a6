"""Shows: a diffusion model learns four clusters, and samples in few steps visit each of them."""

from __future__ import annotations

import torch
from nnx import (
    DiffusionMLP,
    Losses,
    NNModel,
    NNModelParams,
    NNOptimParams,
    NNTrainParams,
    NoiseSchedulers,
    diffusion_objective,
    set_seed,
)
from nnx.diffusion import sample_in_steps, stored_schedule
from torch.utils.data import DataLoader, TensorDataset

CENTRES = torch.tensor([[2.0, 2.0], [2.0, -2.0], [-2.0, 2.0], [-2.0, -2.0]])


def main() -> None:
    set_seed(0)
    points = CENTRES.repeat(500, 1) + 0.2 * torch.randn(2000, 2)
    model = NNModel(
        module=DiffusionMLP(input_dim=2, hidden_dims=[64, 64], time_embed_dim=16),
        params=NNModelParams(loss=Losses.MEAN_SQUARED_ERROR),
    )
    params = NNTrainParams(
        n_epochs=60,
        seed=0,
        train_loader=DataLoader(TensorDataset(points), batch_size=200, shuffle=True),
        optim=NNOptimParams.builder().adamw(max_lr=3e-3).build(),
    )
    objective = diffusion_objective(NoiseSchedulers.LINEAR(T=100, beta_max=0.1), seed=0)
    run = model.train(params, objective=objective)

    samples = sample_in_steps(
        model,
        stored_schedule(run.id),  # read from the run: sampling needs no arguments of training
        (1000, 2),
        steps=50,
        generator=torch.Generator().manual_seed(0),
    )
    distances = torch.cdist(samples, CENTRES)
    near = distances.min(dim=1).values < 1.0
    shares = torch.bincount(distances.argmin(dim=1)[near], minlength=4) / 10
    shown = " ".join(f"{share:.0f}%" for share in shares.tolist())
    print(f"of 1000 samples, near the four centres: {shown}")
    assert float(shares.min()) > 17
    assert float(shares.sum()) > 90


if __name__ == "__main__":
    main()
