"""widen and deepen keep the function, the flags and the modes, or refuse."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from nnx import Activations, FeedFwdNN, NNParams
from nnx.surgery import deepen, widen
from torch import nn


def sequential(activation=nn.ReLU, **kwargs):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 6, **kwargs), activation(), nn.Dropout(0.3), nn.Linear(6, 4), nn.Tanh(),
        nn.Linear(4, 3),
    )  # fmt: skip


def feed_forward(**options):
    torch.manual_seed(0)
    options = {"activation": Activations.RELU, "dropout_prob": 0.0, **options}
    return FeedFwdNN(NNParams(input_dim=5, output_dim=3, hidden_dims=[6, 4], **options))


def assert_same_function(model, other, atol=1e-5, dtype=torch.float32):
    x = torch.randn(7, 5, dtype=dtype)
    torch.testing.assert_close(other.eval()(x), model.eval()(x), atol=atol, rtol=0)


class TestWiden:
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("layer", ["0", "3"])
    def test_the_output_is_preserved(self, layer, bias):
        model = sequential(bias=bias)
        wide = widen(model, layer_name=layer, new_width=11)
        assert type(wide) is type(model)
        assert wide[int(layer)].out_features == wide[int(layer)].weight.shape[0] == 11
        assert_same_function(model, wide)

    def test_new_units_are_copies_and_their_weights_are_shared_out(self):
        model = sequential()
        wide = widen(model, layer_name="0", new_width=9)
        for unit in range(6, 9):
            twins = [i for i in range(9) if torch.equal(wide[0].weight[i], wide[0].weight[unit])]
            (origin,) = [i for i in twins if i < 6]
            for i in twins:
                torch.testing.assert_close(
                    wide[3].weight[:, i], model[3].weight[:, origin] / len(twins)
                )

    def test_the_original_is_untouched(self):
        model = sequential()
        before = {k: v.clone() for k, v in model.state_dict().items()}
        widen(model, layer_name="0", new_width=9)
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())

    def test_the_seed_decides_and_the_global_rng_is_not_used(self):
        model = sequential()
        state = torch.get_rng_state()
        first = widen(model, layer_name="0", new_width=20)
        again = widen(model, layer_name="0", new_width=20)
        other = widen(model, layer_name="0", new_width=20, rng_seed=1)
        fresh = [widen(model, layer_name="0", new_width=200, rng_seed=None) for _ in range(2)]
        assert torch.equal(first[0].weight, again[0].weight)
        assert not torch.equal(first[0].weight, other[0].weight)
        assert not torch.equal(fresh[0][0].weight, fresh[1][0].weight)
        assert torch.equal(torch.get_rng_state(), state)

    def test_a_feed_forward_net_keeps_its_params_aligned(self):
        model = feed_forward(activations=[Activations.TANH, Activations.RELU])
        wide = widen(model, layer_name="layers.0", new_width=10)
        assert wide.params.hidden_dims == [10, 4]
        assert model.params.hidden_dims == [6, 4]
        assert wide.params.activations == [Activations.TANH, Activations.RELU]
        assert_same_function(model, wide)
        rebuilt = FeedFwdNN(wide.params)
        rebuilt.load_state_dict(wide.state_dict())
        assert_same_function(model, rebuilt)

    def test_a_feed_forward_net_inside_a_larger_module(self):
        model = nn.ModuleDict({"encoder": feed_forward()})
        wide = widen(model, layer_name="encoder.layers.1", new_width=8)
        assert wide["encoder"].params.hidden_dims == [6, 8]
        assert_same_function(model["encoder"], wide["encoder"])

    def test_flags_modes_and_dtype_carry_over(self):
        model = sequential().double()
        model[0].weight.requires_grad_(False)
        model[3].bias.requires_grad_(False)
        model[0].eval()
        wide = widen(model, layer_name="0", new_width=9)
        assert [p.requires_grad for p in wide.parameters()] == [
            p.requires_grad for p in model.parameters()
        ]
        assert [m.training for m in wide.modules()] == [m.training for m in model.modules()]
        assert wide[0].weight.dtype == torch.float64
        assert_same_function(model, wide, atol=1e-12, dtype=torch.float64)

    def test_the_wider_net_trains(self):
        wide = widen(sequential(), layer_name="0", new_width=9)
        wide(torch.randn(2, 5)).sum().backward()
        assert all(p.grad is not None for p in wide.parameters())

    @pytest.mark.parametrize(
        "between",
        [
            nn.Softmax(-1),
            nn.LayerNorm(6),
            nn.BatchNorm1d(6),
            nn.PReLU(6),
            nn.Flatten(),
            nn.Sequential(),
        ],
    )
    def test_a_boundary_that_mixes_units_is_refused(self, between):
        model = nn.Sequential(nn.Linear(5, 6), between, nn.Linear(6, 2))
        with pytest.raises(ValueError, match=r"'1' .* is not element-wise"):
            widen(model, layer_name="0", new_width=8)

    def test_a_softmax_in_a_feed_forward_net_is_refused(self):
        model = feed_forward(activations=[Activations.SOFTMAX, Activations.RELU])
        with pytest.raises(ValueError, match=r"softmax after 'layers\.0' mixes units"):
            widen(model, layer_name="layers.0", new_width=8)
        widen(model, layer_name="layers.1", new_width=8)

    @pytest.mark.parametrize(
        ("model", "name", "error", "message"),
        [
            (sequential(), "9", KeyError, "'9' is not a submodule"),
            (sequential(), "", KeyError, "not a submodule"),
            (sequential(), "1", TypeError, "'1' is a ReLU, not a Linear"),
            (sequential(), "5", ValueError, "no Linear follows '5'"),
            (feed_forward(), "layers.2", ValueError, "is the output layer"),
            (
                nn.ModuleList([nn.Linear(5, 6), nn.Linear(6, 2)]),
                "0",
                ValueError,
                "held by a ModuleList",
            ),
        ],
    )
    def test_other_places_are_refused(self, model, name, error, message):
        with pytest.raises(error, match=message):
            widen(model, layer_name=name, new_width=50)

    @pytest.mark.parametrize("width", [6, 5, 0, True, 7.0])
    def test_the_width_must_grow(self, width):
        with pytest.raises(ValueError, match="new_width must be an integer >= 7"):
            widen(sequential(), layer_name="0", new_width=width)

    def test_shared_layers_and_tensors_are_refused(self):
        linear = nn.Linear(5, 5)
        with pytest.raises(ValueError, match="one module under '0' and '2'"):
            widen(nn.Sequential(linear, nn.ReLU(), linear), layer_name="0", new_width=8)
        tied = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5))
        tied[2].weight = tied[1].weight
        with pytest.raises(ValueError, match=r"'1' shares a tensor with '2\.weight'"):
            widen(tied, layer_name="0", new_width=8)

    def test_a_computed_weight_is_refused(self):
        model = sequential()
        nn.utils.parametrizations.weight_norm(model[0])
        with pytest.raises(ValueError, match="computed"):
            widen(model, layer_name="0", new_width=8)

    def test_a_subclass_with_its_own_forward_is_refused(self):
        class Skip(nn.Sequential):
            def forward(self, x):
                return x + super().forward(x)

        with pytest.raises(ValueError, match="held by a Skip"):
            widen(Skip(nn.Linear(5, 6), nn.Linear(6, 5)), layer_name="0", new_width=8)


class TestDeepen:
    def test_a_relu_in_a_sequential_gains_an_identity_and_a_relu(self):
        model = sequential()
        deep = deepen(model, after_layer_name="1")
        kinds = [type(m).__name__ for m in deep]
        assert kinds == ["Linear", "ReLU", "Linear", "ReLU", "Dropout", "Linear", "Tanh", "Linear"]
        assert torch.equal(deep[2].weight, torch.eye(6))
        assert torch.equal(deep[2].bias, torch.zeros(6))
        assert list(dict(deep.named_children())) == [str(i) for i in range(8)]
        assert_same_function(model, deep, atol=0)
        assert len(model) == 6

    def test_named_children_keep_their_names(self):
        model = nn.Sequential(OrderedDict(inp=nn.Linear(5, 6), act=nn.ReLU(), out=nn.Linear(6, 2)))
        deep = deepen(model, after_layer_name="act")
        assert list(dict(deep.named_children())) == [
            "inp",
            "act",
            "act_deeper",
            "act_deeper_relu",
            "out",
        ]
        assert_same_function(model, deep, atol=0)

    def test_a_hidden_linear_of_a_feed_forward_net(self):
        model = feed_forward()
        deep = deepen(model, after_layer_name="layers.0")
        assert deep.params.hidden_dims == [6, 6, 4]
        assert deep.params.activations is None
        assert deep.params.dropout_probs is None
        assert_same_function(model, deep, atol=0)
        rebuilt = FeedFwdNN(deep.params)
        rebuilt.load_state_dict(deep.state_dict())
        assert_same_function(model, rebuilt, atol=0)

    def test_overrides_follow_and_the_new_layer_has_no_dropout(self):
        model = feed_forward(
            activation=Activations.TANH,
            activations=[Activations.TANH, Activations.RELU],
            dropout_probs=[0.1, 0.2],
        )
        deep = deepen(model, after_layer_name="layers.1")
        assert deep.params.hidden_dims == [6, 4, 4]
        assert deep.params.activations == [Activations.TANH, Activations.RELU, Activations.RELU]
        assert deep.params.dropout_probs == [0.1, 0.2, 0.0]
        assert_same_function(model, deep, atol=0)

    def test_the_effective_activation_at_the_site_decides(self):
        model = feed_forward(activations=[Activations.TANH, Activations.RELU])
        with pytest.raises(ValueError, match=r"activation after 'layers\.0' is tanh"):
            deepen(model, after_layer_name="layers.0")
        with pytest.raises(ValueError, match="sigmoid"):
            deepen(feed_forward(activation=Activations.SIGMOID), after_layer_name="layers.0")

    @pytest.mark.parametrize(
        ("model", "name", "error", "message"),
        [
            (sequential(), "missing", KeyError, "not a submodule"),
            (sequential(), "0", TypeError, "'0' is a Linear held by a Sequential"),
            (sequential(nn.GELU), "1", TypeError, "'1' is a GELU"),
            (feed_forward(), "layers.2", ValueError, "output layer"),
            (
                nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()),
                "1",
                ValueError,
                "width at '1' cannot be told",
            ),
            (nn.Sequential(nn.ReLU(), nn.Linear(5, 5)), "0", ValueError, "cannot be told"),
        ],
    )
    def test_other_places_are_refused(self, model, name, error, message):
        with pytest.raises(error, match=message):
            deepen(model, after_layer_name=name)

    def test_no_draw_from_the_global_rng(self):
        state = torch.get_rng_state()
        deepen(sequential(), after_layer_name="1")
        deepen(feed_forward(), after_layer_name="layers.0")
        torch.manual_seed(0)
        state = torch.get_rng_state()
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        state = torch.get_rng_state()
        deepen(model, after_layer_name="1")
        assert torch.equal(torch.get_rng_state(), state)

    def test_dtype_mode_and_bias_follow_the_neighbour(self):
        model = (
            nn.Sequential(nn.Linear(5, 6, bias=False), nn.ReLU(), nn.Linear(6, 2))
            .to(torch.bfloat16)
            .eval()
        )
        deep = deepen(model, after_layer_name="1")
        assert deep[2].bias is None
        assert deep[2].weight.dtype == torch.bfloat16
        assert not any(m.training for m in deep.modules())
        assert deep[2].weight.requires_grad
