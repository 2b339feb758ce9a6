"""Enums that build what they name."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from nnx import Activations, Checkpoints, Devices, Losses, Nets, NNConvParams, NNParams
from nnx.plugins import manager
from torch import nn
from torch.nn import functional as F


@pytest.mark.parametrize(
    ("member", "function"),
    [
        (Activations.ELU, F.elu),
        (Activations.SELU, F.selu),
        (Activations.TANH, torch.tanh),
        (Activations.GELU, F.gelu),
        (Activations.RELU, F.relu),
        (Activations.SOFTMAX, lambda x: F.softmax(x, dim=-1)),
        (Activations.SIGMOID, torch.sigmoid),
        (Activations.SOFTPLUS, F.softplus),
        (Activations.LEAKY_RELU, F.leaky_relu),
    ],
)
def test_an_activation_computes_torchs_function(member, function):
    x = torch.linspace(-3, 3, 12).reshape(3, 4)
    assert torch.equal(member()(x), function(x))
    assert len(list(member().parameters())) == 0


def test_every_activation_is_covered():
    assert len(Activations) == 9


@pytest.mark.parametrize(
    ("member", "kind"),
    [
        (Losses.CROSS_ENTROPY, nn.CrossEntropyLoss),
        (Losses.MEAN_SQUARED_ERROR, nn.MSELoss),
        (Losses.BINARY_CROSS_ENTROPY, nn.BCEWithLogitsLoss),
        (Losses.NEGATIVE_LOG_LIKELIHOOD, nn.NLLLoss),
    ],
)
def test_a_loss_is_torchs_with_its_defaults(member, kind):
    loss = member()
    assert type(loss) is kind
    assert loss.reduction == "mean"
    assert member() is not loss


def test_devices_build_torch_devices():
    assert Devices.CPU() == Devices.CPU.torch_device() == torch.device("cpu")
    assert Devices.CUDA() == torch.device("cuda")
    assert Devices.get() in Devices
    assert Devices.get_torch_device() == Devices.get()()
    if not torch.cuda.is_available() and not torch.backends.mps.is_available():
        assert Devices.get() is Devices.CPU


def test_the_checkpoints_are_named_as_their_files():
    assert [c.value for c in Checkpoints] == ["q1", "q2", "q3", "best", "last", "first"]


def test_a_member_prints_as_its_value_and_shows_its_name():
    assert f"{Losses.CROSS_ENTROPY} {Nets.VIT!s}" == "cross_entropy vit"
    assert repr(Activations.RELU) == "Activations.RELU"


def test_core_builds_its_own_nets():
    net = Nets.FEED_FWD(params=NNParams(input_dim=4, output_dim=2, dropout_prob=0))
    assert net(torch.zeros(3, 4)).shape == (3, 2)
    conv = NNConvParams(
        input_dim=64, output_dim=2, dropout_prob=0, conv_channels=[2], kernel_size=3
    )
    assert Nets.CONV(params=conv)(torch.zeros(3, 64)).shape == (3, 2)


@pytest.mark.parametrize(
    ("net", "needed"),
    [
        (Nets.CONV, "NNConvParams"),
        (Nets.TRANSFORMER, "NNTransformerParams"),
        (Nets.VIT, "NNViTParams"),
        (Nets.FEED_FWD_MOE, "NNMoEParams"),
    ],
)
def test_a_net_refuses_the_params_of_another(net, needed):
    params = NNParams(input_dim=4, output_dim=2, dropout_prob=0)
    with pytest.raises(ValueError, match=rf"Nets\.{net.name} is built from {needed}, not NNParams"):
        net(params=params)
    with pytest.raises(ValueError, match=r"Nets\.FEED_FWD is built from NNParams, not \{\}"):
        Nets.FEED_FWD(params={})


def test_a_plugin_builds_the_member_it_registered():
    registry = manager.registry("net")
    if ("graph_sage", 1) in registry:
        pytest.skip("the graph distribution builds it")
    registry.register("graph_sage", 1, lambda params: nn.Linear(params.input_dim, 1), owner="test")
    try:
        net = Nets.GRAPH_SAGE(params=NNParams(input_dim=4, output_dim=2, dropout_prob=0))
        assert net.in_features == 4
    finally:
        registry.unregister("graph_sage", 1)


SCRIPT = """
import sys
import nnx
from nnx import (Losses, Nets, NNModelParams, NNMoEParams, NNParams, NNTrainParams,
                 NNTransformerParams, NNViTParams)
from nnx.params import RunConfig
vit = NNViTParams(input_dim=3072, output_dim=64, dropout_prob=0.0, image_size=32, patch_size=8,
                  d_model=64, n_layers=2, n_heads=4)
lm = NNTransformerParams.builder().vocab(64).layers(n=2, heads=2, d_model=32).context(
    max_seq_len=16).build()
moe = NNMoEParams(input_dim=4, output_dim=2, dropout_prob=0.0, num_experts=4)
train = NNTrainParams(n_epochs=8, seed=42)
model = NNModelParams(net=Nets.TRANSFORMER, loss=Losses.CROSS_ENTROPY)
run = RunConfig(net=lm, model=model, train=train)
again = RunConfig.from_yaml(run.to_yaml())
assert again == run and again.id == "315151045e67f953c9090e547af64cc2", again.id
assert "vocab_size=64" in repr(again) and type(again.net) is NNTransformerParams
for net in (vit, moe):
    assert NNParams.resolve_from_state(net.state()) == net
for heavy in ("torch", "numpy", "pandas", "tokenizers", "torch_geometric"):
    assert heavy not in sys.modules, heavy
for member, params, package in ((Nets.TRANSFORMER, lm, "nnx-lm"), (Nets.VIT, vit, "nnx-paradigms"),
                                (Nets.FEED_FWD_MOE, moe, "nnx-paradigms")):
    try:
        member(params=params)
    except ImportError as error:
        assert f"Nets.{member.name} cannot be built here" in str(error), error
        assert f"belongs to {package}, which" in str(error), error
    else:
        raise AssertionError(member)
print("ok")
"""


def test_runs_of_extension_nets_load_print_and_keep_their_id_with_core_alone():
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={"NNX_PLUGINS": "nnx-eval", "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert result.stdout == "ok\n", result.stderr


def test_a_net_takes_its_own_params_and_not_those_of_another():
    conv = NNConvParams(
        input_dim=64,
        output_dim=2,
        hidden_dims=[4],
        dropout_prob=0.0,
        conv_channels=[2],
        in_channels=1,
    )
    with pytest.raises(ValueError, match="FEED_FWD is built from NNParams, not"):
        Nets.FEED_FWD(params=conv)

    class Mine(NNParams):
        """A user's own, of which a run would store what NNParams has alone."""

    shape = {"input_dim": 4, "output_dim": 2, "hidden_dims": [4], "dropout_prob": 0.0}
    with pytest.raises(ValueError, match=r"not .*\(a subclass is not: a run would load without"):
        Nets.FEED_FWD(params=Mine(**shape))
    Nets.FEED_FWD(params=NNParams(**shape))
