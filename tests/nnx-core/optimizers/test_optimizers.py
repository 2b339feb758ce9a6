"""Optimizers from params: torch's own by hand-computed numbers, and registered factories."""

from __future__ import annotations

import pytest
import torch
from nnx import (
    NNOptimFactoryParams,
    NNOptimParams,
    NNParamGroupSpec,
    OptimizerFactorySpec,
    Optims,
    build_optimizer,
    register_optimizer_factory,
    registered_optimizer_factories,
    unregister_optimizer_factory,
)
from nnx.optimizers import (
    MissingOptimizerFactoryError,
    optim_params_from_state,
    resolve_optimizer_factory,
)
from torch import nn


def one_weight(value: float) -> nn.Linear:
    net = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        net.weight.fill_(value)
    net.weight.grad = torch.zeros_like(net.weight)
    return net


@pytest.fixture
def registered():
    names = []

    def register(id, factory, version=1):
        register_optimizer_factory(id, version, factory)
        names.append((id, version))

    yield register
    for name in names:
        unregister_optimizer_factory(*name)


@pytest.mark.parametrize(("variant", "expected"), [("adamw", 1.96), ("adam", 1.9)])
def test_adamw_scales_the_weight_where_adam_takes_a_whole_step(variant, expected):
    net = one_weight(2.0)
    method = getattr(NNOptimParams.builder(), variant)
    params = method(max_lr=0.1, betas=(0.0, 0.0), weight_decay=0.2).build()
    build_optimizer(net, params).step()
    assert net.weight.item() == pytest.approx(expected, abs=1e-6)


def test_a_group_overrides_the_decay_of_adamw():
    net = nn.ModuleDict({"a": one_weight(2.0), "b": one_weight(2.0)})
    params = (
        NNOptimParams.builder()
        .adamw(max_lr=0.1, betas=(0.0, 0.0), weight_decay=0.2)
        .param_groups([NNParamGroupSpec(name_pattern="a.*", weight_decay=0.0, lr=0.5)])
        .build()
    )
    build_optimizer(net, params).step()
    assert net["a"].weight.item() == 2.0
    assert net["b"].weight.item() == pytest.approx(1.96, abs=1e-6)


KINDS = {
    Optims.SGD: (torch.optim.SGD, 0.9, {"momentum": 0.9, "nesterov": False}),
    Optims.SGD_NESTEROV: (torch.optim.SGD, 0.9, {"momentum": 0.9, "nesterov": True}),
    Optims.ADAM: (torch.optim.Adam, (0.8, 0.9), {"betas": (0.8, 0.9), "amsgrad": False}),
    Optims.ADAM_AMSGRAD: (torch.optim.Adam, (0.8, 0.9), {"betas": (0.8, 0.9), "amsgrad": True}),
    Optims.ADAMW: (torch.optim.AdamW, (0.8, 0.9), {"betas": (0.8, 0.9), "amsgrad": False}),
}


@pytest.mark.parametrize("name", Optims)
def test_every_member_builds_the_optimizer_that_torch_would(name):
    cls, momentum, options = KINDS[name]
    torch.manual_seed(0)
    ours, theirs = nn.Linear(3, 2), nn.Linear(3, 2)
    theirs.load_state_dict(ours.state_dict())
    built = name(ours, lr_start=0.05, weight_decay=0.1, momentum=momentum)
    expected = cls(theirs.parameters(), lr=0.05, weight_decay=0.1, **options)
    assert type(built) is cls
    x = torch.randn(8, 3)
    for _ in range(5):
        for net, optimizer in ((ours, built), (theirs, expected)):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters()):
        assert torch.equal(a, b)


def test_eps_reaches_the_adam_family_only():
    params = NNOptimParams.builder().adam(max_lr=0.1, eps=1e-4).build()
    assert build_optimizer(nn.Linear(1, 1), params).param_groups[0]["eps"] == 1e-4
    with pytest.raises(ValueError, match=r"NNOptimParams.eps must be left at 1e-08 for sgd"):
        NNOptimParams(name=Optims.SGD, max_lr=0.1, weight_decay=0, momentum=0.9, eps=1e-4)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr_start": float("inf")}, r"Optims\.ADAM\.lr_start must be a finite real number >= 0"),
        ({"weight_decay": True}, r"Optims\.ADAM\.weight_decay must be a finite real number"),
        ({"momentum": 0.9}, r"Optims\.ADAM\.momentum must be a pair of betas"),
        ({"eps": 0}, r"Optims\.ADAM\.eps must be a finite real number > 0"),
    ],
)
def test_a_member_refuses_numbers_outside_their_domain(values, message):
    arguments = {"lr_start": 0.1, "weight_decay": 0.0, "momentum": (0.9, 0.99), **values}
    with pytest.raises(ValueError, match=message):
        Optims.ADAM(nn.Linear(1, 1), **arguments)


def test_without_groups_frozen_parameters_are_kept_so_that_they_can_be_unfrozen():
    net = nn.Linear(2, 1)
    net.bias.requires_grad_(False)
    params = NNOptimParams.builder().adam(max_lr=0.1).build()
    (group,) = build_optimizer(net, params).param_groups
    assert {id(p) for p in group["params"]} == {id(p) for p in net.parameters()}


def test_a_net_without_parameters_is_refused_by_name():
    with pytest.raises(ValueError, match="Identity has no parameter to optimize"):
        build_optimizer(nn.Identity(), NNOptimParams.builder().adam(max_lr=0.1).build())


def test_the_wrong_kind_of_params_is_refused():
    with pytest.raises(ValueError, match="NNOptimParams or NNOptimFactoryParams"):
        build_optimizer(nn.Linear(1, 1), {"name": "adam"})


# -- registered factories ----------------------------------------------------------------


def spec(id="acme.sgd", version=1, **config):
    return OptimizerFactorySpec(id=id, version=version, config=config)


def test_a_factory_gets_explicit_groups_and_a_read_only_config(registered):
    seen = []

    def factory(groups, config):
        seen.append(([set(group) for group in groups], config))
        return torch.optim.SGD(groups, momentum=config["betas"][0])

    registered("acme.sgd", factory)
    params = NNOptimFactoryParams(
        factory=spec(betas=[0.5, 0.9]),
        max_lr=0.2,
        weight_decay=0.01,
        param_groups=[NNParamGroupSpec(name_pattern="*bias", lr_multiplier=0.5, weight_decay=0.0)],
    )
    net = nn.Linear(2, 1)
    optimizer = build_optimizer(net, params)
    ((keys, config),) = seen
    assert keys == [{"params", "lr", "weight_decay"}] * 2
    assert config["betas"] == (0.5, 0.9)
    with pytest.raises(TypeError):
        config["betas"] = ()
    bias, rest = optimizer.param_groups
    assert bias["params"] == [net.bias]
    assert (bias["lr"], bias["weight_decay"]) == (0.1, 0.0)
    assert (rest["lr"], rest["weight_decay"]) == (0.2, 0.01)


def test_strict_groups_reach_the_factory(registered):
    registered("acme.sgd", lambda groups, config: torch.optim.SGD(groups))
    params = NNOptimFactoryParams(
        factory=spec(), max_lr=0.1, param_groups=[NNParamGroupSpec(name_pattern="weight")]
    )
    net = nn.Linear(2, 1)
    (group,) = build_optimizer(net, params, strict_param_groups=True).param_groups
    assert [id(p) for p in group["params"]] == [id(net.weight)]


@pytest.mark.parametrize(
    ("factory", "error", "message"),
    [
        (lambda groups, config: "an optimizer", TypeError, "must return a torch.optim.Optimizer"),
        (
            lambda groups, config: torch.optim.SGD(groups[0]["params"][:1], lr=0.1),
            ValueError,
            "lacks bias",
        ),
        (
            lambda groups, config: torch.optim.SGD(
                [*groups, {"params": [nn.Parameter(torch.ones(1))]}], lr=0.1
            ),
            ValueError,
            "adds one that the net does not have",
        ),
    ],
)
def test_a_factory_must_return_an_optimizer_over_exactly_its_parameters(
    registered, factory, error, message
):
    registered("acme.sgd", factory)
    with pytest.raises(error, match=message):
        build_optimizer(nn.Linear(2, 1), NNOptimFactoryParams(factory=spec(), max_lr=0.1))


def test_an_optimizer_that_repeats_a_parameter_is_refused(registered):
    def factory(groups, config):
        optimizer = torch.optim.SGD(groups)
        optimizer.param_groups[0]["params"].append(groups[0]["params"][0])
        return optimizer

    registered("acme.sgd", factory)
    with pytest.raises(ValueError, match="repeats weight"):
        build_optimizer(nn.Linear(2, 1), NNOptimFactoryParams(factory=spec(), max_lr=0.1))


def test_an_unknown_factory_names_versions_close_matches_and_the_way_out(registered):
    registered("acme.lion", lambda groups, config: torch.optim.SGD(groups), version=2)
    with pytest.raises(MissingOptimizerFactoryError, match=r"registered versions .*: 2"):
        resolve_optimizer_factory(spec("acme.lion", 1))
    with pytest.raises(MissingOptimizerFactoryError, match=r"did you mean 'acme\.lion'"):
        resolve_optimizer_factory(spec("acme.loin", 2))
    with pytest.raises(ValueError, match=r"register_optimizer_factory\('acme.none', 1, factory\)"):
        build_optimizer(
            nn.Linear(1, 1), NNOptimFactoryParams(factory=spec("acme.none"), max_lr=0.1)
        )


def test_registering_listing_and_unregistering(registered):
    def first(groups, config):
        return torch.optim.SGD(groups)

    registered("acme.sgd", first)
    assert ("acme.sgd", 1) in registered_optimizer_factories()
    with pytest.raises(ValueError, match=r"already registered by .*first"):
        register_optimizer_factory("acme.sgd", 1, first)
    register_optimizer_factory("acme.sgd", 1, lambda groups, config: None, replace=True)
    assert unregister_optimizer_factory("acme.sgd", 1)
    assert not unregister_optimizer_factory("acme.sgd", 1)
    with pytest.raises(ValueError, match="must be callable"):
        register_optimizer_factory("acme.sgd", 1, "acme:sgd")


def test_reading_a_stored_factory_needs_nothing_registered():
    state = {"factory": {"id": "gone.opt", "version": 7, "config": {"a": [1]}}, "max_lr": 0.1}
    params = optim_params_from_state(state)
    assert isinstance(params, NNOptimFactoryParams)
    assert params.state() == {**state, "weight_decay": 0.0}
    assert "gone.opt" in repr(params)
    assert not hasattr(params, "momentum")


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"f": lambda: 0}, "config.f is a callable"),
        ({"a": [1, {"b": torch.optim.SGD}]}, r"config.a\[1\].b is a callable"),
        ({"s": {1, 2}}, "config.s is a set"),
        ({"b": b"x"}, "config.b is a bytes"),
        ({"x": float("nan")}, "config.x must be finite"),
        ({1: 2}, "has the key 1; keys must be strings"),
        ([1], "config must be a mapping"),
    ],
)
def test_code_and_lossy_values_are_refused_in_a_config(config, path):
    with pytest.raises(ValueError, match=path):
        OptimizerFactorySpec(id="acme.sgd", version=1, config=config)


def test_a_callable_is_not_a_factory_spec():
    with pytest.raises(ValueError, match=r"NNOptimFactoryParams.factory must be an Optimizer"):
        NNOptimFactoryParams(factory=torch.optim.SGD, max_lr=0.1)
