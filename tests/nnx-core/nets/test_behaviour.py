"""Weights and outputs under equal seeds, as the original system computes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from nnx import (
    Activations,
    Losses,
    Nets,
    NNConvParams,
    NNModel,
    NNModelParams,
    NNParams,
    set_seed,
)

WANTED = json.loads((Path(__file__).parents[2] / "data" / "behaviour_nets.json").read_text())
ROWS = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(2))
DENSE = {
    "input_dim": 6, "output_dim": 3, "hidden_dims": [8, 7], "activation": Activations.RELU,
}  # fmt: skip
CONV = {
    "input_dim": 3 * 16 * 16, "output_dim": 4, "dropout_prob": 0.4, "hidden_dims": [16, 9],
    "conv_channels": [4, 8], "in_channels": 3, "kernel_size": 3, "activation": Activations.RELU,
}  # fmt: skip
CASES = {
    "nets_feed_fwd": (Nets.FEED_FWD, NNParams(**DENSE, dropout_prob=0.3), ROWS),
    "nets_feed_fwd_per_layer": (
        Nets.FEED_FWD,
        NNParams(
            **DENSE,
            dropout_prob=0.1,
            dropout_probs=[0.5, 0.2],
            activations=[Activations.TANH, Activations.RELU],
        ),
        ROWS,
    ),
    "nets_conv": (Nets.CONV, NNConvParams(**CONV), IMAGES),
    "nets_conv_padded": (Nets.CONV, NNConvParams(**CONV, padding=1, pool_size=4), IMAGES),
}


def test_every_case_is_compared():
    assert set(CASES) == set(WANTED)


@pytest.mark.parametrize("case", CASES)
def test_weights_outputs_and_dropout_are_those_of_the_original(case):
    kind, params, inputs = CASES[case]
    set_seed(11)
    net = NNModel(params, NNModelParams(net=kind, loss=Losses.CROSS_ENTROPY)).net
    wanted = WANTED[case]
    assert {n: list(t.shape) for n, t in net.state_dict().items()} == {
        name: shape for name, (shape, _) in wanted["weights"].items()
    }
    for name, weight in net.state_dict().items():
        assert float(weight.double().sum()) == pytest.approx(wanted["weights"][name][1], abs=2e-5)
    with torch.no_grad():
        evaluated = net.eval()(inputs)
        set_seed(5)
        trained = net.train()(inputs)
    assert list(evaluated.shape) == wanted["shape"]
    for outputs, mode in ((evaluated, "eval"), (trained, "train")):
        assert outputs.flatten()[:12].tolist() == pytest.approx(wanted[mode], abs=2e-5)


def test_convolution_blocks_have_the_plain_activation_and_no_dropout():
    params = NNConvParams(
        **{**CONV, "hidden_dims": [5], "activation": Activations.TANH},
        activations=[Activations.RELU],
        dropout_probs=[0.0],
    )
    net = Nets.CONV(params=params).train()
    features = IMAGES
    for conv in net.convs:
        features = torch.nn.functional.max_pool2d(torch.tanh(conv(features)), 2)
    expected = net.fcs[1](torch.relu(net.fcs[0](features.flatten(1))))
    assert torch.equal(net(IMAGES), expected)
    with pytest.raises(ValueError, match="one entry for each of 1 hidden layers"):
        NNConvParams(**{**CONV, "hidden_dims": [5]}, activations=[Activations.RELU] * 3)
