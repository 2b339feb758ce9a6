"""Merged adapters compute the same, unmerged ones leave the base bit for bit."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from nnx.peft import (
    LoRALinear,
    apply_dora_to,
    apply_ia3_to,
    apply_lora_to,
    load_lora_weights,
    merge_adapters,
    unmerge_adapters,
)
from torch import nn

TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def dora(model, *patterns):
    return apply_dora_to(model, *patterns, r=3, dropout=0.4)


def lora(model, *patterns):
    kinds = (nn.Linear, nn.Conv2d)
    return apply_lora_to(model, *patterns, r=3, alpha=5.0, dropout=0.4, kinds=kinds)


def rslora(model, *patterns):
    return apply_lora_to(model, *patterns, r=3, alpha=5.0, rslora=True)


def trained(apply, dtype=torch.float32, patterns=("*",)):
    """A small net whose adapters hold arbitrary values."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 3)
    ).to(dtype)
    apply(model, *patterns)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "base" not in name:
                parameter.add_(torch.randn_like(parameter).to(dtype) * 0.1)
    return model.eval()


def bits(state):
    return {k: v.clone().view(torch.uint8) for k, v in state.items()}


@pytest.mark.parametrize("apply", [lora, rslora, dora, apply_ia3_to])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_merged_computes_the_same_and_unmerged_is_bit_identical(apply, dtype):
    model = trained(apply, dtype)
    x = torch.randn(5, 2, 4, 4).to(dtype)
    expected, before = model(x), bits(model.state_dict())
    count = merge_adapters(model)
    assert count == sum(hasattr(m, "merged") for m in model.modules())
    torch.testing.assert_close(model(x), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert merge_adapters(model) == 0
    assert unmerge_adapters(model) == count
    assert unmerge_adapters(model) == 0
    after = bits(model.state_dict())
    assert all(torch.equal(after[k], v) for k, v in before.items())
    assert torch.equal(model(x), expected)


def test_the_merged_weight_is_the_hand_made_one():
    model = trained(lora)
    layer = model[3]
    expected = layer.base.weight + (5.0 / 3) * layer.lora_B @ layer.lora_A
    merge_adapters(model)
    torch.testing.assert_close(layer.base.weight, expected)


@pytest.mark.parametrize("apply", [lora, dora, apply_ia3_to])
def test_unload_gives_the_plain_layers_back(apply):
    model = trained(apply)
    x = torch.randn(5, 2, 4, 4)
    expected = model(x)
    merge_adapters(model, unload=True)
    assert [type(m).__name__ for m in model] == ["Conv2d", "ReLU", "Flatten", "Linear", "Linear"]
    assert not any("lora" in k or "scaling" in k for k in model.state_dict())
    torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)


def test_a_checkpoint_taken_while_merged_holds_the_unmerged_base():
    model = trained(lora)
    before = bits(model.state_dict())
    merge_adapters(model)
    during = bits(model.state_dict())
    assert list(during) == list(before)
    assert all(torch.equal(during[k], v) for k, v in before.items())


def test_loading_unmerges_first():
    model, other = trained(lora), trained(lora)
    x = torch.randn(5, 2, 4, 4)
    with torch.no_grad():
        other[3].lora_B.mul_(2)
    merge_adapters(model)
    model.load_state_dict(other.state_dict())
    assert torch.equal(model(x), other(x))
    merge_adapters(model)
    load_lora_weights(model, trained(lora).state_dict())
    assert torch.equal(model(x), trained(lora)(x))


def test_training_unmerges_first_and_evaluating_does_not():
    model = trained(lora)
    before = bits(model.state_dict())
    merge_adapters(model)
    assert model.eval()[3].merged
    model.train()
    assert not any(getattr(m, "merged", False) for m in model.modules())
    assert model[3].training
    assert all(torch.equal(v, before[k]) for k, v in bits(model.state_dict()).items())


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_merged_copy_unmerges_on_its_own(clone):
    model = trained(lora)
    before = bits(model.state_dict())
    merge_adapters(model)
    twin = clone(model).double().float()
    unmerge_adapters(twin)
    assert all(torch.equal(v, before[k]) for k, v in bits(twin.state_dict()).items())
    assert model[3].merged


def test_ia3_scales_the_bias_too():
    layer = trained(apply_ia3_to)[3]
    weight, bias = layer.base.weight.clone(), layer.base.bias.clone()
    merge_adapters(layer)
    torch.testing.assert_close(layer.base.weight, weight * layer.scaling[:, None])
    torch.testing.assert_close(layer.base.bias, bias * layer.scaling)


def test_a_shared_weight_is_refused():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    apply_lora_to(model, "a")
    with pytest.raises(ValueError, match=r"'a\.base\.weight' and 'b\.weight' are one tensor"):
        merge_adapters(model)
    assert not model["a"].merged


def test_a_computed_weight_is_refused():
    model = nn.Sequential(nn.Linear(4, 4))
    nn.utils.prune.l1_unstructured(model[0], "weight", 0.5)
    apply_lora_to(model, "0")
    x = torch.randn(2, 4)
    with pytest.raises(ValueError, match="computed"):
        merge_adapters(model)
    assert torch.equal(model(x), model[0].base(x))


def test_a_root_wrapper_merges_and_says_how_to_unload():
    layer = LoRALinear(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"take its \.base"):
        merge_adapters(layer, unload=True)
    assert not layer.merged
    assert merge_adapters(layer) == 1
    assert unmerge_adapters(layer) == 1


def test_the_base_of_a_shared_container_merges_once():
    block = nn.Sequential(nn.Linear(4, 4))
    model = nn.ModuleDict({"first": block, "second": block})
    apply_lora_to(model, "*")
    with torch.no_grad():
        block[0].lora_B.normal_()
    x = torch.randn(2, 4)
    expected = block(x)
    assert merge_adapters(model, unload=True) == 1
    assert type(model["second"][0]) is nn.Linear
    torch.testing.assert_close(model["first"](x), expected)


def quantized(net):
    torchao = pytest.importorskip("torchao.quantization")
    torchao.quantize_(net, torchao.Int8WeightOnlyConfig())
    return net


def stack():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 16)).eval()


def test_an_int8_base_is_refused_before_a_layer_is_merged():
    model = stack()
    quantized(model[2])
    apply_lora_to(model, "*")
    x = torch.randn(3, 32)
    expected = model(x)
    with pytest.raises(ValueError, match=r"'2\.base\.weight' holds a Int8Tensor of torch.float32"):
        merge_adapters(model)
    assert not any(layer.merged for layer in (model[0], model[2]))
    assert torch.equal(model(x), expected)


def test_a_failure_in_the_middle_unmerges_what_was_merged(monkeypatch):
    model = trained(lora)
    before = bits(model.state_dict())
    monkeypatch.setattr(model[4], "merged_tensors", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        merge_adapters(model)
    weights = {n: p.detach().clone().view(torch.uint8) for n, p in model.named_parameters()}
    assert all(torch.equal(weights[n], before[n]) for n in weights)
    assert not model[0].merged


def test_a_net_quantized_after_the_merge_changes_modes_and_says_that_the_merge_is_final():
    model = stack()
    apply_lora_to(model, "*")
    with torch.no_grad():
        model[0].lora_B.normal_()
    x = torch.randn(3, 32)
    merge_adapters(model)
    expected = model(x)
    quantized(model)
    model.train()
    torch.testing.assert_close(model(x), expected, atol=0.2, rtol=0.1)
    assert type(model.state_dict()["0.base.weight"]).__name__ == "Int8Tensor"
    with pytest.raises(ValueError, match=r"were replaced \(quantized\?\) since"):
        unmerge_adapters(model)
