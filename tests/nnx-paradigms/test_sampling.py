"""Other predictions, weights and samplers, against closed forms."""

from __future__ import annotations

import nnx
import pytest
import torch
from nnx import DiffusionMLP, Losses, NNModel, NNModelParams, NoiseSchedulers
from nnx.diffusion import sample_in_steps, stored_schedule, zero_terminal_snr
from nnx.objectives import ObjectiveContext
from small_models import numbers, training

SCHEDULE = NoiseSchedulers.LINEAR(T=1000)
STD = 0.5


class Optimal(torch.nn.Module):
    """The best prediction for data that is N(0, STD²)."""

    def __init__(self, schedule, prediction):
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(1))
        self.schedule, self.prediction, self.calls = schedule, prediction, 0

    def forward(self, x, t):
        self.calls += 1
        kept = self.schedule.alphas_cumprod[t][:, None]
        clean = kept.sqrt() * STD**2 * x / (kept * STD**2 + 1 - kept)
        noise = (1 - kept).sqrt() * x / (kept * STD**2 + 1 - kept)
        velocity = kept.sqrt() * noise - (1 - kept).sqrt() * clean
        return {"noise": noise, "sample": clean, "velocity": velocity}[self.prediction]


def best(prediction="noise", schedule=SCHEDULE):
    module = Optimal(schedule, prediction)
    return NNModel(module=module, params=NNModelParams(loss=Losses.MEAN_SQUARED_ERROR))


def draw(**options):
    generator = torch.Generator().manual_seed(0)
    prediction = options.get("prediction", "noise")
    schedule = options.pop("schedule", SCHEDULE)
    model = best(prediction, schedule)
    samples = sample_in_steps(model, schedule, (4000, 1), generator=generator, **options)
    return samples, model.net.calls


@pytest.mark.parametrize("prediction", ["noise", "sample", "velocity"])
@pytest.mark.parametrize(("method", "steps"), [("ddim", 50), ("dpm++", 20)])
def test_few_steps_give_the_gaussian_for_every_prediction(method, steps, prediction):
    samples, calls = draw(method=method, steps=steps, prediction=prediction)
    assert calls == steps
    assert float(samples.std()) == pytest.approx(STD, abs=0.04)


def test_without_noise_a_sample_is_the_solution_of_its_equation():
    """The exact map of a Gaussian's probability flow is a multiplication."""
    start = torch.randn(4000, 1, generator=torch.Generator().manual_seed(0))
    kept = float(SCHEDULE.alphas_cumprod[-1])
    exact = start * STD / (kept * STD**2 + 1 - kept) ** 0.5
    errors = {
        (method, steps): float((draw(method=method, steps=steps)[0] - exact).abs().max())
        for method in ("ddim", "dpm++")
        for steps in (20, 100, 1000)
    }
    assert errors["ddim", 1000] < 0.01
    assert errors["ddim", 1000] < errors["ddim", 100] < errors["ddim", 20]
    assert errors["dpm++", 20] < errors["ddim", 20]


def test_all_steps_with_full_noise_are_ddpm():
    schedule = NoiseSchedulers.LINEAR(T=30)
    streams = [torch.Generator().manual_seed(1) for _ in range(2)]
    one = nnx.sample(best(schedule=schedule), schedule, (6, 1), generator=streams[0])
    other = sample_in_steps(
        best(schedule=schedule), schedule, (6, 1), steps=30, eta=1.0, generator=streams[1]
    )
    torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert torch.equal(streams[0].get_state(), streams[1].get_state())


def test_a_schedule_can_end_in_noise_alone_and_then_noise_is_not_predicted():
    schedule = zero_terminal_snr(NoiseSchedulers.LINEAR(T=100))
    assert float(schedule.alphas_cumprod[-1]) == 0.0
    assert float(schedule.alphas_cumprod[0]) == pytest.approx(1 - 1e-4, abs=1e-6)
    for method in ("ddim", "dpm++"):
        samples, _ = draw(schedule=schedule, prediction="velocity", method=method, steps=50)
        assert bool(samples.isfinite().all())
        assert float(samples.std()) == pytest.approx(STD, abs=0.05)
    with pytest.raises(ValueError, match="all noise"):
        nnx.diffusion_objective(schedule)
    with pytest.raises(ValueError, match="all noise"):
        sample_in_steps(best(schedule=schedule), schedule, (2, 1))


@pytest.mark.parametrize("prediction", ["noise", "sample", "velocity"])
def test_the_loss_of_a_prediction_and_its_capped_weight(prediction):
    schedule, x_0, noise = NoiseSchedulers.LINEAR(T=20), numbers(1, 3, 2), numbers(2, 3, 2)
    t = torch.tensor([0, 7, 19])
    nnx.set_seed(1)
    model = NNModel(
        module=DiffusionMLP(2, [8], 4), params=NNModelParams(loss=Losses.MEAN_SQUARED_ERROR)
    )
    kept = schedule.alphas_cumprod[t][:, None]
    given = model.net(kept.sqrt() * x_0 + (1 - kept).sqrt() * noise, t)
    velocity = kept.sqrt() * noise - (1 - kept).sqrt() * x_0
    wanted = {"noise": noise, "sample": x_0, "velocity": velocity}[prediction]
    ratio = kept / (1 - kept)
    capped = ratio.clamp(max=5.0)
    weight = {"noise": capped / ratio, "sample": capped, "velocity": capped / (ratio + 1)}
    for min_snr, by in ((None, 1.0), (5.0, weight[prediction])):
        objective = nnx.diffusion_objective(
            schedule, noise_fn=lambda x, g: (t, noise), prediction=prediction, min_snr=min_snr
        )
        (term,) = objective(ObjectiveContext(model, (x_0,), 0, 0)).terms
        assert term.name == f"{prediction}_mse"
        loss = float((by * (given - wanted).square()).mean().detach())
        assert term.value == pytest.approx(loss, rel=1e-5)


def test_a_run_knows_its_schedule():
    schedule = NoiseSchedulers.COSINE(T=15)
    model = NNModel(
        module=DiffusionMLP(2, [8], 4), params=NNModelParams(loss=Losses.MEAN_SQUARED_ERROR)
    )
    data = numbers(61, 40, 2)
    run = model.train(training(data, epochs=1), objective=nnx.diffusion_objective(schedule, seed=1))
    loaded = stored_schedule(run.id)
    assert (loaded.kind, loaded.T) == (schedule.kind, 15)
    assert torch.equal(loaded.posterior_variance, schedule.posterior_variance)
    step = nnx.diffusion_train_step_factory(schedule)
    other = model.train(training(data, epochs=1), train_step_fn=step, salt="step")
    with pytest.raises(ValueError, match="no diffusion_objective trained it"):
        stored_schedule(other.id)
    with pytest.raises(FileNotFoundError):
        stored_schedule("0" * 32)


def test_wrong_arguments_are_refused():
    for wrong in ({"steps": 0}, {"steps": 1001}, {"method": "euler"}, {"prediction": "x"},
                  {"eta": 2.0}, {"eta": 0.5, "method": "dpm++"}):  # fmt: skip
        with pytest.raises(ValueError):
            sample_in_steps(best(), SCHEDULE, (2, 1), **wrong)
    for wrong in ({"prediction": "x"}, {"min_snr": 0}):
        with pytest.raises(ValueError):
            nnx.diffusion_objective(SCHEDULE, **wrong)
