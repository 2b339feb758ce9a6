"""DoRA's formula, its precision rules and its rows without a direction."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from nnx.peft import DoRALinear, apply_dora_to
from torch import nn


def moved(dtype=torch.float32, **options):
    torch.manual_seed(0)
    layer = DoRALinear(nn.Linear(6, 5).to(dtype), r=2, alpha=4.0, **options)
    with torch.no_grad():
        layer.lora_B.normal_()
        layer.magnitude.mul_(1.5)
    return layer


def test_each_row_is_its_magnitude_times_its_direction():
    layer = moved()
    x = torch.randn(3, 6)
    v = layer.base.weight + 2.0 * layer.lora_B @ layer.lora_A
    weight = layer.magnitude[:, None] * v / v.norm(dim=1, keepdim=True)
    torch.testing.assert_close(layer(x), F.linear(x, weight, layer.base.bias))


def test_it_adds_one_magnitude_per_output_feature():
    layer = DoRALinear(nn.Linear(6, 5), r=2)
    assert layer.magnitude.shape == (5,)
    torch.testing.assert_close(layer.magnitude, layer.base.weight.norm(dim=1))
    assert sum(p.numel() for p in layer.parameters() if p.requires_grad) == 2 * 6 + 5 * 2 + 5


def test_its_gradients_are_those_of_the_formula():
    layer = moved().double()
    x = torch.randn(3, 6, dtype=torch.float64)
    tensors = [
        p.detach().clone().requires_grad_() for p in (layer.lora_A, layer.lora_B, layer.magnitude)
    ]
    a, b, m = tensors
    v = layer.base.weight + 2.0 * b @ a
    F.linear(x, m[:, None] * v / v.norm(dim=1, keepdim=True), layer.base.bias).pow(
        2
    ).sum().backward()
    layer(x).pow(2).sum().backward()
    for parameter, reference in zip((layer.lora_A, layer.lora_B, layer.magnitude), tensors):
        torch.testing.assert_close(parameter.grad, reference.grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_layers_are_composed_in_fp32_and_cast_back(dtype):
    layer = moved(dtype)
    v = layer.base.weight.float() + 2.0 * layer.lora_B.float() @ layer.lora_A.float()
    norms = v.norm(dim=1).to(dtype).float()
    expected = (v * (layer.magnitude.float() / norms)[:, None]).to(dtype)
    weight = layer.effective_weight()
    assert weight.dtype == dtype
    assert torch.equal(weight, expected)


def test_fp64_keeps_fp64():
    layer = moved(torch.float64)
    v = layer.base.weight + 2.0 * layer.lora_B @ layer.lora_A
    expected = layer.magnitude[:, None] * v / v.norm(dim=1, keepdim=True)
    torch.testing.assert_close(layer.effective_weight(), expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.0, "tiny", "subnormal"])
def test_a_row_of_zero_or_tiny_weights_starts_as_the_base_and_learns(dtype, value):
    info = torch.finfo(dtype)
    value = {"tiny": info.tiny, "subnormal": info.smallest_normal / 4}.get(value, value)
    base = nn.Linear(6, 5).to(dtype)
    with torch.no_grad():
        base.weight[2] = value
    model = nn.Sequential(base)
    x = torch.randn(4, 6).to(dtype)
    before = model(x)
    assert apply_dora_to(model, "0") == 1
    assert torch.equal(model(x), before)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(4):
        (model(x).float() - 1.0).pow(2).mean().backward()
        for parameter in (model[0].lora_A, model[0].lora_B, model[0].magnitude):
            assert parameter.grad.isfinite().all()
        optimizer.step()
        optimizer.zero_grad()
    assert model(x).isfinite().all()
    assert model[0].lora_B[2].abs().sum() > 0


def test_dropout_acts_on_the_composed_update_not_on_the_input():
    layer = moved(dropout=0.5)
    torch.manual_seed(7)
    weight = layer.effective_weight()
    torch.manual_seed(7)
    v = layer.base.weight + F.dropout(2.0 * layer.lora_B @ layer.lora_A, 0.5)
    torch.testing.assert_close(weight, layer.magnitude[:, None] * v / v.norm(dim=1, keepdim=True))


def test_a_layer_whose_weight_is_not_contiguous_starts_exact_too():
    base = nn.Linear(64, 64)
    base.weight = nn.Parameter(torch.randn(64, 64).t())
    x = torch.randn(4, 64)
    before = base(x)
    assert torch.equal(DoRALinear(base)(x), before)


def test_a_linear_that_computes_in_its_own_way_is_refused():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(nn.Linear(4, 4), Scaled(4, 4))
    with pytest.raises(ValueError, match="this Scaled computes in its own way"):
        apply_dora_to(model, "*")
    assert all(p.requires_grad for p in model.parameters())
    assert type(model[0]) is nn.Linear
