"""Parameter groups by name: first match wins, strict and not."""

from __future__ import annotations

import pytest
import torch
from nnx import (
    Nets,
    NNModel,
    NNModelParams,
    NNOptimParams,
    NNParamGroupSpec,
    NNParams,
    NNTrainParams,
    Optims,
    build_optimizer,
)
from nnx.finetune import build_param_groups
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@pytest.fixture
def net():
    return nn.ModuleDict({"encoder": nn.Linear(2, 2), "head": nn.Linear(2, 1)})


def rates(net, groups):
    names = {id(p): n for n, p in net.named_parameters()}
    return {
        names[id(p)]: (group["lr"], group["weight_decay"])
        for group in groups
        for p in group["params"]
    }


def build(net, *specs, strict=False):
    return build_param_groups(net, specs, default_lr=1e-3, default_weight_decay=5e-4, strict=strict)


def test_three_ordered_rules_give_the_documented_table(net):
    specs = [
        NNParamGroupSpec(name_pattern="encoder.*bias", lr_multiplier=0.01, weight_decay=0.0),
        NNParamGroupSpec(name_pattern="encoder.*", lr_multiplier=0.01),
        NNParamGroupSpec(name_pattern="*.bias", weight_decay=0.0),
    ]
    assert rates(net, build(net, *specs)) == {
        "encoder.bias": (1e-5, 0.0),
        "encoder.weight": (1e-5, 5e-4),
        "head.bias": (1e-3, 0.0),
        "head.weight": (1e-3, 5e-4),
    }
    params = NNOptimParams(
        name=Optims.ADAM,
        max_lr=1e-3,
        momentum=(0.9, 0.999),
        weight_decay=5e-4,
        param_groups=specs,
    )
    assert rates(net, build_optimizer(net, params).param_groups)["encoder.bias"] == (1e-5, 0.0)


def test_rules_never_merge_so_a_broad_rule_first_hides_the_bias_rule(net):
    table = rates(
        net,
        build(
            net,
            NNParamGroupSpec(name_pattern="encoder.*", lr_multiplier=0.01),
            NNParamGroupSpec(name_pattern="*.bias", weight_decay=0.0),
        ),
    )
    assert table["encoder.bias"] == (1e-5, 5e-4)


def test_frozen_parameters_and_empty_patterns_make_no_group(net):
    net["encoder"].requires_grad_(False)
    with pytest.warns(UserWarning, match=r"'typo\.\*' matches no parameter; the closest names"):
        groups = build(
            net, NNParamGroupSpec(name_pattern="encoder.*"), NNParamGroupSpec(name_pattern="typo.*")
        )
    assert rates(net, groups) == {"head.weight": (1e-3, 5e-4), "head.bias": (1e-3, 5e-4)}
    assert len(groups) == 1


def test_strict_drops_what_no_rule_names(net):
    groups = build(net, NNParamGroupSpec(name_pattern="head.*", lr=0.5), strict=True)
    assert rates(net, groups) == {"head.weight": (0.5, 5e-4), "head.bias": (0.5, 5e-4)}


def test_strict_rules_that_match_nothing_are_refused(net):
    with pytest.raises(ValueError, match=r"patterns: 'G\.\*'\); the names are \['encoder.weight'"):
        build(net, NNParamGroupSpec(name_pattern="G.*"), strict=True)
    params = (
        NNOptimParams.builder()
        .adam(max_lr=0.1)
        .param_groups([NNParamGroupSpec(name_pattern="G.*")])
        .build()
    )
    with pytest.raises(ValueError, match="no trainable parameter matches"):
        build_optimizer(net, params, strict_param_groups=True)


def test_a_resolved_rate_must_be_finite_before_anything_is_built(net):
    spec = NNParamGroupSpec(name_pattern="*", lr_multiplier=1e300)
    with pytest.raises(ValueError, match=r"param_groups\[0\] \('\*'\): lr_multiplier 1e\+300"):
        build_param_groups(net, [spec], default_lr=1e300, default_weight_decay=0.0)


def test_tied_parameters_are_owned_once():
    net = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    net["b"].weight = net["a"].weight
    groups = build(net, NNParamGroupSpec(name_pattern="b.*"), NNParamGroupSpec(name_pattern="a.*"))
    assert sum(len(group["params"]) for group in groups) == 1
    torch.optim.SGD(groups, lr=0.1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": 0.1, "lr_multiplier": 0.1}, "lr_multiplier must be None when lr is set"),
        ({"lr": 0.0}, "NNParamGroupSpec.lr must be a finite real number > 0"),
        ({"lr_multiplier": -1}, "NNParamGroupSpec.lr_multiplier must be a finite real number > 0"),
        ({"weight_decay": -0.1}, "NNParamGroupSpec.weight_decay must be a finite real number >= 0"),
        ({"lr": True}, "lr must be a finite"),
        ({"lr": float("inf")}, "lr must be a finite"),
    ],
)
def test_a_spec_refuses_values_outside_its_domain(values, message):
    with pytest.raises(ValueError, match=message):
        NNParamGroupSpec(name_pattern="*", **values)


def test_a_pattern_is_a_non_empty_string():
    for pattern in ("", None, 3):
        with pytest.raises(ValueError, match="name_pattern must be a non-empty string"):
            NNParamGroupSpec(name_pattern=pattern)


def test_a_tied_weight_is_found_by_either_of_its_names():
    tied = nn.ModuleDict({"embedding": nn.Embedding(5, 3), "output": nn.Linear(3, 5)})
    tied["output"].weight = tied["embedding"].weight
    for pattern in ("embedding.weight", "output.weight"):
        groups = build(tied, NNParamGroupSpec(name_pattern=pattern, lr=0.5), strict=True)
        assert [p is tied["embedding"].weight for g in groups for p in g["params"]] == [True]
    first = NNParamGroupSpec(name_pattern="output.*", lr=0.5)
    second = NNParamGroupSpec(name_pattern="embedding.*", lr=0.25)
    assert len(build(tied, first, second, strict=True)) == 1  # the first rule has it, once


def test_training_refuses_a_pattern_that_names_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = NNModel(
        net_params=NNParams(input_dim=2, output_dim=2, hidden_dims=[3], dropout_prob=0.0),
        params=NNModelParams(net=Nets.FEED_FWD),
    )
    data = TensorDataset(torch.randn(4, 2), torch.tensor([0, 1, 0, 1]))
    optim = NNOptimParams.builder().adam(max_lr=1e-3)
    params = NNTrainParams(
        n_epochs=1,
        train_loader=DataLoader(data, batch_size=2),
        optim=optim.param_groups([NNParamGroupSpec(name_pattern="layer.0.*", lr=0.1)]).build(),
    )
    with pytest.raises(ValueError) as caught:
        model.train(params)
    message = str(caught.value)
    assert message.startswith("params.optim.param_groups: 'layer.0.*' matches no parameter")
    assert "'layers.0.weight'" in message
    assert "other rates" in message
    assert list(tmp_path.iterdir()) == []
