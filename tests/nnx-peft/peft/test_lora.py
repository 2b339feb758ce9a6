"""LoRA: what is wrapped, what trains, what is saved, and what is refused."""

from __future__ import annotations

import copy
import math
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from nnx.peft import (
    DoRALinear,
    LoRALinear,
    apply_dora_to,
    apply_ia3_to,
    apply_lora_to,
    load_lora_weights,
    save_lora_weights,
)
from torch import nn

APPLY = [apply_lora_to, apply_dora_to, apply_ia3_to]


def net(seed=0, **kwargs):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 8, **kwargs), nn.ReLU(), nn.Linear(8, 8, **kwargs), nn.Linear(8, 3, **kwargs)
    )


def snapshot(module):
    """Identities, values and flags: what a refusal must leave as it was."""
    return (
        [(n, id(m)) for n, m in module.named_modules(remove_duplicate=False)],
        [(n, id(p), p.requires_grad, p.detach().clone()) for n, p in module.named_parameters()],
    )


def assert_unchanged(module, before):
    now = snapshot(module)
    assert now[0] == before[0]
    assert [row[:3] for row in now[1]] == [row[:3] for row in before[1]]
    assert all(torch.equal(a[3], b[3]) for a, b in zip(now[1], before[1]))


def train(module, steps=3, lr=0.1, features=6):
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=lr)
    dtype = next(module.parameters()).dtype
    for _ in range(steps):
        x = torch.randn(4, features, dtype=dtype)
        module(x).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class TestTheLayer:
    def test_the_output_is_the_base_plus_the_scaled_product(self):
        torch.manual_seed(0)
        base = nn.Linear(5, 7)
        layer = LoRALinear(base, r=2, alpha=6.0)
        with torch.no_grad():
            layer.lora_B.normal_()
        x = torch.randn(3, 4, 5)
        expected = F.linear(x, base.weight, base.bias) + 3.0 * (x @ layer.lora_A.T @ layer.lora_B.T)
        torch.testing.assert_close(layer(x), expected)

    def test_shapes_and_initial_values(self):
        layer = LoRALinear(nn.Linear(5, 7), r=2)
        assert layer.lora_A.shape == (2, 5)
        assert layer.lora_B.shape == (7, 2)
        assert torch.equal(layer.lora_B, torch.zeros(7, 2))
        assert 0 < layer.lora_A.abs().max() <= 1 / math.sqrt(5)
        assert (layer.in_features, layer.out_features) == (5, 7)
        assert layer.scaling == 16.0 / 2

    def test_a_is_kaiming_uniform(self):
        torch.manual_seed(3)
        layer = LoRALinear(nn.Linear(5, 7), r=2)
        torch.manual_seed(3)
        nn.Linear(5, 7)
        assert torch.equal(layer.lora_A, nn.init.kaiming_uniform_(torch.empty(2, 5), a=5**0.5))

    def test_rank_stabilised_scaling_divides_by_the_root_of_the_rank(self):
        layer = LoRALinear(nn.Linear(5, 7), r=16, alpha=8.0, rslora=True)
        assert layer.scaling == 8.0 / 4

    def test_only_the_two_matrices_train(self):
        layer = LoRALinear(nn.Linear(5, 7))
        trainable = [n for n, p in layer.named_parameters() if p.requires_grad]
        assert trainable == ["lora_A", "lora_B"]

    @pytest.mark.parametrize("shape", [(6,), (1, 6), (0, 6), (2, 0, 6), (2, 3, 4, 6)])
    def test_any_leading_shape_is_accepted(self, shape):
        base = nn.Linear(6, 4)
        layer = LoRALinear(base, r=2)
        with torch.no_grad():
            layer.lora_B.normal_()
        x = torch.randn(shape)
        expected = base(x) + layer.scaling * F.linear(F.linear(x, layer.lora_A), layer.lora_B)
        assert layer(x).shape == (*shape[:-1], 4)
        torch.testing.assert_close(layer(x), expected)

    def test_a_non_contiguous_input_is_accepted(self):
        layer = LoRALinear(nn.Linear(6, 4), r=2)
        x = torch.randn(6, 3).t()
        assert torch.equal(layer(x), layer.base(x))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"r": 0}, "r must be an integer >= 1, not 0"),
            ({"r": True}, "r must be an integer"),
            ({"r": 2.0}, "r must be an integer"),
            ({"alpha": math.nan}, "alpha must be a finite real number > 0"),
            ({"alpha": math.inf}, "alpha must be a finite real number > 0"),
            ({"alpha": 0.0}, "alpha must be a finite real number > 0, not 0.0"),
            ({"alpha": -1}, "alpha must be a finite real number > 0"),
            ({"dropout": 1.0}, "dropout must be a finite real number >= 0 and < 1, not 1.0"),
            ({"dropout": -0.1}, "dropout must be a finite real number"),
        ],
    )
    @pytest.mark.parametrize("kind", [LoRALinear, DoRALinear])
    def test_a_hyperparameter_outside_its_domain_is_refused(self, kind, options, message):
        base = nn.Linear(3, 3)
        with pytest.raises(ValueError, match=message):
            kind(base, **options)
        assert base.weight.requires_grad

    def test_repr_names_the_hyperparameters(self):
        layer = LoRALinear(nn.Linear(3, 3), r=4, alpha=8.0, dropout=0.1)
        assert "r=4, alpha=8.0, dropout=0.1" in repr(layer)


class TestExactness:
    @pytest.mark.parametrize("apply", APPLY)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("shape", [(6,), (5, 6), (2, 3, 6)])
    def test_the_output_at_insertion_is_the_bases_bit_for_bit(self, apply, dtype, bias, shape):
        model = net(bias=bias).to(dtype)
        x = torch.randn(shape, dtype=dtype)
        before = model(x)
        assert apply(model, "*") == 3
        assert torch.equal(model(x), before)
        assert model(x).dtype == dtype

    @pytest.mark.parametrize("apply", APPLY)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
    def test_training_leaves_the_base_bit_identical_and_moves_the_output(self, apply, dtype):
        model = net().to(dtype)
        original = {k: v.clone() for k, v in model.state_dict().items()}
        x = torch.randn(5, 6, dtype=dtype)
        before = model(x).detach()
        apply(model, "*")
        train(model)
        after = {k.replace(".base.", "."): v for k, v in model.state_dict().items()}
        for name, value in original.items():
            assert torch.equal(after[name].view(torch.uint8), value.view(torch.uint8)), name
        assert not torch.equal(model(x), before)

    def test_training_follows_a_hand_written_low_rank_loop(self):
        torch.manual_seed(0)
        base = nn.Linear(6, 3)
        layer = LoRALinear(base, r=2, alpha=4.0)
        a = layer.lora_A.detach().clone().requires_grad_()
        b = layer.lora_B.detach().clone().requires_grad_()
        train(layer)
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW([a, b], lr=0.1)
        for _ in range(3):
            x = torch.randn(4, 6)
            y = x @ (base.weight + 2.0 * b @ a).T + base.bias
            y.pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(layer.lora_A, a)
        torch.testing.assert_close(layer.lora_B, b)

    @pytest.mark.parametrize("apply", APPLY)
    def test_deepcopy_and_pickle_compute_the_same_and_are_independent(self, apply):
        model = net()
        apply(model, "*")
        train(model)
        x = torch.randn(5, 6)
        expected = model(x)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(twin(x), expected)
            train(twin, steps=1)
            assert not torch.equal(twin(x), expected)
        assert torch.equal(model(x), expected)

    @pytest.mark.parametrize("apply", APPLY)
    def test_a_compiled_model_computes_and_trains_alike(self, apply):
        eager, compiled = net(), net()
        torch.manual_seed(5)
        apply(eager, "*")
        torch.manual_seed(5)
        apply(compiled, "*")
        run = torch.compile(compiled, backend="aot_eager", fullgraph=True)
        x = torch.randn(5, 6)
        assert torch.equal(run(x), eager(x))
        for module in (eager, run):
            train(module)
        torch.testing.assert_close(run(x), eager(x))

    def test_autocast_starts_at_the_base_too(self):
        model = net()
        x = torch.randn(5, 6)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            before = model(x)
            apply_lora_to(model, "*")
            assert torch.equal(model(x), before)

    def test_a_tied_tensor_stays_tied_and_is_frozen_for_both(self):
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.embedding = nn.Embedding(10, 4)
                self.head = nn.Linear(4, 10, bias=False)
                self.head.weight = self.embedding.weight

            def forward(self, ids):
                return self.head(self.embedding(ids))

        model = Tied()
        ids = torch.tensor([1, 2, 3])
        before = model(ids)
        assert apply_lora_to(model, "head") == 1
        assert model.head.base.weight is model.embedding.weight
        assert not model.embedding.weight.requires_grad
        assert torch.equal(model(ids), before)


class TestPlacement:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_new_parameters_take_the_dtype_of_the_weight(self, dtype):
        for apply in APPLY:
            model = net().to(dtype)
            identities = [id(p) for p in model.parameters()]
            apply(model, "*")
            assert {p.dtype for p in model.parameters()} == {dtype}
            assert set(identities) <= {id(p) for p in model.parameters()}

    def test_a_meta_skeleton_is_adapted_on_meta(self):
        for apply in APPLY:
            with torch.device("meta"):
                model = net()
            assert apply(model, "*") == 3
            assert {p.device.type for p in model.parameters()} == {"meta"}

    def test_loading_into_a_converted_destination_keeps_its_placement(self):
        source, destination = net(), net().to(torch.bfloat16)
        for model in (source, destination):
            apply_lora_to(model, "0")
        train(source)
        state = {k: v for k, v in source.state_dict().items() if "lora" in k}
        assert load_lora_weights(destination, state) == 2
        assert destination[0].lora_B.dtype == torch.bfloat16
        assert torch.equal(destination[0].lora_B, source[0].lora_B.to(torch.bfloat16))


class TestModes:
    @pytest.mark.parametrize("apply", APPLY)
    def test_each_wrapper_takes_the_mode_of_the_layer_it_replaces(self, apply):
        model = net()
        model[0].eval()
        apply(model, "*")
        assert [model[i].training for i in (0, 2, 3)] == [False, True, True]
        assert [m.training for m in model] == [False, True, True, True]
        assert model.training

    @pytest.mark.parametrize("apply", [apply_lora_to, apply_dora_to])
    def test_dropout_into_an_eval_model_stays_deterministic_until_train(self, apply):
        model = net().eval()
        apply(model, "*", dropout=0.5)
        with torch.no_grad():
            for layer in (model[0], model[2], model[3]):
                layer.lora_B.normal_()
        x = torch.randn(5, 6)
        assert torch.equal(model(x), model(x))
        model.train()
        assert not torch.equal(model(x), model(x))

    def test_loading_leaves_the_modes_alone_and_files_hold_none(self, tmp_path):
        model = net()
        apply_lora_to(model, "*", dropout=0.5)
        save_lora_weights(model, tmp_path / "a.pt")
        model[0].eval()
        load_lora_weights(model, tmp_path / "a.pt")
        model.load_state_dict(model.state_dict())
        assert not model[0].training
        assert model[2].training
        assert not [k for k in model.state_dict() if "training" in k or "dropout" in k]


class TestSelection:
    @pytest.mark.parametrize("apply", APPLY)
    def test_patterns_are_globs_over_dotted_names(self, apply):
        model = nn.ModuleDict({"encoder": net(), "head": nn.Linear(3, 2)})
        with pytest.warns(
            UserWarning, match=r"apply_\w+_to: 'nothing\*' matches no Linear"
        ) as caught:
            assert apply(model, "encoder.[02]", "nothing*") == 2
        assert caught[0].filename == __file__
        assert type(model["encoder"][3]) is nn.Linear
        assert type(model["head"]) is nn.Linear

    @pytest.mark.parametrize("apply", APPLY)
    def test_a_star_crosses_dots_and_no_match_is_zero(self, apply):
        model = nn.ModuleDict({"encoder": net(), "head": nn.Linear(3, 2)})
        with pytest.warns(UserWarning, match="the closest names are 'encoder.0', 'encoder.2'"):
            assert apply(model, "encodr.*") == 0
        assert apply(model, "enc*") == 3

    @pytest.mark.parametrize("apply", APPLY)
    def test_a_second_call_wraps_nothing(self, apply):
        model = net()
        assert apply(model, "0", "2", "3") == 3
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a wrapped layer matches by its old name
            assert apply(model, "0", "[23]") == 0
        wrappers = [model[i] for i in (0, 2, 3)]
        assert [other(model, "*") for other in APPLY] == [0, 0, 0]
        assert [model[i] for i in (0, 2, 3)] == wrappers

    @pytest.mark.parametrize("apply", APPLY)
    def test_no_pattern_is_refused(self, apply):
        with pytest.raises(ValueError, match="no name pattern"):
            apply(net())

    def test_names_gain_a_base_segment(self):
        model = net()
        apply_lora_to(model, "0")
        assert list(model.state_dict())[:4] == [
            "0.lora_A",
            "0.lora_B",
            "0.base.weight",
            "0.base.bias",
        ]


class TestSharedModules:
    @pytest.mark.parametrize("apply", APPLY)
    @pytest.mark.parametrize("pattern", ["first.0", "second.0"])
    def test_a_layer_in_a_shared_container_has_one_slot(self, apply, pattern):
        block = nn.Sequential(nn.Linear(4, 4))
        model = nn.ModuleDict({"first": block, "second": block})
        assert apply(model, pattern) == 1
        assert model["first"][0] is model["second"][0]
        assert hasattr(model["first"][0], "base")

    @pytest.mark.parametrize("apply", APPLY)
    @pytest.mark.parametrize("pattern", ["a", "b", "*"])
    def test_a_layer_under_two_names_is_refused_by_either_name(self, apply, pattern):
        model = nn.Module()
        model.a = model.b = nn.Linear(4, 4)
        model.c = nn.Linear(4, 4)
        before = snapshot(model)
        with pytest.raises(ValueError, match="registered as 'a', 'b'"):
            apply(model, pattern)
        assert_unchanged(model, before)

    @pytest.mark.parametrize("apply", APPLY)
    def test_an_unselected_alias_blocks_nobody(self, apply):
        model = nn.Module()
        model.a = model.b = nn.Linear(4, 4)
        model.c = nn.Linear(4, 4)
        assert apply(model, "c") == 1

    @pytest.mark.parametrize("apply", APPLY)
    def test_the_base_of_a_wrapper_registered_elsewhere_is_refused(self, apply):
        model = nn.Module()
        model.wrapped = LoRALinear(nn.Linear(4, 4))
        model.alias = model.wrapped.base
        before = snapshot(model)
        with pytest.raises(ValueError, match=r"'wrapped\.base'") as error:
            apply(model, "alias")
        assert "'alias'" in str(error.value)
        assert_unchanged(model, before)

    @pytest.mark.parametrize("apply", APPLY)
    def test_a_rejected_call_wraps_none_of_its_valid_targets(self, apply):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model.append(model[1])
        before = snapshot(model)
        with pytest.raises(ValueError, match="'1', '2'"):
            apply(model, "*")
        assert_unchanged(model, before)

    @pytest.mark.parametrize("apply", APPLY)
    @pytest.mark.parametrize(
        ("model", "name"),
        [
            (nn.MultiheadAttention(8, 2), "out_proj"),
            (nn.TransformerEncoderLayer(8, 2, 16), "linear1"),
            (nn.TransformerEncoderLayer(8, 2, 16), "linear2"),
            (nn.TransformerDecoderLayer(8, 2, 16), "linear1"),
        ],
    )
    def test_a_layer_that_its_parent_reads_is_refused(self, apply, model, name):
        model = nn.ModuleDict({"block": model, "head": nn.Linear(8, 2)})
        before = snapshot(model)
        with pytest.raises(ValueError, match=f"'block.{name}' is read directly.*other projections"):
            apply(model, f"block.{name}", "head")
        assert_unchanged(model, before)
        assert apply(model, "head") == 1

    def test_a_layer_without_a_shape_is_refused(self):
        model = nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(4))
        before = [p.requires_grad for p in model.parameters()]
        with pytest.raises(ValueError, match="'1': LazyLinear has no shape yet"):
            apply_lora_to(model, "*")
        assert [p.requires_grad for p in model.parameters()] == before

    def test_a_failure_while_building_restores_every_flag(self, monkeypatch):
        model = net()
        before = snapshot(model)
        calls = []

        def failing(tensor, **_):
            calls.append(tensor)
            if len(calls) == 2:
                raise RuntimeError("out of memory")
            return tensor

        monkeypatch.setattr(nn.init, "kaiming_uniform_", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            apply_lora_to(model, "*")
        assert_unchanged(model, before)


class TestFiles:
    def test_a_round_trip_moves_only_the_adapters(self, tmp_path):
        source, destination = net(0), net(1)
        for model in (source, destination):
            apply_lora_to(model, "*")
        train(source)
        base = destination[0].base.weight.clone()
        path = save_lora_weights(source, str(tmp_path / "lora.pt"))
        assert path == str(tmp_path / "lora.pt")
        assert sorted(torch.load(path, weights_only=True)) == sorted(
            f"{i}.lora_{m}" for i in (0, 2, 3) for m in "AB"
        )
        assert load_lora_weights(destination, path) == 6
        assert torch.equal(destination[2].lora_B, source[2].lora_B)
        assert torch.equal(destination[0].base.weight, base)

    def test_ownership_decides_not_the_name(self, tmp_path):
        model = nn.ModuleDict({"lora_A_projection": nn.Linear(4, 4), "plain": nn.Linear(4, 4)})
        model.lora_B = nn.Parameter(torch.zeros(3))
        apply_lora_to(model, "lora_A_projection", freeze_base=True)
        path = save_lora_weights(model, tmp_path / "a.pt")
        assert sorted(torch.load(path, weights_only=True)) == [
            "lora_A_projection.lora_A",
            "lora_A_projection.lora_B",
        ]

    def test_a_full_checkpoint_cannot_overwrite_the_base(self):
        model, other = net(0), net(1)
        for m in (model, other):
            apply_lora_to(m, "*")
        train(other)
        base = model[0].base.weight.clone()
        assert load_lora_weights(model, other.state_dict()) == 6
        assert torch.equal(model[0].base.weight, base)
        assert torch.equal(model[0].lora_B, other[0].lora_B)

    def test_a_wrong_shape_raises_torchs_error_and_changes_nothing(self):
        model = net()
        apply_lora_to(model, "*", r=2)
        other = net()
        apply_lora_to(other, "*", r=2)
        train(other)
        state = other.state_dict()
        state["3.lora_A"] = torch.zeros(5, 8)
        before = snapshot(model)
        with pytest.raises(RuntimeError, match=r"size mismatch for 3\.lora_A"):
            load_lora_weights(model, state)
        assert_unchanged(model, before)

    def test_unknown_keys_are_not_counted_and_no_wrapper_takes_none(self):
        model = net()
        state = {"0.lora_A": torch.zeros(8, 6), "elsewhere": torch.zeros(1)}
        with pytest.warns(UserWarning, match="'0.lora_A', 'elsewhere' of the source were not"):
            assert load_lora_weights(model, state) == 0
        apply_lora_to(model, "0")
        with pytest.warns(UserWarning, match="the source") as caught:
            assert load_lora_weights(model, state) == 1
        assert [str(w.message).split(",")[0].split(" of the")[0] for w in caught] == [
            "the source does not hold '0.lora_B'",
            "'elsewhere'",
        ]
        assert {w.filename for w in caught} == {__file__}

    def test_a_module_without_adapters_saves_an_empty_file(self, tmp_path):
        with pytest.warns(UserWarning, match="no LoRA layer; the file is empty"):
            path = save_lora_weights(net(), tmp_path / "none.pt")
        assert torch.load(path, weights_only=True) == {}

    def test_doras_matrices_are_saved_and_its_magnitude_needs_the_full_state(self, tmp_path):
        model = net()
        apply_dora_to(model, "0", freeze_base=True)
        with pytest.warns(UserWarning, match="'0.magnitude' changed in training, or may") as caught:
            path = save_lora_weights(model, tmp_path / "dora.pt")
        assert caught[0].filename == __file__
        assert sorted(torch.load(path, weights_only=True)) == ["0.lora_A", "0.lora_B"]
        assert "0.magnitude" in model.state_dict()

    def test_a_source_of_another_kind_is_refused(self):
        with pytest.raises(TypeError, match="a path or a state dict, not int"):
            load_lora_weights(net(), 3)

    def test_shared_containers_save_and_load_every_path(self, tmp_path):
        block = nn.Sequential(nn.Linear(4, 4))
        model = nn.ModuleDict({"first": block, "second": block})
        apply_lora_to(model, "*")
        path = save_lora_weights(model, tmp_path / "a.pt")
        assert len(torch.load(path, weights_only=True)) == 4
        assert load_lora_weights(model, path) == 4
