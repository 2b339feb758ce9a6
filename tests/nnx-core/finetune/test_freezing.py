"""Parameters are frozen and unfrozen by globs over their dotted names."""

from __future__ import annotations

import pytest
import torch
from nnx.finetune import freeze, frozen, unfreeze
from torch import nn


def net():
    encoder = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 3)))
    return nn.ModuleDict({"encoder": encoder, "head": nn.Linear(3, 1)})


def test_a_star_crosses_dots():
    module = net()
    assert freeze(module, "encoder.*") == 4
    assert frozen(module) == [
        "encoder.0.bias", "encoder.0.weight", "encoder.1.0.bias", "encoder.1.0.weight",
    ]  # fmt: skip


def test_only_newly_frozen_parameters_count():
    module = net()
    assert freeze(module, "*.bias", "head.*") == 4
    assert freeze(module, "head.*") == 0
    assert unfreeze(module, "head.?eight") == 1
    assert unfreeze(module, "*") == 3
    assert frozen(module) == []
    assert freeze(module, "encoder.[01].bias") == 1
    with pytest.warns(UserWarning, match=r"freeze: 'nothing\.\*' matches no parameter"):
        assert freeze(module, "nothing.*") == 0


def test_names_match_whole_and_by_case():
    module = net()
    with pytest.warns(UserWarning, match="the closest names are 'head.weight', 'head.bias'"):
        assert freeze(module, "head") == 0
    with pytest.warns(UserWarning, match="the closest names are 'head.weight', 'head.bias'"):
        assert unfreeze(module, "HEAD.*") == 0


def test_no_pattern_is_refused():
    for change in (freeze, unfreeze):
        with pytest.raises(ValueError, match=r'at least one name pattern; "\*" takes every'):
            change(net())


def test_a_tied_weight_matches_by_any_of_its_names_and_counts_once():
    module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    module["b"].weight = module["a"].weight
    assert freeze(module, "b.weight") == 1
    assert frozen(module) == ["a.weight"]
    assert freeze(module, "*.weight") == 0


def test_an_integer_parameter_is_left_as_it_is():
    module = nn.Linear(2, 2)
    module.codes = nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)
    assert unfreeze(module, "*") == 0
    assert frozen(module) == ["codes"]


def test_a_frozen_parameter_gets_no_gradient():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    freeze(module, "0.*")
    module(torch.ones(1, 2)).sum().backward()
    assert module[0].weight.grad is None
    assert module[1].weight.grad is not None


def test_a_pattern_without_effect_among_others_is_named_alone():
    with pytest.warns(UserWarning, match="encodr") as caught:
        assert freeze(net(), "head.*", "encodr.*") == 2
    [warning] = caught
    assert "'encodr.*' matches no parameter" in str(warning.message)
    assert "encoder.0.weight" in str(warning.message)
    assert "head" not in str(warning.message)
    assert warning.filename == __file__


def test_a_tied_weight_is_frozen_by_either_of_its_names():
    for pattern in ("embedding.*", "output.*"):
        tied = nn.ModuleDict(
            {"embedding": nn.Embedding(5, 3), "output": nn.Linear(3, 5, bias=False)}
        )
        tied["output"].weight = tied["embedding"].weight
        assert freeze(tied, pattern) == 1
        assert not tied["output"].weight.requires_grad
        assert unfreeze(tied, pattern) == 1


def test_a_cycle_of_modules_ends():
    module = net()
    module["head"].owner = module
    assert freeze(module, "head.*") == 2


def test_a_model_in_place_of_its_net_is_refused_with_the_way_out():
    class Model:
        net = nn.Linear(1, 1)

    with pytest.raises(
        TypeError, match=r"freeze takes a torch.nn.Module, not a Model; pass its .net"
    ):
        freeze(Model(), "*")
