"""Small real models and runs, in a folder of their own."""

from __future__ import annotations

import os

import pytest
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
    Optims,
)
from torch.utils.data import DataLoader, TensorDataset

os.environ.setdefault("NNX_TQDM_DISABLE", "1")


def data(n=64, shuffle=True, dim=32):
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(0, 3, (n,), generator=generator)
    x = torch.randn(n, dim, generator=generator) + y[:, None]
    return DataLoader(TensorDataset(x, y), batch_size=16, shuffle=shuffle)


class Kit:
    """Models of 32 inputs and 3 classes, and parameters that train them."""

    data = staticmethod(data)
    net_params = NNParams(
        input_dim=32, output_dim=3, hidden_dims=[16, 32], dropout_prob=0.1,
        activation=Activations.RELU,
    )  # fmt: skip

    @classmethod
    def model(cls, seed=0, kind=NNModel, **options):
        torch.manual_seed(seed)
        params = NNModelParams(net=Nets.FEED_FWD, loss=Losses.CROSS_ENTROPY)
        return kind(net_params=cls.net_params, params=params, **options)

    @staticmethod
    def optim(**options):
        options = {"max_lr": 0.01, "weight_decay": 0.01, "momentum": (0.9, 0.999), **options}
        return NNOptimParams(name=Optims.ADAMW, **options)

    @classmethod
    def train_params(cls, n_epochs=2, **options):
        options.setdefault("train_loader", data())
        options.setdefault("val_loader", data(shuffle=False))
        return NNTrainParams(n_epochs=n_epochs, seed=7, optim=cls.optim(), **options)

    @staticmethod
    def weights(net):
        return {name: value.clone() for name, value in net.state_dict().items()}

    @staticmethod
    def same(left, right):
        """Equal bit for bit."""
        return list(left) == list(right) and all(torch.equal(left[k], right[k]) for k in left)


@pytest.fixture
def kit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Kit
