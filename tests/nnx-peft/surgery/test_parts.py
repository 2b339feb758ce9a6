"""drop_layer, low_rank_factorize and expand_embedding."""

from __future__ import annotations

import pytest
import torch
from nnx.surgery import drop_layer, expand_embedding, low_rank_factorize, widen
from torch import nn


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))


class TestDropLayer:
    def test_the_layer_becomes_the_identity_in_a_copy(self):
        net = model().eval()
        thin = drop_layer(net, layer_name="2")
        assert isinstance(thin[2], nn.Identity)
        assert not thin[2].training
        assert isinstance(net[2], nn.Linear)
        x = torch.randn(3, 4)
        assert torch.equal(thin(x), net[3](net[1](net[0](x))))

    def test_the_least_important_candidate_goes(self):
        net = model()
        with torch.no_grad():
            net[2].weight.mul_(0.01)
        thin = drop_layer(net, layer_name=["0", "2"], importance=lambda m: m.weight.detach().norm())
        assert isinstance(thin[2], nn.Identity)
        assert isinstance(thin[0], nn.Linear)

    def test_the_first_of_equals_goes(self):
        thin = drop_layer(model(), layer_name=["2", "0"], importance=lambda m: 1.0)
        assert isinstance(thin[2], nn.Identity)

    def test_a_layer_that_changes_shapes_fails_loudly_later(self):
        thin = drop_layer(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), layer_name="0")
        with pytest.raises(RuntimeError):
            thin(torch.randn(1, 4))

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"layer_name": "7"}, KeyError, "'7' is not a submodule"),
            ({"layer_name": ["0", "7"], "importance": lambda m: 0}, KeyError, "'7'"),
            ({"layer_name": []}, ValueError, "empty list"),
            ({"layer_name": ["0"]}, ValueError, "needs importance="),
            (
                {"layer_name": "0", "importance": lambda m: 0},
                ValueError,
                "a single name needs none",
            ),
            (
                {"layer_name": ["0"], "importance": lambda m: float("nan")},
                ValueError,
                "NaN for '0'",
            ),
        ],
    )
    def test_refusals(self, options, error, message):
        with pytest.raises(error, match=message):
            drop_layer(model(), **options)


class TestLowRank:
    @pytest.mark.parametrize("shape", [(6, 9), (9, 6), (5, 5)])
    @pytest.mark.parametrize("bias", [True, False])
    def test_the_full_rank_is_exact(self, shape, bias):
        linear = nn.Linear(*shape, bias=bias)
        factors = low_rank_factorize(linear, rank=min(shape))
        x = torch.randn(4, shape[0])
        torch.testing.assert_close(factors(x), linear(x), atol=1e-5, rtol=1e-5)

    def test_a_lower_rank_is_the_best_approximation(self):
        linear = nn.Linear(9, 6).double()
        factors = low_rank_factorize(linear, rank=2)
        product = factors[1].weight @ factors[0].weight
        singular = torch.linalg.svdvals(linear.weight)
        torch.testing.assert_close((linear.weight - product).norm(), singular[2:].norm())
        assert torch.linalg.matrix_rank(product) == 2

    def test_the_two_layers(self):
        linear = nn.Linear(9, 6)
        factors = low_rank_factorize(linear, rank=3)
        assert isinstance(factors, nn.Sequential)
        assert [type(m) for m in factors] == [nn.Linear, nn.Linear]
        assert factors[0].bias is None
        assert torch.equal(factors[1].bias, linear.bias)
        assert factors[1].bias is not linear.bias
        assert (factors.in_features, factors.out_features) == (9, 6)
        assert (factors[0].out_features, factors[1].in_features) == (3, 3)

    def test_flags_mode_and_dtype_carry_over(self):
        linear = nn.Linear(9, 6).to(torch.bfloat16).eval()
        linear.weight.requires_grad_(False)
        factors = low_rank_factorize(linear, rank=6)
        assert [p.requires_grad for p in factors.parameters()] == [False, False, True]
        assert not any(m.training for m in factors.modules())
        assert {p.dtype for p in factors.parameters()} == {torch.bfloat16}
        x = torch.randn(4, 9, dtype=torch.bfloat16)
        torch.testing.assert_close(factors(x), linear(x), atol=0.05, rtol=0.05)

    def test_no_draw_from_the_global_rng_and_the_input_is_only_read(self):
        linear = nn.Linear(9, 6)
        before, state = linear.weight.detach().clone(), torch.get_rng_state()
        low_rank_factorize(linear, rank=2)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(linear.weight, before)

    @pytest.mark.parametrize("rank", [0, 7, -1, True, 2.0])
    def test_the_rank_is_checked(self, rank):
        with pytest.raises(ValueError, match="rank must be an integer >= 1 and <= 6"):
            low_rank_factorize(nn.Linear(9, 6), rank=rank)

    def test_kind_and_method_are_checked(self):
        with pytest.raises(TypeError, match=r"takes an nn\.Linear, not a ReLU"):
            low_rank_factorize(nn.ReLU(), rank=1)
        with pytest.raises(ValueError, match="method must be one of 'svd', not 'fisher'"):
            low_rank_factorize(nn.Linear(2, 2), rank=1, method="fisher")


class TestExpandEmbedding:
    def test_old_rows_are_exact_and_marked(self):
        emb = nn.Embedding(4, 3)
        larger, mask = expand_embedding(emb, new_num_embeddings=6)
        assert torch.equal(larger.weight[:4], emb.weight)
        assert torch.equal(larger.weight[4:], torch.zeros(2, 3))
        assert mask.dtype == torch.bool
        assert mask.tolist() == [True] * 4 + [False] * 2
        assert larger.num_embeddings == 6

    def test_copy_mean_fills_new_rows_with_the_mean(self):
        emb = nn.Embedding(4, 3)
        larger, _ = expand_embedding(emb, new_num_embeddings=6, init="copy_mean")
        torch.testing.assert_close(larger.weight[4:], emb.weight.mean(0).expand(2, 3))

    def test_options_and_placement_carry_over(self):
        emb = nn.Embedding(
            4, 3, padding_idx=1, max_norm=2.0, norm_type=1.0, scale_grad_by_freq=True, sparse=True
        )
        emb = emb.to(torch.bfloat16).eval()
        emb.weight.requires_grad_(False)
        state = torch.get_rng_state()
        larger, _ = expand_embedding(emb, new_num_embeddings=5, init="copy_mean")
        for name in (
            "padding_idx",
            "max_norm",
            "norm_type",
            "scale_grad_by_freq",
            "sparse",
            "training",
        ):
            assert getattr(larger, name) == getattr(emb, name), name
        assert larger.weight.dtype == torch.bfloat16
        assert not larger.weight.requires_grad
        assert torch.equal(torch.get_rng_state(), state)

    @pytest.mark.parametrize("size", [4, 3, True, 5.0])
    def test_the_size_must_grow(self, size):
        with pytest.raises(ValueError, match="an integer >= 5"):
            expand_embedding(nn.Embedding(4, 3), new_num_embeddings=size)

    def test_kind_and_strategy_are_checked(self):
        with pytest.raises(TypeError, match="not a Linear"):
            expand_embedding(nn.Linear(4, 3), new_num_embeddings=9)
        with pytest.raises(ValueError, match="'zeros' or 'copy_mean'"):
            expand_embedding(nn.Embedding(4, 3), new_num_embeddings=9, init="ones")


def test_a_quantized_layer_is_refused_with_words():
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is the quantize extra")
    net = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 16))
    torchao.quantize_(net, torchao.Int8WeightOnlyConfig())
    for change in (
        lambda: low_rank_factorize(net[0], rank=2),
        lambda: widen(net, layer_name="0", new_width=20),
    ):
        with pytest.raises(ValueError, match="is a Int8Tensor, not a plain tensor of floats"):
            change()


def test_an_unknown_name_is_answered_with_the_closest():
    net = nn.ModuleDict({"encoder": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    with pytest.raises(KeyError, match="'encodr' is not a submodule.*the closest are 'encoder'"):
        drop_layer(net, layer_name="encodr")
