"""Small models and loaders that the tests share."""

from __future__ import annotations

import torch
from nnx import (
    Activations,
    Losses,
    Nets,
    NNModel,
    NNModelParams,
    NNMoEParams,
    NNParams,
    NNTrainParams,
    build_target_encoder,
    set_seed,
)
from nnx.paradigms import byol_objective, dino_objective
from torch.utils.data import DataLoader, TensorDataset


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X = numbers(21, 50, 6)
Y = torch.randint(0, 3, (50,), generator=torch.Generator().manual_seed(22))
COMMON = {"activation": Activations.RELU}


def loader(*tensors, batch=16, shuffle=True) -> DataLoader:
    return DataLoader(TensorDataset(*tensors), batch_size=batch, shuffle=shuffle)


def feed_forward(*, out=3, dropout=0.2, hidden=(16, 8), seed=11) -> NNModel:
    set_seed(seed)
    params = NNParams(
        input_dim=6, output_dim=out, hidden_dims=list(hidden), dropout_prob=dropout, **COMMON
    )
    return NNModel(
        net_params=params, params=NNModelParams(net=Nets.FEED_FWD, loss=Losses.CROSS_ENTROPY)
    )


def mixture(*, experts=4, top_k=2, seed=11, capacity=None) -> NNModel:
    set_seed(seed)
    params = NNMoEParams(
        input_dim=6, output_dim=3, hidden_dims=[8], dropout_prob=0.0, num_experts=experts,
        top_k=top_k, capacity_factor=capacity, **COMMON,
    )  # fmt: skip
    return NNModel(
        net_params=params, params=NNModelParams(net=Nets.FEED_FWD_MOE, loss=Losses.CROSS_ENTROPY)
    )


def self_distilled(kind, *, seed=11, momentum=0.9, dropout=0.0):
    """A net of 8 outputs and its objective, BYOL or DINO."""
    model = feed_forward(out=8, dropout=dropout, seed=seed)
    target = build_target_encoder(model.net)
    if kind == "dino":
        return model, dino_objective(target, ema_momentum=momentum)
    model.net._predictor = torch.nn.Linear(8, 8)
    return model, byol_objective(target, model.net._predictor, ema_momentum=momentum)


def training(*tensors, epochs=3, **more) -> NNTrainParams:
    tensors = tensors or (X, Y)
    return NNTrainParams(
        **{"n_epochs": epochs, "seed": 3, "train_loader": loader(*tensors), **more}
    )


def weights(model: NNModel) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.net.state_dict().items()}


def losses(run) -> list[float | None]:
    return [point.train_edp.loss for point in run.idps]
