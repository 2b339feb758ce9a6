from __future__ import annotations

import builtins
import re
import sys

import numpy as np
import plotly.graph_objects as go
import pytest
import torch
from captum.attr import IntegratedGradients
from made_models import pair_model
from nnx import Losses, NNModel, NNModelParams, PositionalInputs
from nnx.plugins.siblings import install_line
from nnx.viz import (
    activation_map,
    attribute,
    gradient_flow,
    netron_export,
    summary,
    weight_histogram,
)
from torch import nn


def picture(n=2):
    return torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def install(extra=None):
    """The line that installs what a picture needs, as a pattern."""
    return re.escape(install_line("nnx-viz", extra))


def without(monkeypatch, *names):
    """Make the libraries ``names`` look as if they were not installed."""
    real = builtins.__import__
    for loaded in list(sys.modules):
        if loaded.split(".")[0] in names:
            monkeypatch.delitem(sys.modules, loaded)

    class Blocker:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in names:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Blocker(), *sys.meta_path])
    assert real is builtins.__import__


def keyword_model():
    return pair_model(), {"left": torch.randn(3, 5), "right": torch.randn(3, 3)}


class TestSummary:
    def test_counts_parameters_and_shapes(self, mixed_net, untouched):
        table = summary(mixed_net, input_size=(2, 3, 8, 8))
        assert table.total_params == sum(p.numel() for p in mixed_net.parameters())
        assert "[2, 8, 8, 8]" in str(table)

    def test_reads_a_training_batch(self, mixed_net, untouched):
        table = summary(mixed_net, batch=(picture(), torch.zeros(2, dtype=torch.long)))
        assert table.total_mult_adds > 0

    def test_reads_keyword_inputs(self):
        class Keywords(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(3, 2)

            def forward(self, *, left, right):
                return self.a(left) + self.a(right)

        table = summary(
            Keywords(), input_data={"left": torch.ones(1, 3), "right": torch.ones(1, 3)}
        )
        assert table.total_params == 8

    def test_frozen_parameters_are_told_apart(self, mixed_net):
        mixed_net.conv.weight.requires_grad_(False)
        table = summary(mixed_net)
        assert table.trainable_params == table.total_params - mixed_net.conv.weight.numel()

    def test_one_source_of_input_only(self, mixed_net, untouched):
        with pytest.raises(ValueError, match="one of input_size, batch, not 2"):
            summary(mixed_net, input_size=(1, 3, 8, 8), batch=(picture(), None))

    def test_a_failing_forward_leaves_the_model_alone(self, mixed_net, untouched):
        with pytest.raises(RuntimeError):
            summary(mixed_net, input_size=(2, 5, 8, 8))

    def test_needs_torchinfo(self, mixed_net, monkeypatch):
        without(monkeypatch, "torchinfo")
        with pytest.raises(ImportError, match=install()):
            summary(mixed_net)


class TestWeightHistogram:
    def test_bars_hold_every_finite_value(self, mixed_net, untouched):
        figure = weight_histogram(mixed_net, bins=16)
        assert [t.name for t in figure.data] == [n for n, _ in mixed_net.named_parameters()]
        for trace, parameter in zip(figure.data, mixed_net.parameters()):
            assert sum(trace.y) == parameter.numel()
            assert len(trace.x) == 16

    def test_bins_equal_numpy(self, mixed_net):
        trace = weight_histogram(mixed_net, bins=10).data[0]
        values = mixed_net.conv.weight.detach().numpy().ravel()
        counts, edges = np.histogram(values, bins=10)
        assert list(trace.y) == counts.tolist()
        assert np.allclose(trace.x, (edges[:-1] + edges[1:]) / 2, rtol=1e-4)

    def test_non_finite_values_are_counted_in_the_title(self, mixed_net):
        with torch.no_grad():
            mixed_net.head.bias[0] = float("nan")
            mixed_net.head.bias[1] = float("inf")
        figure = weight_histogram(mixed_net)
        assert "head.bias (2 not finite)" in [a.text for a in figure.layout.annotations]

    def test_constant_and_empty_tensors(self):
        net = nn.ParameterDict(
            {"zero": nn.Parameter(torch.zeros(5)), "none": nn.Parameter(torch.zeros(0))}
        )
        figure = weight_histogram(net)
        assert [t.name for t in figure.data] == ["zero"]
        assert sum(figure.data[0].y) == 5

    def test_a_hundred_million_weights_draw_under_two_megabytes(self):
        net = nn.ParameterList([torch.linspace(-1, 1, 100_000_000)])
        assert len(weight_histogram(net).to_json()) < 2_000_000

    def test_a_thousand_tensors_draw_under_two_megabytes(self):
        net = nn.ModuleList(nn.Linear(4, 4) for _ in range(500))
        assert len(weight_histogram(net).to_json()) < 2_000_000

    def test_no_parameters(self):
        with pytest.raises(ValueError, match="no parameters"):
            weight_histogram(nn.ReLU())


class TestActivationMap:
    def test_a_convolution_gives_one_heatmap_per_channel(self, mixed_net, untouched):
        x = picture()
        figure = activation_map(mixed_net, x, "conv", max_channels=5)
        assert len(figure.data) == 5
        expected = mixed_net.conv(x)[0].detach().numpy()
        for channel, trace in zip(expected, figure.data):
            assert np.allclose(trace.z, channel, atol=1e-6)

    def test_a_dense_layer_gives_samples_by_features(self, mixed_net, untouched):
        figure = activation_map(mixed_net, picture(3), "head")
        assert np.asarray(figure.data[0].z).shape == (3, 4)

    def test_the_model_itself(self, mixed_net, untouched):
        assert np.asarray(activation_map(mixed_net, picture(), "").data[0].z).shape == (2, 4)

    def test_unknown_layer_names_the_closest(self, mixed_net, untouched):
        with pytest.raises(ValueError, match=r"no layer 'hed'; did you mean 'head'.*conv, norm"):
            activation_map(mixed_net, picture(), "hed")

    def test_a_layer_that_is_not_reached(self, mixed_net):
        mixed_net.spare = nn.Linear(1, 1)
        with pytest.raises(RuntimeError, match="did not reach 'spare'"):
            activation_map(mixed_net, picture(), "spare")
        assert not mixed_net.spare._forward_hooks

    def test_large_activations_stay_drawable(self):
        figure = activation_map(nn.Conv2d(1, 2, 1), torch.randn(1, 1, 1000, 1500), "")
        assert np.asarray(figure.data[0].z).shape == (256, 256)

    def test_a_layer_that_works_in_place_does_not_change_the_picture(self):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 2))
        x = torch.randn(4, 6)
        figure = activation_map(net, x, "0")
        assert np.allclose(figure.data[0].z, net[0](x).detach().numpy(), atol=1e-6)
        assert np.asarray(figure.data[0].z).min() < 0

    def test_the_callers_input_stays_as_it_was(self):
        net = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 2))
        x = torch.randn(4, 6)
        before = x.clone()
        activation_map(net, x, "0")
        summary(net, input_data=x)
        assert torch.equal(x, before)

    def test_a_model_with_keyword_inputs(self):
        model, x = keyword_model()
        figure = activation_map(model, x, "a")
        assert np.allclose(figure.data[0].z, model.net.a(x["left"]).detach().numpy(), atol=1e-6)
        output = activation_map(model, x, "").data[0].z
        assert np.allclose(output, model.net(**x)["logits"].detach().numpy(), atol=1e-6)

    def test_a_layer_is_found_by_each_of_its_names(self, mixed_net):
        mixed_net.alias = mixed_net.head
        assert np.asarray(activation_map(mixed_net, picture(), "alias").data[0].z).shape == (2, 4)

    def test_shrinking_averages(self):
        from nnx.viz._common import shrink

        values = np.arange(512 * 4, dtype=np.float64).reshape(512, 4)
        assert np.allclose(shrink(values, 256), (values[::2] + values[1::2]) / 2)


class TestAttribute:
    @pytest.mark.parametrize(
        "method",
        [
            "integrated_gradients",
            "gradient_shap",
            "deep_lift",
            "saliency",
            "input_x_gradient",
            "occlusion",
        ],
    )
    def test_every_method_attributes_the_input(self, mixed_net, untouched, method):
        x = picture()
        values, figure = attribute(mixed_net, x, method=method, target=1)
        assert values.shape == x.shape
        assert not values.requires_grad
        assert x.grad is None
        assert not x.requires_grad
        assert isinstance(figure, go.Figure)
        assert np.asarray(figure.data[0].z).shape == (8, 8)

    def test_equals_captum(self, mixed_net):
        x = picture()
        values, _ = attribute(mixed_net, x, target=2, n_steps=20)
        expected = IntegratedGradients(mixed_net.eval()).attribute(x, target=2, n_steps=20)
        assert torch.allclose(values, expected.detach())

    def test_two_dimensional_inputs_are_rows(self):
        _, figure = attribute(nn.Linear(5, 3), torch.randn(4, 5), target=0, method="saliency")
        assert np.asarray(figure.data[0].z).shape == (4, 5)

    @pytest.mark.parametrize(
        "method", ["integrated_gradients", "saliency", "deep_lift", "occlusion"]
    )
    def test_keyword_inputs_are_attributed_each(self, method):
        model, x = keyword_model()
        values, figure = attribute(model, x, method=method, target=1)
        assert list(values) == ["left", "right"]
        assert len(figure.data) == 2
        a, b = (layer.weight[1].detach() for layer in (model.net.a, model.net.b))
        if method == "saliency":
            expected = a.abs().expand(3, -1), b.abs().expand(3, -1)
        else:  # of a linear model: weight times input
            expected = a * x["left"], b * x["right"]
        for found, wanted in zip(values.values(), expected):
            torch.testing.assert_close(found.to(wanted.dtype), wanted, atol=1e-5, rtol=1e-4)

    def test_inputs_that_are_no_floats_are_passed_along(self):
        class Gated(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(4, 2)

            def forward(self, x, mask):
                return self.layer(x * mask)

        module = Gated()
        model = NNModel(
            module=module,
            params=NNModelParams(loss=Losses.CROSS_ENTROPY),
            batch_adapter=PositionalInputs(2),
        )
        x, mask = torch.randn(3, 4), torch.tensor([[1, 0, 1, 0]] * 3)
        (values,), _ = attribute(model, (x, mask), target=0)
        expected = module.layer.weight[0].detach() * x * mask
        torch.testing.assert_close(values.float(), expected, atol=1e-5, rtol=1e-4)
        with pytest.raises(ValueError, match="no input is of floating point"):
            attribute(model, (mask, mask), target=0)

    def test_layers_in_place_are_explained_and_stay_in_place(self):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 2))
        plain = nn.Sequential(net[0], nn.ReLU(), net[2])
        x = torch.randn(4, 6)
        for method in ("deep_lift", "saliency", "integrated_gradients"):
            found, _ = attribute(net, x, target=0, method=method)
            wanted, _ = attribute(plain, x, target=0, method=method)
            assert torch.equal(found, wanted)
        assert net[1].inplace

    def test_unknown_method(self, mixed_net, untouched):
        with pytest.raises(ValueError, match="choose one of integrated_gradients"):
            attribute(mixed_net, picture(), method="lime")

    def test_missing_target(self, mixed_net, untouched):
        with pytest.raises(ValueError, match="pass target="):
            attribute(mixed_net, picture(), method="saliency")

    def test_needs_captum(self, mixed_net, monkeypatch):
        without(monkeypatch, "captum")
        with pytest.raises(ImportError, match=install()):
            attribute(mixed_net, picture(), target=0)


class TestGradientFlow:
    def test_norm_per_trainable_parameter(self, mixed_net):
        mixed_net.conv.bias.requires_grad_(False)
        mixed_net(picture()).sum().backward()
        figure = gradient_flow(mixed_net)
        bars = dict(zip(figure.data[0].x, figure.data[0].y))
        assert "conv.bias" not in bars
        for name, parameter in mixed_net.named_parameters():
            if parameter.requires_grad:
                assert bars[name] == pytest.approx(float(parameter.grad.norm()))

    def test_without_a_backward_pass(self, mixed_net):
        with pytest.raises(ValueError, match=r"loss\.backward"):
            gradient_flow(mixed_net)


class TestNetronExport:
    def test_the_graph_computes_what_the_model_computes(self, mixed_net, untouched, tmp_path):
        onnx = pytest.importorskip("onnx", reason="the onnx extra is not installed")
        from onnx.reference import ReferenceEvaluator

        path = str(tmp_path / "model.onnx")
        assert netron_export(mixed_net, path, picture(1)) == path
        onnx.checker.check_model(onnx.load(path))
        x = picture(5)
        modes = [m.training for m in mixed_net.modules()]
        with torch.no_grad():
            expected = mixed_net.eval()(x).numpy()
        for module, mode in zip(mixed_net.modules(), modes):
            module.training = mode
        (result,) = ReferenceEvaluator(path).run(None, {"input_0": x.numpy()})
        assert np.allclose(result, expected, atol=1e-5)
        assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]

    def test_a_mapping_is_refused_before_writing(self, mixed_net, untouched, tmp_path):
        pytest.importorskip("onnx", reason="the onnx extra is not installed")
        with pytest.raises(TypeError, match="positional"):
            netron_export(mixed_net, str(tmp_path / "m.onnx"), {"x": picture()})
        assert not list(tmp_path.iterdir())

    def test_launch_needs_netron_before_writing(self, mixed_net, tmp_path, monkeypatch):
        pytest.importorskip("onnx", reason="the onnx extra is not installed")
        without(monkeypatch, "netron")
        with pytest.raises(ImportError, match=install("netron")):
            netron_export(mixed_net, str(tmp_path / "m.onnx"), picture(), launch=True)
        assert not list(tmp_path.iterdir())

    def test_needs_onnx_before_writing(self, mixed_net, tmp_path, monkeypatch):
        without(monkeypatch, "onnx")
        with pytest.raises(ImportError, match=install("onnx")):
            netron_export(mixed_net, str(tmp_path / "m.onnx"), picture())
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("draw", [weight_histogram, gradient_flow])
def test_pictures_need_plotly(draw, mixed_net, monkeypatch):
    without(monkeypatch, "plotly")
    with pytest.raises(ImportError, match=install()):
        draw(mixed_net)


def test_something_that_is_not_a_model():
    with pytest.raises(TypeError, match=r"torch\.nn\.Module or an NNModel, not int"):
        weight_histogram(3)
