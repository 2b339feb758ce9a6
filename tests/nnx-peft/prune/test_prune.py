"""Magnitude pruning, baked and masked, and the 2:4 hand-over to torchao."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from nnx.plugins.siblings import install_line
from nnx.prune import magnitude_prune, semi_structured_24
from torch import nn
from torch.nn.utils import prune as torch_prune


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4), nn.Conv1d(4, 4, 1))


def zeros(layer):
    return int((layer.weight == 0).sum())


class TestMagnitude:
    @pytest.mark.parametrize("sparsity", [0, 0.0, 0.25, 0.5, 0.9])
    def test_the_smallest_weights_go_and_the_others_stay(self, sparsity):
        net = model()
        before = net[0].weight.detach().clone()
        assert magnitude_prune(net, sparsity) == 2
        count = round(sparsity * 48)
        assert zeros(net[0]) == count
        smallest = before.abs().flatten().argsort()[:count]
        expected = before.flatten().clone()
        expected[smallest] = 0
        assert torch.equal(net[0].weight.flatten(), expected)

    def test_baked_weights_keep_keys_order_and_identity(self):
        net, plain = model(), model()
        parameters = list(net.parameters())
        magnitude_prune(net, 0.5)
        assert list(net.state_dict()) == list(plain.state_dict())
        assert all(a is b for a, b in zip(net.parameters(), parameters))
        plain.load_state_dict(net.state_dict(), strict=True)
        assert zeros(plain[0]) == 24

    def test_pruning_again_changes_nothing(self):
        net = model()
        magnitude_prune(net, 0.5)
        state = {k: v.clone() for k, v in net.state_dict().items()}
        assert magnitude_prune(net, 0.5) == 2
        assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())

    def test_masks_stay_compose_and_are_what_torch_makes(self):
        net, oracle = model(), model()
        for _ in range(2):
            magnitude_prune(net, 0.5, layer_pattern="0", bake=False)
            torch_prune.l1_unstructured(oracle[0], "weight", amount=0.5)
        assert {"0.weight_orig", "0.weight_mask"} <= set(net.state_dict())
        assert torch.equal(net[0].weight, oracle[0].weight)
        assert zeros(net[0]) == 36
        optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)
        net[0](torch.randn(3, 8)).sum().backward()
        optimizer.step()
        net[0](torch.randn(3, 8))
        assert zeros(net[0]) == 36
        magnitude_prune(net, 0.0, layer_pattern="0")
        assert list(net[0].state_dict()) == ["weight", "bias"]
        assert zeros(net[0]) == 36

    def test_the_pattern_selects_linears_only(self):
        net = model()
        assert magnitude_prune(net, 0.5, layer_pattern="2") == 1
        assert (zeros(net[0]), zeros(net[2])) == (0, 12)
        for pattern in ("none", "3"):
            with pytest.warns(UserWarning, match=f"magnitude_prune: '{pattern}' matches no Linear"):
                assert magnitude_prune(net, 0.5, layer_pattern=pattern) == 0
        with pytest.warns(UserWarning, match="the closest names are '0', '2'. Nothing was pruned"):
            magnitude_prune(net, 0.5, layer_pattern="0.*")
        assert (zeros(net[0]), zeros(net[2])) == (0, 12)

    def test_a_layer_is_found_by_each_of_its_names_and_pruned_once(self):
        net = nn.ModuleDict({"a": nn.Linear(8, 6)})
        net["b"] = net["a"]
        assert magnitude_prune(net, 0.5, layer_pattern="b", bake=False) == 1
        assert magnitude_prune(net, 0.5, bake=False) == 1
        assert zeros(net["a"]) == 36

    def test_a_cycle_of_modules_ends(self):
        net = nn.ModuleDict({"a": nn.Linear(8, 6)})
        net["a"].owner = net
        assert magnitude_prune(net, 0.5) == 1

    def test_a_model_in_place_of_its_net_is_refused(self):
        class Model:
            net = nn.Linear(2, 2)

        for prune in (lambda m: magnitude_prune(m, 0.5), semi_structured_24):
            with pytest.raises(TypeError, match=r"a torch.nn.Module, not a Model; pass its \.net"):
                prune(Model())

    def test_a_quantized_layer_is_refused_before_anything_is_pruned(self):
        torchao = pytest.importorskip(
            "torchao.quantization", reason="torchao is the quantize extra"
        )
        net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        torchao.quantize_(net[1], torchao.Int8WeightOnlyConfig())
        with pytest.raises(ValueError, match="the weight of '1' is a Int8Tensor, not a plain"):
            magnitude_prune(net, 0.5)
        assert zeros(net[0]) == 0

    def test_flags_are_kept(self):
        net = model()
        net[0].weight.requires_grad_(False)
        magnitude_prune(net, 0.5)
        assert not net[0].weight.requires_grad
        assert net[2].weight.requires_grad

    @pytest.mark.parametrize("sparsity", [1.0, -0.1, 1.5, float("nan"), "half", True])
    def test_a_sparsity_outside_its_domain_is_refused(self, sparsity):
        with pytest.raises(ValueError, match="sparsity must be a finite real number >= 0 and < 1"):
            magnitude_prune(model(), sparsity)

    def test_a_parametrized_weight_is_refused_before_anything_is_pruned(self):
        net = model()
        nn.utils.parametrizations.weight_norm(net[2])
        with pytest.raises(ValueError, match="'2' is parametrized"):
            magnitude_prune(net, 0.5)
        assert zeros(net[0]) == 0


class TestSemiStructured:
    def test_without_a_match_nothing_is_called(self):
        pytest.importorskip("torchao", reason="torchao is the quantize extra")
        with pytest.warns(UserWarning, match="semi_structured_24: 'none' matches no Linear"):
            assert semi_structured_24(model(), layer_pattern="none") == 0

    def test_matching_linears_go_to_torchao(self, monkeypatch):
        sparsity = pytest.importorskip("torchao.sparsity", reason="torchao is the quantize extra")
        asked = []

        def record(net, config, filter_fn):
            asked.extend(n for n, m in net.named_modules() if filter_fn(m, n))

        monkeypatch.setattr(sparsity, "sparsify_", record)
        assert semi_structured_24(model()) == 2
        assert asked == ["0", "2"]

    def test_unsupported_hardware_or_shape_is_torchs_error(self):
        pytest.importorskip("torchao", reason="torchao is the quantize extra")
        if torch.cuda.is_available():
            pytest.skip("this machine may support it")
        with pytest.raises(RuntimeError):
            semi_structured_24(model())

    def test_without_torchao_the_install_line_is_named(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "torchao.sparsity", None)
        with pytest.raises(ImportError, match=re.escape(install_line("nnx-peft", "quantize"))):
            semi_structured_24(model())
