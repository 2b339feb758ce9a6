"""The built-in nets are plain torch layers in a row, and return raw logits."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from nnx.enums import Activations, Nets
from nnx.nets import ConvNN, FeedFwdNN
from nnx.params import NNConvParams, NNParams
from torch import nn

PARAMS = NNParams(
    input_dim=8,
    output_dim=3,
    hidden_dims=[16, 12],
    dropout_prob=0.1,
    activations=[Activations.RELU, Activations.TANH],
    dropout_probs=[0.2, 0.5],
)
CONV = NNConvParams(
    input_dim=3 * 16 * 16,
    output_dim=10,
    hidden_dims=[64],
    dropout_prob=0.0,
    conv_channels=[8, 16],
    in_channels=3,
    kernel_size=3,
    activation=Activations.ELU,
    activations=[Activations.TANH],
    dropout_probs=[0.3],
)


def plain_feed_fwd():
    return nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2),
        nn.Linear(16, 12), nn.Tanh(), nn.Dropout(0.5),
        nn.Linear(12, 3),
    )  # fmt: skip


def plain_conv():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ELU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3), nn.ELU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.3),
        nn.Linear(64, 10),
    )  # fmt: skip


NETS = [
    pytest.param(lambda: FeedFwdNN(PARAMS), plain_feed_fwd, (4, 8), id="feed-forward"),
    pytest.param(lambda: ConvNN(CONV), plain_conv, (4, 3, 16, 16), id="conv"),
]


def built(make, seed=0):
    torch.manual_seed(seed)
    return make()


@pytest.mark.parametrize(("make", "plain", "shape"), NETS)
def test_a_seed_gives_the_weights_of_plain_torch_layers(make, plain, shape):
    ours, theirs = built(make), built(plain)
    state, expected = list(ours.state_dict().values()), list(theirs.state_dict().values())
    assert all(torch.equal(a, b) for a, b in zip(state, expected, strict=True))
    assert torch.equal(built(make).state_dict()[next(iter(ours.state_dict()))], state[0])


@pytest.mark.parametrize(("make", "plain", "shape"), NETS)
@pytest.mark.parametrize("training", [True, False])
def test_outputs_gradients_and_dropout_draws_are_those_of_plain_layers(
    make, plain, shape, training
):
    X = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    results = []
    for factory in (make, plain):
        net = built(factory).train(training)
        torch.manual_seed(5)
        output = net(X)
        output.square().sum().backward()
        results.append((output, [p.grad for p in net.parameters()], torch.get_rng_state()))
    (ours, grads, state), (theirs, expected, state2) = results
    assert torch.equal(ours, theirs)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))
    assert torch.equal(state, state2)
    assert bool((ours < 0).any())  # raw logits, not probabilities


def test_layers_are_named_in_order():
    assert [n for n, _ in FeedFwdNN(PARAMS).named_parameters()] == [
        f"layers.{i}.{kind}" for i in range(3) for kind in ("weight", "bias")
    ]
    assert list(ConvNN(CONV).state_dict()) == [
        f"{name}.{kind}"
        for name in ("convs.0", "convs.1", "fcs.0", "fcs.1")
        for kind in ("weight", "bias")
    ]


def test_a_net_without_hidden_layers_is_one_linear_layer():
    net = FeedFwdNN(NNParams(input_dim=4, output_dim=2, dropout_prob=0.9))
    X = torch.randn(3, 4)
    assert torch.equal(net(X), nn.functional.linear(X, net.layers[0].weight, net.layers[0].bias))


def test_images_are_flattened_where_the_width_asks_for_it():
    net = FeedFwdNN(NNParams(input_dim=28 * 28, output_dim=2, dropout_prob=0.0))
    X = torch.randn(5, 1, 28, 28)
    assert torch.equal(net(X), net(X.reshape(5, -1)))
    sequence = FeedFwdNN(NNParams(input_dim=8, output_dim=2, dropout_prob=0.0))
    assert sequence(torch.randn(5, 7, 8)).shape == (5, 7, 2)


def test_flat_images_are_shaped_and_other_sizes_refused():
    net = ConvNN(CONV).eval()
    X = torch.randn(2, 3, 16, 16)
    assert torch.equal(net(X), net(X.flatten(1)))
    with pytest.raises(ValueError, match=r"\(B, 3, 16, 16\) or \(B, 768\) inputs, got \(6, 384\)"):
        net(torch.randn(6, 384))


def test_a_stride_and_padding_reach_the_layers():
    params = NNConvParams(
        input_dim=1 * 28 * 28,
        output_dim=2,
        dropout_prob=0.0,
        conv_channels=[4],
        stride=2,
        padding=2,
    )
    net = ConvNN(params)
    assert net.convs[0].stride == (2, 2)
    assert net.convs[0].padding == (2, 2)
    assert net(torch.randn(3, 1, 28, 28)).shape == (3, 2)


def test_batches_are_pairs():
    net = FeedFwdNN(PARAMS)
    X, y = torch.randn(2, 8), torch.tensor([0, 1])
    (inputs, target) = net.unpack_batch([X, y])
    assert isinstance(inputs, tuple)
    assert inputs[0] is X
    assert target is y
    assert len(inputs) == 1
    with pytest.raises(
        ValueError, match=r"FeedFwdNN expects batches of \(inputs, targets\), got dict"
    ):
        net.unpack_batch({"x": X})
    with pytest.raises(ValueError, match="got tuple of 3"):
        net.unpack_batch((X, X, y))


@pytest.mark.parametrize(("make", "plain", "shape"), NETS)
def test_weights_go_to_a_file_and_back(make, plain, shape, tmp_path):
    net = built(make, seed=3).eval()
    path = str(tmp_path / "net.pt")
    net.to_file(path)
    again = type(net).from_file(path, net.params).eval()
    copied = type(net).from_state(net.state_dict(), net.params).eval()
    X = torch.randn(shape)
    assert torch.equal(again(X), net(X))
    assert torch.equal(copied(X), net(X))
    assert again.params is net.params
    assert list(torch.load(path, weights_only=True)) == list(net.state_dict())


@pytest.mark.parametrize(("make", "plain", "shape"), NETS)
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda n: pickle.loads(pickle.dumps(n))])
def test_a_net_can_be_copied_and_pickled(make, plain, shape, copier):
    net = built(make).eval()
    X = torch.randn(shape)
    assert torch.equal(copier(net)(X), net(X))


def test_new_params_change_what_follows_each_layer():
    net = FeedFwdNN(PARAMS).eval()
    X = torch.randn(2, 8)
    relu = NNParams(
        input_dim=8, output_dim=3, hidden_dims=[16, 12], dropout_prob=0.0,
        activation=Activations.RELU,
    )  # fmt: skip
    before = net(X)
    net.params = relu
    assert not torch.equal(net(X), before)
    assert "['relu', 'relu']" in repr(net)


def test_the_enum_builds_the_same_net():
    ours = built(lambda: Nets.FEED_FWD(params=PARAMS))
    assert type(ours) is FeedFwdNN
    assert torch.equal(ours.layers[0].weight, built(lambda: FeedFwdNN(PARAMS)).layers[0].weight)
    assert type(Nets.CONV(params=CONV)) is ConvNN
