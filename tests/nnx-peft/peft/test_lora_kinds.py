"""LoRA on convolutions and embeddings, and LoRA+ learning rates."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from nnx.peft import (
    LoRAConv2d,
    LoRAEmbedding,
    LoRALinear,
    apply_lora_to,
    lora_plus_groups,
    lora_plus_specs,
    merge_adapters,
)
from torch import nn

ALL = (nn.Linear, nn.Conv2d, nn.Embedding)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2, "padding": 1},
        {"dilation": 2, "padding": "same"},
        {"padding": 1, "padding_mode": "circular"},
        {"kernel_size": (1, 3), "bias": False},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_convolution_starts_exact_and_equals_the_convolution_of_the_summed_kernel(options, dtype):
    torch.manual_seed(0)
    base = nn.Conv2d(3, 5, **{"kernel_size": 3, **options}).to(dtype)
    x = torch.randn(2, 3, 8, 8).to(dtype)
    before = base(x)
    layer = LoRAConv2d(base, r=2, alpha=4.0)
    assert torch.equal(layer(x), before)
    with torch.no_grad():
        layer.lora_B.normal_()
    kernel = base.weight + 2.0 * (layer.lora_B.flatten(1) @ layer.lora_A.flatten(1)).view_as(
        base.weight
    )
    expected = base._conv_forward(x, kernel, base.bias)
    tolerance = 0.1 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(layer(x), expected, atol=tolerance, rtol=tolerance)
    y = layer(x)
    merge_adapters(layer)
    torch.testing.assert_close(layer(x), y, atol=tolerance, rtol=tolerance)


def test_grouped_convolutions_are_refused():
    base = nn.Conv2d(4, 4, 3, groups=2)
    with pytest.raises(ValueError, match="convolution of 2 groups"):
        LoRAConv2d(base)
    model = nn.Sequential(nn.Conv2d(4, 4, 3), base)
    with pytest.raises(ValueError, match="groups"):
        apply_lora_to(model, "*", kinds=ALL)
    assert type(model[0]) is nn.Conv2d
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_an_embedding_starts_exact_and_only_looked_up_rows_learn(dtype):
    torch.manual_seed(0)
    base = nn.Embedding(10, 4, padding_idx=0).to(dtype)
    ids = torch.tensor([[1, 2, 0], [3, 1, 1]])
    before = base(ids)
    layer = LoRAEmbedding(base, r=2, alpha=6.0)
    assert torch.equal(layer(ids), before)
    weight = base.weight.clone()
    layer(ids).float().pow(2).sum().backward()
    assert layer.lora_A.grad.abs().sum(0).nonzero().flatten().tolist() == [1, 2, 3]
    with torch.no_grad():
        layer.lora_A.normal_()
    table = base.weight + 3.0 * (layer.lora_B @ layer.lora_A).T
    tolerance = 0.2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(layer(ids), F.embedding(ids, table), atol=tolerance, rtol=tolerance)
    y = layer(ids)
    merge_adapters(layer)
    torch.testing.assert_close(layer(ids), y, atol=tolerance, rtol=tolerance)
    layer.unmerge()
    assert torch.equal(base.weight, weight)
    assert (layer.num_embeddings, layer.embedding_dim) == (10, 4)


def test_an_embedding_that_rewrites_its_weight_is_refused():
    with pytest.raises(ValueError, match="max_norm"):
        LoRAEmbedding(nn.Embedding(4, 3, max_norm=1.0))
    with pytest.raises(ValueError, match="token ids cannot be dropped"):
        LoRAEmbedding(nn.Embedding(4, 3), dropout=0.1)


def test_kinds_choose_the_layers():
    def model():
        return nn.ModuleList([nn.Embedding(4, 3), nn.Linear(3, 3), nn.Conv2d(3, 3, 1)])

    net = model()
    assert apply_lora_to(net, "*") == 1
    net = model()
    assert apply_lora_to(net, "*", kinds=ALL) == 3
    assert [type(m) for m in net] == [LoRAEmbedding, LoRALinear, LoRAConv2d]


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (LoRALinear, nn.Conv2d(1, 1, 1)),
        (LoRAConv2d, nn.Linear(1, 1)),
        (LoRAEmbedding, nn.Linear(1, 1)),
    ],
)
def test_each_wrapper_adapts_its_own_kind(kind, base):
    with pytest.raises(TypeError, match=f"{kind.__name__} adapts nn"):
        kind(base)


def test_lora_plus_gives_b_a_larger_rate():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    apply_lora_to(model, "0")
    model[1].bias.requires_grad_(False)
    groups = lora_plus_groups(model, lr=1e-3, ratio=8.0, weight_decay=0.1)
    assert [g["lr"] for g in groups] == [1e-3, 8e-3]
    assert [g["weight_decay"] for g in groups] == [0.1, 0.1]
    assert [id(p) for p in groups[1]["params"]] == [id(model[0].lora_B)]
    assert [id(p) for p in groups[0]["params"]] == [id(model[0].lora_A), id(model[1].weight)]
    torch.optim.AdamW(groups)


def test_lora_plus_as_param_group_specs():
    from nnx.finetune import build_param_groups

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    apply_lora_to(model, "*")
    groups = build_param_groups(
        model, lora_plus_specs(ratio=4.0), default_lr=0.5, default_weight_decay=0.0
    )
    rates = {id(p): g["lr"] for g in groups for p in g["params"]}
    assert rates == {
        id(p): 2.0 if n.endswith("lora_B") else 0.5
        for n, p in model.named_parameters()
        if p.requires_grad
    }


def test_lora_plus_refuses_what_it_cannot_scale():
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="no lora_B"):
        lora_plus_groups(model, lr=0.1)
    for bad in (0, -1.0, float("inf"), "4"):
        with pytest.raises(ValueError, match="ratio must be"):
            lora_plus_specs(ratio=bad)


@pytest.mark.parametrize("autocast", [False, True])
def test_adapters_in_fp32_over_a_bf16_base(autocast):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 6), nn.Conv2d(4, 6, 1), nn.Embedding(5, 6)]
    inputs = [torch.randn(3, 4), torch.randn(3, 4, 2, 2), torch.arange(5)]
    for layer, x in zip(layers, inputs):
        model = nn.Sequential(layer.to(torch.bfloat16))
        x = x.to(torch.bfloat16) if x.is_floating_point() else x
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            before = model(x)
            apply_lora_to(model, "*", r=2, kinds=ALL)
            for name in ("lora_A", "lora_B"):
                setattr(model[0], name, nn.Parameter(getattr(model[0], name).float()))
            assert torch.equal(model(x), before)
            assert model(x).dtype == before.dtype
            model(x).float().pow(2).sum().backward()
        assert model[0].lora_B.grad.dtype == torch.float32
        assert (model[0].lora_A.grad.abs() + model[0].lora_B.grad.abs().sum()).sum() > 0
