"""A model of two named inputs whose output is in a mapping, read by its adapter."""

from __future__ import annotations

import torch
from nnx import KeywordInputs, Losses, NNModel, NNModelParams
from torch import nn


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(5, 2), nn.Linear(3, 2)

    def forward(self, *, left, right):
        return {"logits": self.a(left) + self.b(right)}


class Logits(KeywordInputs):
    def output(self, raw):
        return raw["logits"]


def pair_model():
    return NNModel(
        module=Pair(),
        params=NNModelParams(loss=Losses.CROSS_ENTROPY),
        batch_adapter=Logits(("left", "right")),
    )
