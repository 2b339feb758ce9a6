"""A borrowed network comes back in the modes that it was in, by its modules' own means."""

from __future__ import annotations

import contextlib

import pytest
import torch
from nnx import Losses, NNModel, NNModelParams
from nnx.utils.modes import eval_mode
from torch import nn


class Merging(nn.Linear):
    """Folds its adapter into the weight for inference, and takes it out again to train."""

    def __init__(self):
        super().__init__(2, 2)
        self.delta = nn.Parameter(torch.ones(2, 2))
        self.merged = False
        self.calls = []

    def train(self, mode=True):
        self.calls.append(mode)
        if mode == self.merged:
            self.weight.data += -self.delta.data if mode else self.delta.data
            self.merged = not mode
        return super().train(mode)

    def forward(self, x):
        return super().forward(x) if self.merged else super().forward(x) + x @ self.delta.T


def test_a_module_that_merges_for_inference_comes_back_whole():
    layer = Merging()
    net = nn.Sequential(layer, nn.Dropout())
    model = NNModel(module=net, params=NNModelParams(loss=Losses.CROSS_ENTROPY))
    x, y = torch.randn(4, 2), torch.tensor([0, 1, 0, 1])
    net.train()
    before = layer.weight.detach().clone()
    for borrow in (lambda: model.predict(x), lambda: model.evaluate([(x, y)])):
        layer.calls.clear()
        borrow()
        assert not layer.merged
        assert layer.training
        assert layer.calls == [False, True]
        torch.testing.assert_close(layer.weight, before)


def test_one_in_eval_mode_already_is_left_merged():
    layer = Merging()
    net = nn.Sequential(layer, nn.Dropout())
    net.train()
    layer.eval()
    with eval_mode(net):
        assert not net[1].training
    assert (net.training, layer.training, net[1].training) == (True, False, True)
    assert layer.merged


class AlwaysEval(nn.BatchNorm1d):
    def train(self, mode=True):
        return super().train(False)


@pytest.mark.parametrize("flags", [(True, False, True), (False, True, False), (True, True, True)])
def test_mixed_modes_stay_mixed(flags):
    net = nn.Sequential(nn.Dropout(), AlwaysEval(2))
    for module, flag in zip(net.modules(), flags):
        module.training = flag
    with contextlib.suppress(KeyError), eval_mode(net):
        assert not any(module.training for module in net.modules())
        raise KeyError
    assert tuple(module.training for module in net.modules()) == flags
