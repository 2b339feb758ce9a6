"""INT8 after training and int4 in training, through torchao."""

from __future__ import annotations

import copy
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from nnx.models import state_topology
from nnx.peft import LoRALinear, apply_lora_to, merge_adapters, unmerge_adapters
from nnx.plugins.manager import registry
from nnx.plugins.siblings import install_line
from torch import nn

torchao = pytest.importorskip("torchao", reason="torchao is the quantize extra")
pytestmark = pytest.mark.filterwarnings("ignore")

from nnx.quantize import QATLifecycleCallback, qat_train_step_factory, quantize_int8  # noqa: E402


def net(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    layers = nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8, bias=False), nn.Linear(8, 3)
    return nn.Sequential(*layers).to(dtype)


class Model:
    """What the quantizers use of a model, with an attribute and a method of its own."""

    def __init__(self):
        self.net = net()
        self.tokenizer = object()

    def predict(self, x):
        return self.net(x)


class TestInt8:
    def test_a_copy_of_the_same_class_is_close_and_the_original_untouched(self):
        class Mine(Model):
            def extra(self):
                return 7

        model = Mine()
        before = copy.deepcopy(model.net.state_dict())
        x = torch.randn(16, 32)
        expected = model.predict(x)
        quantized = quantize_int8(model)
        assert type(quantized) is Mine
        assert quantized.extra() == 7
        assert quantized.tokenizer is model.tokenizer
        assert quantized.net is not model.net
        assert 0 < (quantized.predict(x) - expected).abs().max() < 0.02
        assert torch.equal(model.predict(x), expected)
        assert all(torch.equal(v, before[k]) for k, v in model.net.state_dict().items())
        assert type(model.net[0].weight) is nn.Parameter

    def test_weights_are_per_channel_symmetric_int8(self):
        model = Model()
        quantized = quantize_int8(model)
        for i in (0, 2, 3):
            weight = model.net[i].weight
            scale = weight.abs().amax(1, keepdim=True) / 127
            error = (quantized.net[i].weight.dequantize() - weight).abs()
            assert (error <= scale * 0.51).all()

    def test_modes_are_kept(self):
        model = Model()
        model.net[0].eval()
        assert [m.training for m in quantize_int8(model).net.modules()] == [
            m.training for m in model.net.modules()
        ]

    def test_without_torchao_the_install_line_is_named(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "torchao.quantization", None)
        model = Model()
        with pytest.raises(ImportError, match=re.escape(install_line("nnx-peft", "quantize"))):
            quantize_int8(model)


def fit(callback, module, steps=3, device=None):
    """The lifecycle of a fit: optimizer first, then begin, steps, end."""
    ctx = SimpleNamespace(model=SimpleNamespace(net=module))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    callback.on_train_begin(ctx)
    torch.manual_seed(1)
    for _ in range(steps):
        x = torch.randn(16, 32, dtype=next(module.parameters()).dtype)
        module(x).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    prepared = copy.deepcopy(ctx.model.net)
    callback.on_train_end(ctx)
    return prepared, ctx.model.net


class TestQAT:
    def test_the_phases(self):
        callback = QATLifecycleCallback(groupsize=32)
        assert (callback.is_prepared, callback.is_converted) == (False, False)
        assert callback.checkpoint_transforms() == ()
        module = net()
        weight = module[0].weight
        callback.on_train_begin(SimpleNamespace(model=SimpleNamespace(net=module)))
        assert (callback.is_prepared, callback.is_converted) == (True, False)
        assert callback.checkpoint_transforms() == ()
        assert module[0].weight is weight
        assert list(module.state_dict()) == list(net().state_dict())
        callback.on_train_end(SimpleNamespace(model=SimpleNamespace(net=module)))
        assert (callback.is_prepared, callback.is_converted) == (False, True)
        (record,) = callback.checkpoint_transforms()
        assert record.state() == {
            "name": "torchao_qat",
            "version": 1,
            "options": {
                "targets": ["0", "2"],
                "qat_config": "8da4w",
                "groupsize": 32,
            },
        }

    def test_an_optimizer_built_before_trains_the_fake_quantized_weights(self):
        module = net()
        before = copy.deepcopy(module.state_dict())
        prepared, converted = fit(QATLifecycleCallback(), module)
        assert not torch.equal(prepared[0].weight, before["0.weight"])
        x = torch.randn(16, 32)
        assert converted[0].weight.dtype == torch.int8
        assert converted[0].weight.abs().max() <= 8
        torch.testing.assert_close(converted(x), prepared(x), atol=0.02, rtol=0.02)

    def test_a_checkpoint_rebuilds_the_converted_net(self):
        callback = QATLifecycleCallback()
        _, converted = fit(callback, net())
        (record,) = callback.checkpoint_transforms()
        fresh = net(seed=9)
        state = torch.get_rng_state()
        fresh = registry("transform").resolve(record.name, record.version)(fresh, record.options)
        assert torch.equal(torch.get_rng_state(), state)
        assert state_topology(fresh) == state_topology(converted)
        fresh.load_state_dict(converted.state_dict())
        x = torch.randn(16, 32)
        assert torch.equal(fresh(x), converted(x))

    def test_another_net_is_refused_by_the_record(self):
        callback = QATLifecycleCallback()
        fit(callback, net())
        (record,) = callback.checkpoint_transforms()
        other = nn.Sequential(nn.Linear(32, 64))
        with pytest.raises(ValueError, match="not the net that was trained"):
            registry("transform").resolve(record.name)(other, record.options)
        assert type(other[0]) is nn.Linear

    def test_modes_flags_and_rng_are_left_alone(self):
        module = net()
        module[0].eval()
        module[2].weight.requires_grad_(False)
        modes = [m.training for m in module]
        ctx = SimpleNamespace(model=SimpleNamespace(net=module))
        state = torch.get_rng_state()
        callback = QATLifecycleCallback()
        callback.on_train_begin(ctx)
        assert [m.training for m in module] == modes
        assert not module[2].weight.requires_grad
        callback.on_train_end(ctx)
        assert [m.training for m in module] == modes
        assert not any(p.requires_grad for p in module[0].parameters())
        assert torch.equal(torch.get_rng_state(), state)

    def test_lora_wrappers_are_quantized_inside(self):
        module = net()
        apply_lora_to(module, "0", r=2)
        callback = QATLifecycleCallback()
        _, converted = fit(callback, module)
        (record,) = callback.checkpoint_transforms()
        assert record.state()["options"]["targets"] == ["0.base", "2"]
        assert converted[0].base.weight.dtype == torch.int8
        converted(torch.randn(2, 32))

    def test_nothing_to_quantize_is_refused_and_nothing_changes(self):
        module = nn.Sequential(nn.Linear(8, 4))
        with pytest.raises(ValueError, match="multiple of groupsize=32"):
            QATLifecycleCallback().on_train_begin(
                SimpleNamespace(model=SimpleNamespace(net=module))
            )
        assert type(module[0]) is nn.Linear

    def test_a_layer_that_its_parent_reads_is_refused(self):
        module = nn.TransformerEncoderLayer(32, 2, 64)
        with pytest.raises(ValueError, match="read directly by its"):
            QATLifecycleCallback().on_train_begin(
                SimpleNamespace(model=SimpleNamespace(net=module))
            )
        assert type(module.linear1) is nn.Linear

    def test_an_aliased_layer_is_refused(self):
        module = nn.Module()
        module.a = module.b = nn.Linear(32, 32)
        with pytest.raises(ValueError, match="registered as 'a', 'b'"):
            QATLifecycleCallback().on_train_begin(
                SimpleNamespace(model=SimpleNamespace(net=module))
            )
        assert module.a is module.b

    def test_half_precision_nets_are_trained_in_their_dtype(self):
        prepared, converted = fit(QATLifecycleCallback(), net(dtype=torch.bfloat16))
        assert prepared[0].weight.dtype == torch.bfloat16
        assert converted(torch.randn(2, 32, dtype=torch.bfloat16)).isfinite().all()

    def test_the_step_is_the_base_step(self):
        def step(ctx):
            raise AssertionError

        assert qat_train_step_factory(step) is step
        assert qat_train_step_factory(step, "8da4w") is step

    @pytest.mark.parametrize(
        "build", [lambda c: qat_train_step_factory(None, c), QATLifecycleCallback]
    )
    def test_an_unknown_config_is_refused_early(self, build):
        with pytest.raises(ValueError, match="qat_config must be one of '8da4w', not '4w'"):
            build("4w")

    @pytest.mark.parametrize("groupsize", [0, -1, True, 32.0])
    def test_the_groupsize_is_checked(self, groupsize):
        with pytest.raises(ValueError, match="groupsize must be an integer >= 1"):
            QATLifecycleCallback(groupsize=groupsize)

    def test_without_torchao_the_install_line_is_named(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "torchao.quantization.qat", None)
        for build in (qat_train_step_factory, QATLifecycleCallback):
            with pytest.raises(ImportError, match=re.escape(install_line("nnx-peft", "quantize"))):
                build()


def test_a_quantized_copy_is_refused_where_its_weights_would_be_saved():
    from nnx import Activations, FeedFwdNN, Nets, NNModelParams, NNParams
    from nnx.models import check_topology

    params = NNParams(
        input_dim=32, output_dim=3, hidden_dims=[8], dropout_prob=0.0, activation=Activations.RELU
    )
    model = SimpleNamespace(
        net=FeedFwdNN(params), params=NNModelParams(net=Nets.FEED_FWD), transforms=()
    )
    model.recorded_topology = state_topology(model.net)
    check_topology(model)
    with pytest.raises(ValueError, match=r"layers\.0 \(Linear\) holds a .* which is for inference"):
        check_topology(quantize_int8(model))


def test_lora_on_quantized_weights_trains_and_leaves_them_alone():
    model = quantize_int8(Model())
    x = torch.randn(4, 32)
    before = model.net(x)
    apply_lora_to(model.net, "0", r=2)
    assert torch.equal(model.net(x), before)
    weight = model.net[0].base.weight.dequantize().clone()
    optimizer = torch.optim.SGD([p for p in model.net.parameters() if p.requires_grad], lr=0.1)
    model.net(x).pow(2).sum().backward()
    optimizer.step()
    assert not torch.equal(model.net(x), before)
    assert torch.equal(model.net[0].base.weight.dequantize(), weight)


def test_a_copy_of_a_merged_net_has_the_update_in_its_plain_layers():
    model = Model()
    apply_lora_to(model.net, "*", r=2)
    with torch.no_grad():
        for layer in model.net:
            if isinstance(layer, LoRALinear):
                layer.lora_B.normal_()
    model.net.eval()
    x = torch.randn(4, 32)
    merge_adapters(model.net)
    expected = model.net(x)
    small = quantize_int8(model)
    assert not any(isinstance(m, LoRALinear) for m in small.net.modules())
    torch.testing.assert_close(small.net(x), expected, atol=0.3, rtol=0.1)
    small.net.train()
    small.net.eval()
    assert torch.equal(model.net(x), expected)
    assert unmerge_adapters(model.net)


def test_a_bare_module_is_refused_with_the_way_out():
    with pytest.raises(TypeError, match=r"takes an NNModel, not a Linear; wrap it in NNModel"):
        quantize_int8(nn.Linear(2, 2))
