from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))  # the helpers in made_runs.py


class MixedNet(nn.Module):
    """A small picture classifier with dropout, batch norm and mixed modes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.drop(torch.relu(self.norm(self.conv(x))))
        return self.head(x.mean(dim=(2, 3)))


@pytest.fixture
def mixed_net():
    torch.manual_seed(0)
    net = MixedNet().train()
    net.norm.eval()
    return net


def everything_of(net: nn.Module) -> dict:
    """What a borrowing helper must leave as it was."""
    return {
        "modes": [m.training for m in net.modules()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks)
                  for m in net.modules()],
        "weights": {k: v.clone() for k, v in net.state_dict().items()},
        "grads": [None if p.grad is None else p.grad.clone() for p in net.parameters()],
        "requires_grad": [p.requires_grad for p in net.parameters()],
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1].copy(),
        "python": random.getstate(),
    }  # fmt: skip


def assert_untouched(before: dict, net: nn.Module) -> None:
    after = everything_of(net)
    for key in ("modes", "hooks", "requires_grad", "python"):
        assert before[key] == after[key], key
    assert torch.equal(before["torch"], after["torch"])
    assert np.array_equal(before["numpy"], after["numpy"])
    for name, value in before["weights"].items():
        assert torch.equal(value, after["weights"][name]), name
    for a, b in zip(before["grads"], after["grads"]):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


@pytest.fixture
def untouched(mixed_net):
    """Asserts at the end of a test that ``mixed_net`` is as it was at its start."""
    before = everything_of(mixed_net)
    yield
    assert_untouched(before, mixed_net)
