"""Classes in diffusion, guided sampling, the U-Net, and sampling a run by what it knows."""

from __future__ import annotations

import nnx
import pytest
import torch
from nnx import DiffusionMLP, Losses, ModelSpec, NNCheckpoint, NNModel, NNModelParams
from nnx.diffusion import (
    NoiseSchedulers,
    UNet,
    diffusion_objective,
    sample_in_steps,
    sample_run,
    stored_diffusion,
)
from nnx.objectives import ObjectiveContext
from nnx.paradigms import EMA
from small_models import losses, numbers, training

SCHEDULE = NoiseSchedulers.COSINE(T=60)
DATA, CLASSES = numbers(61, 40, 2), torch.arange(40) % 3
SQUARED = NNModelParams(loss=Losses.MEAN_SQUARED_ERROR)


def registered(id, **config) -> NNModel:
    nnx.set_seed(3)
    params = NNModelParams(net=ModelSpec(id, config=config), loss=Losses.MEAN_SQUARED_ERROR)
    return NNModel(params=params)


def conditional(**config) -> NNModel:
    return registered(
        "diffusion.mlp", input_dim=2, hidden_dims=[16], time_embed_dim=8, n_classes=3, **config
    )


class Answers(torch.nn.Module):
    """Noise that depends on the class in a way that can be written down."""

    def __init__(self, guidance=None):
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(1))
        self.guidance, self.calls = guidance, 0

    def forward(self, x, t, y=None):
        self.calls += 1

        def told(y):
            return 0.3 * x + 0.1 * y[:, None]

        if self.guidance is None:
            return told(y)
        without = told(torch.full_like(y, -1))
        return without + self.guidance * (told(y) - without)


def test_guidance_moves_from_no_class_towards_the_class_in_one_forward_a_step():
    classes = torch.tensor([0, 2, 1])
    found = {}
    for name, net, guidance in (
        ("guided", Answers(), 2.5),
        ("by hand", Answers(2.5), 1.0),
        ("plain", Answers(), 1.0),
    ):
        model = NNModel(module=net, params=SQUARED)
        found[name] = sample_in_steps(
            model, SCHEDULE, (3, 2), steps=5, classes=classes, guidance=guidance,
            generator=torch.Generator().manual_seed(1),
        )  # fmt: skip
        assert net.calls == 5
    torch.testing.assert_close(found["guided"], found["by hand"])
    assert not torch.allclose(found["guided"], found["plain"])


def test_one_class_for_all_is_that_class_for_each():
    model = conditional()
    draws = [
        sample_in_steps(
            model, SCHEDULE, (4, 2), steps=3, classes=classes,
            generator=torch.Generator().manual_seed(1),
        )
        for classes in (1, torch.full((4,), 1))
    ]  # fmt: skip
    assert torch.equal(*draws)


def test_a_share_of_the_classes_is_withheld_and_the_rest_are_told():
    seen = []

    class Spy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, x, t, y):
            seen.append(y)
            return x * self.weight

        def unpack_batch(self, batch):
            return (batch[0],), batch[1]

    model = NNModel(module=Spy(), params=SQUARED)
    objective = diffusion_objective(SCHEDULE, seed=1, class_dropout=0.25)
    x, y = numbers(1, 4000, 2), torch.arange(4000) % 7
    stream = torch.get_rng_state()
    objective(ObjectiveContext(model, (x, y), 0, 0))
    assert torch.equal(stream, torch.get_rng_state())
    (told,) = seen
    assert float((told == -1).double().mean()) == pytest.approx(0.25, abs=0.03)
    assert torch.equal(told[told >= 0], y[told >= 0])


def test_a_class_conditional_training_resumes_bit_for_bit():
    def objective():
        return diffusion_objective(
            SCHEDULE, seed=4, class_dropout=0.2, prediction="velocity", min_snr=5.0
        )

    whole = conditional()
    run = whole.train(training(DATA, CLASSES, epochs=4, data_id="w"), objective=objective())
    half = conditional().train(
        training(DATA, CLASSES, epochs=2, data_id="h"), objective=objective()
    )
    rest = conditional()
    params = training(
        DATA, CLASSES, epochs=2, resume_from_run_id=half.id, resume_from_checkpoint="last"
    )
    again = rest.train(params, objective=objective())
    assert losses(run)[-6:] == losses(again)[-6:]
    for one, other in zip(whole.net.parameters(), rest.net.parameters()):
        assert torch.equal(one, other)


def test_a_run_is_sampled_by_its_own_schedule_prediction_and_weights():
    model, ema = conditional(), EMA(0.5)
    objective = diffusion_objective(SCHEDULE, seed=4, class_dropout=0.2, prediction="velocity")
    run = model.train(training(DATA, CLASSES, epochs=2), objective=objective, callbacks=[ema])
    schedule, prediction = stored_diffusion(run.id)
    assert prediction == "velocity"
    assert torch.equal(schedule.betas, SCHEDULE.betas)
    options = {"steps": 7, "classes": 2, "guidance": 1.5}
    for tag in ("last", "ema"):
        found = sample_run(
            run.id, (5, 2), tag=tag, generator=torch.Generator().manual_seed(2), **options
        )
        own = NNModel.from_checkpoint(NNCheckpoint.load(run.id, tag))
        wanted = sample_in_steps(
            own, SCHEDULE, (5, 2), prediction="velocity",
            generator=torch.Generator().manual_seed(2), **options,
        )  # fmt: skip
        assert torch.equal(found, wanted)
    with pytest.raises(TypeError, match="the run knows what its net predicts"):
        sample_run(run.id, (5, 2), prediction="noise")
    with pytest.raises(FileNotFoundError, match="no checkpoint swa"):
        sample_run(run.id, (5, 2), tag="swa")


def test_another_schedule_or_prediction_than_that_of_the_training_is_refused():
    model = conditional()
    objective = diffusion_objective(SCHEDULE, seed=4, class_dropout=0.2)
    model.train(training(DATA, CLASSES, epochs=1), objective=objective)
    other = NoiseSchedulers.COSINE(T=61)
    with pytest.raises(ValueError, match="not the schedule that the net was trained with"):
        sample_in_steps(model, other, (2, 2))
    with pytest.raises(ValueError, match="not the schedule that the net was trained with"):
        nnx.sample(model, other, (2, 2))
    with pytest.raises(ValueError, match="trained to predict the noise, not the sample"):
        sample_in_steps(model, SCHEDULE, (2, 2), prediction="sample")
    assert sample_in_steps(model, SCHEDULE, (2, 2), steps=2).shape == (2, 2)


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({}, 8),
        ({"multipliers": (1,), "blocks": 2}, 5),
        ({"multipliers": (1, 2, 2), "blocks": 2, "in_channels": 3}, 12),
    ],
)
def test_a_u_net_gives_a_prediction_of_the_images_shape_and_every_weight_learns(config, size):
    nnx.set_seed(1)
    net = UNet(width=8, n_classes=4, **config)
    x, t = numbers(1, 3, config.get("in_channels", 1), size, size), torch.tensor([0, 5, 9])
    assert not net(x, t).any()  # before training it predicts nothing
    with torch.no_grad():
        torch.nn.init.normal_(net.conv_out.weight)
    out = net(x, t, torch.tensor([0, 3, -1]))
    assert out.shape == x.shape
    torch.testing.assert_close(out[2], net(x, t)[2])  # -1 is no class
    assert not torch.allclose(out[0], net(x, t)[0])
    assert not torch.allclose(net(x, t + 1), net(x, t))
    out.square().sum().backward()
    idle = [n for n, p in net.named_parameters() if p.grad is None or not p.grad.any()]
    assert idle == []


def test_a_u_net_is_a_registered_recipe_that_trains_and_is_rebuilt():
    model = registered("diffusion.unet", width=8, multipliers=[1, 2], n_classes=3)
    images = numbers(3, 12, 1, 4, 4)
    objective = diffusion_objective(SCHEDULE, seed=1, class_dropout=0.1)
    run = model.train(training(images, CLASSES[:12], epochs=2), objective=objective)
    again = NNModel.from_checkpoint(NNCheckpoint.load(run.id, "last"))
    x, t = images[:2], torch.tensor([3, 30])
    assert torch.equal(again.net(x, t), model.net(x, t))
    assert sample_run(run.id, (2, 1, 4, 4), steps=3, classes=1).shape == (2, 1, 4, 4)


def test_what_cannot_be_told_or_guided_is_refused():
    plain = NNModel(module=DiffusionMLP(2, [8], 4), params=SQUARED)
    objective = diffusion_objective(SCHEDULE, seed=1, class_dropout=0.1)
    with pytest.raises(ValueError, match="DiffusionMLP was built without n_classes"):
        plain.train(training(DATA, CLASSES), objective=objective)
    with pytest.raises(ValueError, match="without n_classes and takes no classes"):
        sample_in_steps(plain, SCHEDULE, (2, 2), classes=1)
    for net in (plain.net, UNet(width=8)):
        with pytest.raises(ValueError, match="without n_classes and takes no classes"):
            net(torch.zeros(1, 2) if net is plain.net else torch.zeros(1, 1, 4, 4),
                torch.tensor([0]), torch.tensor([1]))  # fmt: skip
    model = conditional()
    for batch, match in (
        ((DATA, DATA[:, 0]), "class indices"),
        ((DATA, CLASSES + 1), "the class 3, but the net knows 3"),
    ):
        with pytest.raises(ValueError, match=match):
            objective(ObjectiveContext(model, batch, 0, 0))
    with pytest.raises(ValueError, match="classes=, which are not given"):
        sample_in_steps(model, SCHEDULE, (2, 2), guidance=2.0)
    with pytest.raises(ValueError, match="one index or 2 of them"):
        sample_in_steps(model, SCHEDULE, (2, 2), classes=torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="multiples of 2, got"):
        UNet(width=8)(torch.zeros(1, 1, 5, 4), torch.tensor([0]))
    for wrong in ({"width": 12}, {"multipliers": ()}, {"blocks": 0}, {"n_classes": 0},
                  {"dropout": 2.0}):  # fmt: skip
        with pytest.raises(ValueError):
            UNet(**wrong)
    for wrong in (-0.1, 1.0):
        with pytest.raises(ValueError):
            diffusion_objective(SCHEDULE, class_dropout=wrong)
