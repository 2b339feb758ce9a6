"""Small real problems, and a hand-written loop to compare with."""

from __future__ import annotations

import os

import pytest
import torch
from nnx import (
    Activations,
    Devices,
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


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)


def blobs(n=96, dim=6, classes=3, seed=0):
    """Labelled points around one centre per class."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=generator)
    centres = torch.randn(classes, dim, generator=generator) * 2
    return centres[y] + torch.randn(n, dim, generator=generator), y


def loader(n=96, batch_size=16, shuffle=True, seed=0, **kwargs):
    return DataLoader(
        TensorDataset(*blobs(n, seed=seed)), batch_size=batch_size, shuffle=shuffle, **kwargs
    )


def model(seed=0, dropout=0.2, **kwargs):
    torch.manual_seed(seed)
    return NNModel(
        net_params=NNParams(
            input_dim=6,
            output_dim=3,
            hidden_dims=[16],
            dropout_prob=dropout,
            activation=Activations.RELU,
        ),
        params=NNModelParams(
            net=Nets.FEED_FWD, device=Devices.CPU, loss=Losses.CROSS_ENTROPY, **kwargs
        ),
    )


def train_params(n_epochs=3, *, seed=7, optim=None, **kwargs):
    kwargs.setdefault("train_loader", loader())
    kwargs.setdefault("val_loader", loader(48, shuffle=False, seed=1))
    return NNTrainParams(n_epochs=n_epochs, seed=seed, optim=optim or adam(), **kwargs)


def adam(**kwargs):
    kwargs.setdefault("max_lr", 0.01)
    kwargs.setdefault("weight_decay", 0.0)
    kwargs.setdefault("momentum", (0.9, 0.999))
    return NNOptimParams(name=Optims.ADAM, **kwargs)


class Toolbox:
    """The helpers above, as one fixture."""

    blobs = staticmethod(blobs)
    loader = staticmethod(loader)
    model = staticmethod(model)
    train_params = staticmethod(train_params)
    adam = staticmethod(adam)

    @staticmethod
    def weights(net):
        return {name: value.clone() for name, value in net.state_dict().items()}

    @staticmethod
    def same(left, right):
        """Whether two state dicts are equal bit for bit."""
        return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


@pytest.fixture
def kit():
    return Toolbox
