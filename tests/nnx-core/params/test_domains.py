"""The domain of every number, refused at construction by class, field, value and domain."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from nnx import (
    Activations,
    Devices,
    Losses,
    Nets,
    NNConvParams,
    NNModelParams,
    NNMoEParams,
    NNOptimFactoryParams,
    NNOptimParams,
    NNParamGroupSpec,
    NNParams,
    NNSchedulerParams,
    NNTrainerParams,
    NNTrainParams,
    NNTransformerParams,
    NNViTParams,
    OptimizerFactorySpec,
    Optims,
    Schedulers,
)

NET = {"input_dim": 8, "output_dim": 3, "dropout_prob": 0.1, "hidden_dims": [4]}
ADAM = {"name": Optims.ADAM, "max_lr": 0.1, "weight_decay": 0.0, "momentum": (0.9, 0.99)}
SGD = {**ADAM, "name": Optims.SGD, "momentum": 0.9}
PLATEAU = {"min_lr": 0.0, "factor": 0.5, "patience": 1, "cooldown": 1, "threshold": 0.0}
STEP = {**PLATEAU, "kind": Schedulers.STEP}
LM = {
    **NET, "hidden_dims": None, "n_heads": 2, "vocab_size": 8, "n_layers": 1, "d_model": 8,
    "max_seq_len": 4,
}  # fmt: skip
VIT = {
    **NET, "hidden_dims": None, "n_heads": 2, "image_size": 8, "patch_size": 4, "d_model": 8,
    "n_layers": 1,
}  # fmt: skip
CONV = {**NET, "input_dim": 256, "in_channels": 1, "conv_channels": [4], "kernel_size": 3}
FACTORY = {"factory": OptimizerFactorySpec("acme.x", 1), "max_lr": 0.1}
GROUP = {"name_pattern": "*"}

# (class, its valid values, field) by the domain that the field shares.
REALS = {
    ">= 0": [
        (NNOptimParams, ADAM, "max_lr"),
        (NNOptimParams, ADAM, "weight_decay"),
        (NNOptimParams, SGD, "momentum"),
        (NNOptimFactoryParams, FACTORY, "max_lr"),
        (NNOptimFactoryParams, FACTORY, "weight_decay"),
        (NNParamGroupSpec, GROUP, "weight_decay"),
        (NNSchedulerParams, PLATEAU, "min_lr"),
        (NNSchedulerParams, PLATEAU, "threshold"),
    ],
    "> 0": [
        (NNOptimParams, ADAM, "eps"),
        (NNOptimParams, ADAM, "grad_clip_norm"),
        (NNOptimFactoryParams, FACTORY, "grad_clip_norm"),
        (NNParamGroupSpec, GROUP, "lr"),
        (NNParamGroupSpec, GROUP, "lr_multiplier"),
        (NNSchedulerParams, STEP, "factor"),
        (NNSchedulerParams, STEP, "max_lr"),
        (NNTransformerParams, LM, "rope_base"),
    ],
    "> 0 and < 1": [(NNSchedulerParams, PLATEAU, "factor")],
    ">= 0 and <= 1": [
        (NNParams, NET, "dropout_prob"),
        (NNTransformerParams, LM, "attn_dropout"),
        (NNTransformerParams, LM, "resid_dropout"),
        (NNViTParams, VIT, "attn_dropout"),
        (NNViTParams, VIT, "resid_dropout"),
    ],
}
COUNTS = {
    1: [
        (NNParams, NET, "input_dim"),
        (NNParams, NET, "output_dim"),
        (NNParams, NET, "n_heads"),
        *[(NNTransformerParams, LM, f) for f in ("vocab_size", "n_layers", "max_seq_len")],
        *[(NNTransformerParams, LM, f) for f in ("d_model", "n_heads", "ffn_mult")],
        *[(NNConvParams, CONV, f) for f in ("in_channels", "kernel_size", "stride", "pool_size")],
        *[(NNViTParams, VIT, f) for f in ("image_size", "patch_size", "in_channels", "d_model")],
        *[(NNViTParams, VIT, f) for f in ("n_layers", "ffn_mult", "n_heads")],
        (NNMoEParams, {**NET, "num_experts": 4}, "top_k"),
        (NNOptimParams, ADAM, "accumulate_grad_batches"),
        (NNOptimFactoryParams, FACTORY, "accumulate_grad_batches"),
        (NNTrainParams, {"n_epochs": 1}, "n_epochs"),
        (NNTrainParams, {"n_epochs": 1}, "checkpoint_every"),
        (NNTrainerParams, {"n_epochs": 1, "optims": {"a": NNOptimParams(**ADAM)}}, "n_epochs"),
        *[(NNSchedulerParams, STEP, f) for f in ("step_size", "T_max", "total_steps")],
        (NNSchedulerParams, STEP, "warmup_steps"),
    ],
    0: [
        (NNConvParams, CONV, "padding"),
        (NNSchedulerParams, PLATEAU, "patience"),
        (NNSchedulerParams, PLATEAU, "cooldown"),
        (NNTrainParams, {"n_epochs": 1}, "seed"),
    ],
    2: [(NNMoEParams, {**NET, "num_experts": 4}, "num_experts")],
}
NEVER_REAL = [
    True, False, np.bool_(True), "0.1", "nan", float("nan"), float("inf"), -float("inf"), [0.1],
    1j, Decimal("0.1"), np.float64("nan"), np.float32("inf"), 10**400, object(), b"1",
]  # fmt: skip
NEVER_COUNT = [
    True, np.bool_(True), 2.0, 2.5, "2", float("nan"), float("inf"), Fraction(2), np.float64(2.0),
    Decimal(2), [2], 1j,
]  # fmt: skip


def reals():
    for domain, rows in REALS.items():
        for cls, values, field in rows:
            yield pytest.param(cls, values, field, domain, id=f"{cls.__name__}.{field}-{domain}")


def counts():
    for least, rows in COUNTS.items():
        for cls, values, field in rows:
            yield pytest.param(cls, values, field, least, id=f"{cls.__name__}.{field}")


@pytest.mark.parametrize(("cls", "values", "field", "domain"), list(reals()))
def test_a_real_field_takes_finite_numbers_of_its_domain_only(cls, values, field, domain):
    message = re.escape(f"{cls.__name__}.{field} must be a finite real number {domain}, not ")
    outside = {">= 0": [-1e-9], "> 0": [0, -1], "> 0 and < 1": [0, 1], ">= 0 and <= 1": [-0.1, 1.1]}
    for value in (*NEVER_REAL, *outside[domain]):
        with pytest.raises(ValueError, match=message):
            cls(**{**values, field: value})
    for value in (0.5, np.float32(0.5), np.float64(0.5), Fraction(1, 2)):
        stored = getattr(cls(**{**values, field: value}), field)
        assert (stored, type(stored)) == (0.5, float)


@pytest.mark.parametrize(("cls", "values", "field", "least"), list(counts()))
def test_a_count_takes_integers_of_its_domain_only(cls, values, field, least):
    message = re.escape(f"{cls.__name__}.{field} must be an integer >= {least}")
    for value in (*NEVER_COUNT, least - 1, -5):
        with pytest.raises(ValueError, match=message):
            cls(**{**values, field: value})
    number = values.get(field) or 2
    for kind in (int, np.int64, np.uint16, np.int32):
        stored = getattr(cls(**{**values, field: kind(number)}), field)
        assert (stored, type(stored)) == (number, int)


def test_zero_keeps_the_meaning_that_each_field_gives_it():
    assert NNOptimParams(**{**ADAM, "max_lr": 0, "weight_decay": 0}).max_lr == 0
    assert NNSchedulerParams(**{**PLATEAU, "patience": 0, "cooldown": 0}).patience == 0
    assert NNConvParams(**CONV, padding=0).padding == 0


@pytest.mark.parametrize(
    ("betas", "message"),
    [
        ((0.9, 1.0), r"momentum\[1\] must be a finite real number >= 0 and < 1, not 1.0"),
        ((-0.1, 0.9), r"momentum\[0\] must be"),
        ((True, 0.9), r"momentum\[0\] must be"),
        (("0.9", 0.9), r"momentum\[0\] must be"),
        ((0.9, float("nan")), r"momentum\[1\] must be"),
        ((0.9,), "momentum must be a pair of betas for adam"),
        ((0.9, 0.9, 0.9), "momentum must be a pair of betas for adam"),
        (0.9, "momentum must be a pair of betas for adam"),
        (None, "momentum must be a pair of betas for adam"),
        ("(0.9, 0.99)", "momentum must be a pair of betas for adam"),
    ],
)
def test_adam_takes_two_betas_below_one(betas, message):
    with pytest.raises(ValueError, match=f"NNOptimParams.{message}"):
        NNOptimParams(**{**ADAM, "momentum": betas})
    with pytest.raises(ValueError, match=f"NNOptimParams.{message}"):
        NNOptimParams.builder().adam(max_lr=0.1, betas=betas).build()


def test_sgd_takes_one_coefficient():
    with pytest.raises(ValueError, match=r"NNOptimParams\.momentum must be a finite real number"):
        NNOptimParams(**{**SGD, "momentum": (0.9, 0.99)})


def test_numpy_betas_become_plain_ones():
    params = NNOptimParams(**{**ADAM, "momentum": [np.float64(0.9), np.float64(0.99)]})
    assert params.state()["momentum"] == "(0.9, 0.99)"
    assert params == NNOptimParams(**ADAM)


def test_numpy_numbers_spell_the_same_state_as_plain_ones():
    plain = NNParams(**NET)
    numpy = NNParams(
        input_dim=np.int64(8), output_dim=np.int32(3), dropout_prob=np.float64(0.1),
        hidden_dims=np.array([4]),
    )  # fmt: skip
    assert plain == numpy
    assert str(plain.state()) == str(numpy.state())
    assert hash(plain) == hash(numpy)


def test_an_int_and_a_float_keep_their_own_spelling():
    assert str(NNOptimParams(**{**ADAM, "max_lr": 1}).state()["max_lr"]) == "1"
    assert str(NNOptimParams(**{**ADAM, "max_lr": 1.0}).state()["max_lr"]) == "1.0"


@pytest.mark.parametrize(
    ("hidden", "message"),
    [
        ([4, 0], r"hidden_dims\[1\] must be an integer >= 1, not 0"),
        ([4.0], r"hidden_dims\[0\] must be an integer >= 1, not 4.0"),
        ([True], r"hidden_dims\[0\] must be"),
        ("44", "hidden_dims must be a list or None, not '44'"),
        (4, "hidden_dims must be a list or None, not 4"),
        ({4: 4}, "hidden_dims must be a list or None"),
        ({4, 5}, "hidden_dims must be a list or None"),
    ],
)
def test_hidden_dims_are_counts(hidden, message):
    with pytest.raises(ValueError, match=f"NNParams.{message}"):
        NNParams(**{**NET, "hidden_dims": hidden})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"activation": "relux"}, "activation must be one of .*, not 'relux'; did you mean 'relu'"),
        ({"activations": [1]}, r"activations\[0\] must be one of Activations, or its name"),
        (
            {"dropout_probs": [1.5]},
            r"dropout_probs\[0\] must be a finite real number >= 0 and <= 1",
        ),
        (
            {"activations": [Activations.RELU] * 2},
            "activations must be one entry for each of 1 hidden layers",
        ),
        ({"dropout_probs": []}, "dropout_probs must be one entry for each of 1 hidden layers"),
    ],
)
def test_per_layer_lists_fit_the_layers(values, message):
    with pytest.raises(ValueError, match=f"NNParams.{message}"):
        NNParams(**NET, **values)


def test_per_layer_values_fall_back_to_the_net_wide_ones():
    plain = NNParams(**{**NET, "hidden_dims": [4, 5]})
    assert plain.dims == [8, 4, 5, 3]
    assert [plain.dropout_for(i) for i in range(2)] == [0.1, 0.1]
    own = NNParams(
        **{**NET, "hidden_dims": [4, 5]},
        activations=[Activations.RELU, Activations.TANH],
        dropout_probs=[0.0, 0.5],
    )
    assert own.activation_for(1) is Activations.TANH
    assert own.dropout_for(1) == 0.5


def test_a_top_k_is_at_most_the_experts():
    assert NNMoEParams(**NET, num_experts=2, top_k=2).top_k == 2
    with pytest.raises(ValueError, match=r"NNMoEParams\.top_k must be an integer >= 1 and <= 2"):
        NNMoEParams(**NET, num_experts=2, top_k=3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"d_model": 9}, r"d_model must be a multiple of n_heads \(2\), not 9"),
        ({"d_model": 6}, r"d_model must be an even multiple of n_heads \(2\)"),
        ({"n_heads": None}, "n_heads must be an integer >= 1, not None"),
        ({"tie_embeddings": 1}, "tie_embeddings must be True or False, not 1"),
    ],
)
def test_a_transformer_splits_into_heads_of_even_width(values, message):
    with pytest.raises(ValueError, match=f"NNTransformerParams.{message}"):
        NNTransformerParams(**{**LM, **values})


def test_a_vision_transformer_may_have_heads_of_odd_width():
    assert NNViTParams(**{**VIT, "d_model": 6}).n_patches == 4
    with pytest.raises(ValueError, match=r"image_size must be a multiple of patch_size \(3\)"):
        NNViTParams(**{**VIT, "patch_size": 3})


def test_a_conv_net_knows_its_feature_maps():
    params = NNConvParams(**{**CONV, "input_dim": 3 * 32 * 32, "in_channels": 3}, padding=1)
    assert params.image_side() == 32
    assert params.spatial_sizes() == [16]
    assert params.flatten_dim() == 4 * 16 * 16
    two = NNConvParams(**{**CONV, "conv_channels": [4, 8]})
    assert two.spatial_sizes() == [7, 2]  # (16 - 2) / 2, then (7 - 2) // 2
    assert two.flatten_dim() == 8 * 2 * 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"input_dim": 250}, r"input_dim must be in_channels \(1\) times a square number"),
        ({"in_channels": 3}, r"input_dim must be in_channels \(3\) times a square number"),
        ({"conv_channels": []}, "conv_channels must be a list of at least one width"),
        ({"conv_channels": [4, 0]}, r"conv_channels\[1\] must be an integer >= 1"),
        ({"conv_channels": [4] * 4}, r"conv_channels\[2\] gets a feature map of 2x2, too small"),
        ({"kernel_size": 17}, r"conv_channels\[0\] gets a feature map of 16x16, too small"),
    ],
)
def test_a_conv_net_that_cannot_be_built_is_refused(values, message):
    with pytest.raises(ValueError, match=f"NNConvParams.{message}"):
        NNConvParams(**{**CONV, **values})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"net": 1}, "net must be a Nets or ModelSpec or RuntimeModule, not 1"),
        ({"device": "gpu"}, "device must be one of cpu, mps, cuda, auto, not 'gpu'"),
        ({"loss": None}, "loss must be a Losses, a LossSpec, .*, not None"),
        ({"mixed_precision": 1}, "mixed_precision must be True or False, not 1"),
        ({"task": "regression"}, "task must be a TaskSpec"),
        ({"precision": "bf16"}, "precision must be a PrecisionPolicy"),
    ],
)
def test_model_params_take_members_and_specs(values, message):
    with pytest.raises(ValueError, match=f"NNModelParams.{message}"):
        NNModelParams(**values)


def test_model_params_say_what_they_are():
    params = NNModelParams(net=Nets.CONV, device=Devices.CPU, loss=Losses.CROSS_ENTROPY)
    assert params.builtin
    assert params.is_valid()
    assert not NNModelParams().is_valid()
    assert NNOptimParams(**ADAM).is_valid()
    assert NNOptimParams(**SGD).is_valid()
    assert NNOptimFactoryParams(**FACTORY).is_valid()


def test_params_are_frozen_keyword_only_and_slotted():
    params = NNParams(**NET)
    with pytest.raises(AttributeError):
        params.input_dim = 3
    with pytest.raises(TypeError):
        NNParams(0.1)
    assert not hasattr(params, "__dict__")
    for change in (
        lambda: params.hidden_dims.append(1),
        lambda: params.hidden_dims.__setitem__(0, 1),
        lambda: params.hidden_dims.sort(),
    ):
        with pytest.raises(TypeError, match="cannot change"):
            change()
    assert params.hidden_dims == [4]
