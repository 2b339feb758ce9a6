"""I-JEPA, its target, its masks and the encoder."""

from __future__ import annotations

import nnx
import pytest
import torch
from nnx import (
    JEPAPredictor,
    Losses,
    Nets,
    NNModel,
    NNModelParams,
    NNOptimParams,
    NNViTParams,
    ViTNN,
)
from nnx.objectives import ObjectiveContext
from nnx.paradigms import BlockMasks
from small_models import loader, losses, numbers, training

IMAGES = numbers(5, 24, 3, 16, 16)
LABELS = torch.zeros(24, dtype=torch.long)


def encoder(seed=1) -> NNModel:
    nnx.set_seed(seed)
    params = NNViTParams(
        input_dim=768, output_dim=16, dropout_prob=0.0, image_size=16, patch_size=4, d_model=16,
        n_layers=1, n_heads=2,
    )  # fmt: skip
    model = NNModel(
        net_params=params, params=NNModelParams(net=Nets.VIT, loss=Losses.MEAN_SQUARED_ERROR)
    )
    model.net._jepa_predictor = JEPAPredictor(embed_dim=16, n_patches=16, n_layers=1)
    return model


def parts(model, momentum=0.9):
    return nnx.jepa_objective(
        nnx.build_target_encoder(model.net), model.net._jepa_predictor, BlockMasks(4, seed=7),
        ema_momentum=momentum,
    )  # fmt: skip


def params(epochs=2, accumulate=1, **more):
    optim = NNOptimParams.builder().adamw(max_lr=1e-3).accumulate_grad(accumulate).build()
    return training(
        epochs=epochs, optim=optim, train_loader=loader(IMAGES, LABELS, batch=8), **more
    )


def test_dropped_patches_have_no_part_in_the_embeddings():
    net = ViTNN(image_size=16, patch_size=4, d_model=16, n_layers=2, n_heads=2)
    mask = torch.zeros(2, 16, dtype=torch.bool)
    mask[:, [0, 5, 6]] = True
    image = IMAGES[:2].clone().requires_grad_()
    out = net(image, mask)
    assert out.shape == (2, 4, 16)
    (gradient,) = torch.autograd.grad(out.sum(), image)
    seen = gradient.abs().sum(1).unfold(1, 4, 4).unfold(2, 4, 4).sum((-1, -2)).flatten(1) > 0
    assert torch.equal(seen, mask)
    torch.testing.assert_close(net(image, torch.ones(2, 16, dtype=torch.bool)), net(image))


def test_the_encoder_refuses_masks_that_keep_unequal_numbers_and_other_images():
    net = ViTNN(image_size=16, patch_size=4, d_model=16, n_layers=1, n_heads=2)
    uneven = torch.zeros(2, 16, dtype=torch.bool)
    uneven[0, :3] = uneven[1, :4] = True
    with pytest.raises(ValueError, match="keeps between 3 and 4 patches"):
        net(IMAGES[:2], uneven)
    with pytest.raises(ValueError, match="one boolean for each"):
        net(IMAGES[:2], torch.ones(2, 16))
    with pytest.raises(ValueError, match=r"expects images \(B, 3, 16, 16\)"):
        net(numbers(1, 2, 3, 8, 8))
    with pytest.raises(ValueError):
        ViTNN(image_size=16, patch_size=5)
    assert net.patch_positions().tolist() == list(range(1, 17))


def test_the_loss_is_the_squared_error_of_the_hidden_patches():
    model = encoder()
    target = nnx.build_target_encoder(model.net)
    context = torch.ones(16, dtype=torch.bool)
    context[[3, 9]] = False
    predictor = model.net._jepa_predictor
    objective = nnx.jepa_objective(target, predictor, lambda n, device: (context, ~context))
    (term,) = objective(ObjectiveContext(model, (IMAGES[:4], LABELS[:4]), 0, 0)).terms
    visible = torch.tensor([0, *[i + 1 for i in range(16) if i not in (3, 9)]])
    hidden = torch.tensor([4, 10])
    guess = predictor(model.net(IMAGES[:4], context.expand(4, 16)), visible, hidden)
    wanted = torch.nn.functional.mse_loss(guess, target(IMAGES[:4])[:, hidden])
    assert term.value == pytest.approx(float(wanted.detach()), rel=1e-6)
    assert term.denominator == 4 * 2 * 16


def test_the_target_moves_once_for_each_committed_update():
    model = encoder()
    objective = parts(model)
    before = {n: p.clone() for n, p in objective.target_encoder.named_parameters()}
    model.train(params(epochs=1, accumulate=2), objective=objective)
    assert objective.updates == 2  # three batches in windows of two
    moved = dict(objective.target_encoder.named_parameters())
    assert any(not torch.equal(before[n], moved[n]) for n in before)
    assert all(p.grad is None and not p.requires_grad for p in moved.values())


def test_the_average_is_the_formula_and_pairs_by_name():
    source, target = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    old = target.weight.detach().clone()
    nnx.update_ema(source, target, 0.75)
    torch.testing.assert_close(target.weight.detach(), 0.75 * old + 0.25 * source.weight.detach())
    with pytest.raises(KeyError, match="no parameter 'bias'"):
        nnx.update_ema(torch.nn.Linear(3, 2, bias=False), target, 0.5)
    for momentum in (1.0, -0.1):
        with pytest.raises(ValueError):
            nnx.update_ema(source, target, momentum)


@pytest.mark.parametrize("kind", ["objective", "step"])
def test_a_resumed_training_is_the_uninterrupted_one_and_so_is_its_target(kind):
    def how(model):
        objective = parts(model)
        if kind == "objective":
            return objective, {"objective": objective}
        step = nnx.jepa_train_step_factory(
            objective.target_encoder, model.net._jepa_predictor, objective.mask_fn, ema_momentum=0.9
        )
        return objective, {"train_step_fn": step, "components": [objective.mask_fn]}

    whole = encoder()
    first, arguments = how(whole)
    run = whole.train(params(epochs=4, data_id="whole"), **arguments)
    half = encoder()
    _, arguments = how(half)
    started = half.train(params(epochs=2, data_id="half"), **arguments)
    resumed = encoder(seed=2)
    second, arguments = how(resumed)
    again = resumed.train(
        params(epochs=2, resume_from_run_id=started.id, resume_from_checkpoint="last"), **arguments
    )
    assert losses(run)[-6:] == losses(again)[-6:]
    for model, other in ((whole.net, resumed.net), (first.target_encoder, second.target_encoder)):
        for name, value in model.state_dict().items():
            assert torch.equal(value, other.state_dict()[name]), name


def test_another_momentum_is_refused_on_resume():
    model = encoder()
    run = model.train(params(), objective=parts(model))
    other = encoder()
    with pytest.raises(ValueError, match=r"ema_momentum is 0\.5"):
        other.train(
            params(resume_from_run_id=run.id, resume_from_checkpoint="last"),
            objective=parts(other, momentum=0.5),
        )


def test_what_cannot_be_trained_is_refused_before_a_run_is_reserved(tmp_path):
    model = encoder()
    target = nnx.build_target_encoder(model.net)
    outside = JEPAPredictor(embed_dim=16, n_patches=16)
    masks = BlockMasks(4)
    for objective, match in (
        (nnx.jepa_objective(target, outside, masks), "no part of model.net"),
        (nnx.jepa_objective(model.net, model.net._jepa_predictor, masks), "shares parameters"),
    ):
        with pytest.raises(ValueError, match=match):
            model.train(params(), objective=objective)
    assert not (tmp_path / "runs").exists()
    step = nnx.jepa_train_step_factory(target, model.net._jepa_predictor, masks)
    with pytest.raises(ValueError, match="steps the optimizer itself"):
        model.train(params(), objective=step)


def test_masks_are_rectangles_that_complement_their_context():
    generator = torch.Generator().manual_seed(3)
    for _ in range(50):
        context, target = nnx.random_block_mask(n_patches=144, grid_size=12, generator=generator)
        assert torch.equal(context, ~target)
        rows, columns = target.view(12, 12).nonzero().T
        height, width = rows.max() - rows.min() + 1, columns.max() - columns.min() + 1
        assert int(target.sum()) == int(height * width)
        assert 0.1 < float(target.double().mean()) < 0.25
    for wrong in (
        {"n_patches": 10, "grid_size": 3},
        {"n_patches": 9, "grid_size": 3, "block_scale": (0.01, 0.01)},
        {"n_patches": 9, "grid_size": 3, "block_aspect": (9.0, 9.0)},
    ):
        with pytest.raises(ValueError):
            nnx.random_block_mask(**wrong)
