"""IA3 scales each output; an AdapterLayer starts as the identity."""

from __future__ import annotations

import pytest
import torch
from nnx.peft import AdapterLayer, IA3Linear, apply_ia3_to, load_ia3_weights, save_ia3_weights
from torch import nn


def test_ia3_multiplies_each_output_feature():
    layer = IA3Linear(nn.Linear(4, 3))
    assert torch.equal(layer.scaling, torch.ones(3))
    with torch.no_grad():
        layer.scaling.copy_(torch.tensor([1.0, 2.0, -1.0]))
    x = torch.randn(5, 4)
    assert torch.equal(layer(x), layer.base(x) * torch.tensor([1.0, 2.0, -1.0]))
    assert (layer.in_features, layer.out_features) == (4, 3)
    assert [n for n, p in layer.named_parameters() if p.requires_grad] == ["scaling"]


def test_ia3_files_hold_only_owned_scalings(tmp_path):
    model = nn.ModuleDict({"scaling_projection": nn.Linear(4, 4), "other": nn.Linear(4, 4)})
    apply_ia3_to(model, "scaling_projection", freeze_base=True)
    with torch.no_grad():
        model["scaling_projection"].scaling.mul_(3)
    path = save_ia3_weights(model, tmp_path / "ia3.pt")
    state = torch.load(path, weights_only=True)
    assert list(state) == ["scaling_projection.scaling"]

    twin = nn.ModuleDict({"scaling_projection": nn.Linear(4, 4), "other": nn.Linear(4, 4)})
    with pytest.warns(UserWarning, match="no adapter here owns them"):
        assert load_ia3_weights(twin, path) == 0
    apply_ia3_to(twin, "scaling_projection")
    base = twin["scaling_projection"].base.weight.clone()
    assert load_ia3_weights(twin, {**model.state_dict(), **state}) == 1
    assert torch.equal(twin["scaling_projection"].scaling, torch.full((4,), 3.0))
    assert torch.equal(twin["scaling_projection"].base.weight, base)


def test_a_wrong_ia3_shape_is_torchs_error():
    model = nn.Sequential(nn.Linear(4, 4))
    apply_ia3_to(model, "*")
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.scaling"):
        load_ia3_weights(model, {"0.scaling": torch.ones(5)})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(6,), (0, 6), (2, 3, 6)])
def test_an_adapter_is_the_identity_in_every_dtype_and_shape(dtype, shape):
    layer = AdapterLayer(6, 2).to(dtype)
    x = torch.randn(shape).to(dtype)
    assert torch.equal(layer(x), x)
    assert torch.equal(torch.compile(layer, backend="aot_eager")(x), x)


def test_an_adapter_is_the_identity_and_every_part_can_learn():
    torch.manual_seed(0)
    layer = AdapterLayer(dim=6, bottleneck=2)
    x = torch.randn(3, 5, 6)
    assert torch.equal(layer(x), x)
    layer(x).pow(2).sum().backward()
    assert layer.up.weight.grad.abs().sum() > 0
    assert layer.down.weight.grad.abs().sum() == 0  # the zero `up` hides it for one step
    with torch.no_grad():
        layer.up.weight.normal_()
    expected = x + layer.up(nn.functional.gelu(layer.down(x)))
    assert torch.equal(layer(x), expected)


def test_the_activation_is_a_factory():
    assert isinstance(AdapterLayer(4, 2, nn.ReLU).act, nn.ReLU)
    assert isinstance(AdapterLayer(4, 2, lambda: nn.LeakyReLU(0.3)).act, nn.LeakyReLU)


@pytest.mark.parametrize(("dim", "bottleneck"), [(0, 1), (4, 0), (4, 1.5), (True, 2)])
def test_sizes_must_be_positive_integers(dim, bottleneck):
    with pytest.raises(ValueError, match="must be an integer >= 1"):
        AdapterLayer(dim, bottleneck)
