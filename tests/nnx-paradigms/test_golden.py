"""What the original system computed: weights, outputs, schedules, masks and trainings.

Mixup is not among them: its λ comes from a stream that cannot be told from the numbers.
"""

from __future__ import annotations

import json
from pathlib import Path

import nnx
import pytest
import torch
from nnx import (
    Activations,
    DiffusionMLP,
    JEPAPredictor,
    Losses,
    Nets,
    NNModel,
    NNModelParams,
    NNMoEParams,
    NNViTParams,
    NoiseSchedulers,
    random_block_mask,
    set_seed,
)
from nnx.diffusion import sinusoidal_time_embed
from small_models import X, Y, feed_forward, loader, mixture, numbers, training

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "data" / "paradigms.json").read_text(encoding="utf-8")
)


def check_weights(case: str, net: torch.nn.Module) -> None:
    state = net.state_dict()
    assert sorted(state) == sorted(GOLDEN[case]["weights"])
    for name, (shape, total) in GOLDEN[case]["weights"].items():
        assert list(state[name].shape) == shape
        assert float(state[name].double().sum()) == pytest.approx(total, abs=2e-5)


@pytest.mark.parametrize(
    ("case", "net", "params", "inputs"),
    [
        (
            "nets_moe",
            Nets.FEED_FWD_MOE,
            NNMoEParams(
                input_dim=6, output_dim=3, hidden_dims=[8], dropout_prob=0.2, num_experts=4,
                top_k=2, activation=Activations.RELU,
            ),
            numbers(1, 5, 6),
        ),
        (
            "nets_vit",
            Nets.VIT,
            NNViTParams(
                input_dim=768, output_dim=16, dropout_prob=0.0, image_size=16, patch_size=4,
                in_channels=3, d_model=16, n_layers=2, n_heads=2,
            ),
            numbers(2, 2, 3, 16, 16),
        ),
    ],
)  # fmt: skip
def test_a_net_has_the_weights_and_gives_the_outputs_of_the_original(case, net, params, inputs):
    set_seed(11)
    model = NNModel(net_params=params, params=NNModelParams(net=net, loss=Losses.CROSS_ENTROPY))
    check_weights(case, model.net)
    evaluated = model.net.eval()(inputs)
    assert list(evaluated.shape) == GOLDEN[case]["shape"]
    assert evaluated.flatten()[:12].tolist() == pytest.approx(GOLDEN[case]["eval"], abs=2e-5)
    model.net.train()
    set_seed(5)
    trained = model.net(inputs).flatten()[:12].tolist()
    assert trained == pytest.approx(GOLDEN[case]["train"], abs=2e-5)


def test_the_diffusion_net_and_the_predictor_are_the_original_s():
    set_seed(11)
    net = DiffusionMLP(input_dim=2, hidden_dims=[16, 8], time_embed_dim=8)
    check_weights("nets_diffusion_mlp", net)
    out = net(numbers(6, 3, 2), torch.tensor([0, 3, 9])).flatten().tolist()
    assert out == pytest.approx(GOLDEN["nets_diffusion_mlp"]["out"], abs=2e-5)
    set_seed(11)
    predictor = JEPAPredictor(embed_dim=16, n_patches=16, n_layers=1, n_heads=2)
    check_weights("nets_jepa_predictor", predictor)
    out = predictor(numbers(7, 2, 5, 16), torch.arange(5), torch.arange(5, 9))
    wanted = GOLDEN["nets_jepa_predictor"]
    assert list(out.shape) == wanted["shape"]
    assert out.flatten()[:12].tolist() == pytest.approx(wanted["out"], abs=2e-5)


@pytest.mark.parametrize("key", sorted(GOLDEN["dif_schedules"]))
def test_a_schedule_is_the_original_s(key):
    kind = {"lin": NoiseSchedulers.LINEAR, "cos": NoiseSchedulers.COSINE}[key[:3]]
    T = int(key[3:])
    schedule = kind(T=T)
    for name, wanted in GOLDEN["dif_schedules"][key].items():
        found = getattr(schedule, name)[:: max(1, T // 6)].tolist()
        assert found == pytest.approx(wanted, abs=2e-6)


def test_time_features_masks_and_nt_xent_are_the_original_s():
    features = sinusoidal_time_embed(torch.tensor([0, 1, 50]), 8).flatten().tolist()
    assert features == pytest.approx(GOLDEN["dif_time_embed"]["e"], abs=2e-6)
    for seed, wanted in zip((1, 2, 3), GOLDEN["par_block_mask"]["m"]):
        generator = torch.Generator().manual_seed(seed)
        masks = random_block_mask(n_patches=64, grid_size=8, generator=generator)
        assert [mask.double().tolist() for mask in masks] == wanted
    first, second = numbers(41, 6, 5), numbers(42, 6, 5)
    found = [float(nnx.nt_xent_loss(first, second, temperature=t)) for t in (0.1, 0.5, 1.0)]
    assert found == pytest.approx(GOLDEN["par_nt_xent"]["v"], abs=2e-5)


def diffusion_model() -> NNModel:
    set_seed(11)
    return NNModel(
        module=DiffusionMLP(input_dim=2, hidden_dims=[16], time_embed_dim=8),
        params=NNModelParams(loss=Losses.MEAN_SQUARED_ERROR),
    )


def teacher() -> NNModel:
    return feed_forward(seed=99, dropout=0.0)


STEPS = {
    "par_kd_step": lambda: (
        feed_forward(),
        nnx.kd_train_step_factory(teacher(), alpha=0.3, temperature=2.0),
    ),
    "par_feature_kd": lambda: (
        feed_forward(),
        nnx.feature_kd_train_step_factory(
            teacher(), auxiliary_layers={"layers.0": "layers.0"}, alpha=0.4, beta=0.3
        ),
    ),
    "par_moe": lambda: (mixture(), nnx.moe_train_step_factory(aux_loss_weight=0.05)),
}


@pytest.mark.parametrize("case", STEPS)
def test_a_training_is_the_original_s(case):
    model, step = STEPS[case]()
    val = loader(X, Y, batch=25, shuffle=False)
    run = model.train(training(X, Y, val_loader=val), train_step_fn=step)
    check_run(case, run, model)
    errors = [None if p.train_edp.error is None else p.train_edp.error for p in run.idps]
    assert errors == pytest.approx(GOLDEN[case]["error"], abs=2e-5)


@pytest.mark.parametrize("case", ["par_simclr", "dif_step"])
def test_a_training_without_targets_is_the_original_s(case):
    if case == "par_simclr":
        model, step = feed_forward(out=8), nnx.simclr_train_step_factory(temperature=0.3)
        params = training(X, X + 0.1 * numbers(31, 50, 6))
    else:
        model = diffusion_model()
        step = nnx.diffusion_train_step_factory(NoiseSchedulers.LINEAR(T=20))
        params = training(numbers(61, 40, 2))
    run = model.train(params, train_step_fn=step)
    check_run(case, run, model)
    assert [p.train_edp.error for p in run.idps] == [p.train_edp.loss for p in run.idps]


def check_run(case, run, model):
    wanted = GOLDEN[case]
    assert [p.train_edp.loss for p in run.idps] == pytest.approx(wanted["loss"], rel=2e-4)
    total = sum(float(p.detach().double().abs().sum()) for p in model.net.parameters())
    assert total == pytest.approx(wanted["weight"], rel=2e-4)
