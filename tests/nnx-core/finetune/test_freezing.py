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
    assert freeze(module, "nothing.*") == 0


def test_names_match_whole_and_by_case():
    module = net()
    assert freeze(module, "head") == 0
    assert freeze(module, "HEAD.*") == 0


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
