"""Schedules, noise prediction and sampling."""

from __future__ import annotations

import itertools
import math

import nnx
import pytest
import torch
from nnx import DiffusionMLP, Losses, NNModel, NNModelParams, NoiseSchedulers
from nnx.objectives import ObjectiveContext, build_objective
from small_models import losses, numbers, training

DATA = numbers(61, 40, 2)
SCHEDULE = NoiseSchedulers.LINEAR(T=20)


def model(seed=11) -> NNModel:
    nnx.set_seed(seed)
    return NNModel(
        module=DiffusionMLP(input_dim=2, hidden_dims=[16], time_embed_dim=8),
        params=NNModelParams(loss=Losses.MEAN_SQUARED_ERROR),
    )


def optimal(std: float, schedule):
    """The best noise prediction for data that is N(0, std²)."""

    class Optimal(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.unused = torch.nn.Parameter(torch.zeros(1))
            self.times = []

        def forward(self, x, t):
            self.times.append(int(t[0]))
            kept = schedule.alphas_cumprod[t][:, None]
            return (1 - kept).sqrt() * x / (kept * std**2 + 1 - kept)

        def unpack_batch(self, batch):
            return (batch[0],), None

    return NNModel(module=Optimal(), params=NNModelParams(loss=Losses.MEAN_SQUARED_ERROR))


def test_the_noised_sample_and_its_loss_are_those_of_the_formula():
    net, t, noise = model(), torch.tensor([0, 7, 19]), numbers(3, 3, 2)
    objective = nnx.diffusion_objective(SCHEDULE, noise_fn=lambda x, g: (t, noise))
    (term,) = objective(ObjectiveContext(net, (DATA[:3],), 0, 0)).terms
    kept = torch.cumprod(1 - torch.linspace(1e-4, 2e-2, 20), 0)[t][:, None]
    predicted = net.net(kept.sqrt() * DATA[:3] + (1 - kept).sqrt() * noise, t)
    assert term.value == pytest.approx(float((predicted - noise).square().mean()), rel=1e-5)
    assert term.denominator == 6


def test_sampling_visits_every_timestep_of_training_and_adds_no_noise_last():
    best = optimal(1.0, SCHEDULE)
    generator = torch.Generator().manual_seed(1)
    nnx.sample(best, SCHEDULE, (3, 2), generator=generator)
    assert best.net.times == list(range(19, -1, -1))
    drawn = torch.Generator().manual_seed(1)
    for _ in range(20):  # the start, and one for every step but the last
        torch.randn(3, 2, generator=drawn)
    assert torch.equal(drawn.get_state(), generator.get_state())


@pytest.mark.parametrize("kind", list(NoiseSchedulers))
def test_the_best_denoiser_of_a_gaussian_gives_its_samples(kind):
    schedule = kind(T=200) if kind is NoiseSchedulers.COSINE else kind(T=1000)
    samples = nnx.sample(
        optimal(0.5, schedule), schedule, (4000, 1), generator=torch.Generator().manual_seed(0)
    )
    assert float(samples.std()) == pytest.approx(0.5, abs=0.03)
    assert float(samples.mean()) == pytest.approx(0.0, abs=0.04)


def test_sampling_gives_modes_back_and_a_generator_leaves_the_global_stream_alone():
    net = model()
    net.net.train()
    net.net.time_mlp.eval()
    state = torch.get_rng_state()
    one = nnx.sample(net, SCHEDULE, (5, 2), generator=torch.Generator().manual_seed(4))
    two = nnx.sample(net, SCHEDULE, (5, 2), generator=torch.Generator().manual_seed(4))
    assert torch.equal(one, two)
    assert torch.equal(state, torch.get_rng_state())
    assert net.net.training
    assert not net.net.time_mlp.training


def test_draws_are_the_objective_s_own_and_a_resume_continues_them():
    whole = model()
    objective = nnx.diffusion_objective(SCHEDULE, seed=5)
    run = whole.train(training(DATA, epochs=4, data_id="whole"), objective=objective)
    half = model()
    started = half.train(
        training(DATA, epochs=2, data_id="half"),
        objective=nnx.diffusion_objective(SCHEDULE, seed=5),
    )
    rest = model(seed=12)
    again = rest.train(
        training(DATA, epochs=2, resume_from_run_id=started.id, resume_from_checkpoint="last"),
        objective=nnx.diffusion_objective(SCHEDULE, seed=99),
    )
    assert losses(run)[6:] == losses(again)[-6:]
    for name, value in whole.net.state_dict().items():
        assert torch.equal(value, rest.net.state_dict()[name])


def test_another_schedule_is_refused_on_resume_and_nothing_is_restored():
    first = model()
    run = first.train(training(DATA), objective=nnx.diffusion_objective(SCHEDULE, seed=5))
    other = model(seed=12)
    before = {n: v.clone() for n, v in other.net.state_dict().items()}
    again = training(DATA, resume_from_run_id=run.id, resume_from_checkpoint="last")
    for schedule, match in (
        (NoiseSchedulers.LINEAR(T=21), "T is 21"),
        (NoiseSchedulers.COSINE(T=20), "betas is"),
    ):
        with pytest.raises(ValueError, match=match):
            other.train(again, objective=nnx.diffusion_objective(schedule, seed=5))
    assert all(torch.equal(before[n], v) for n, v in other.net.state_dict().items())


def test_an_objective_of_a_config_is_that_objective():
    objective = build_objective("diffusion.noise", 1, {"kind": "linear", "T": 20, "seed": 5})
    one, other = model(), model()
    first = one.train(training(DATA), objective=objective)
    second = other.train(
        training(DATA), objective=nnx.diffusion_objective(SCHEDULE, seed=5), salt="o"
    )
    assert losses(first) == losses(second)


def test_what_cannot_be_diffused_is_refused():
    for make in (
        lambda: NoiseSchedulers.LINEAR(T=0),
        lambda: NoiseSchedulers.LINEAR(beta_min=0.5, beta_max=0.1),
        lambda: NoiseSchedulers.COSINE(s=-1),
        lambda: DiffusionMLP(2, time_embed_dim=7),
        lambda: nnx.diffusion_objective(None),
    ):
        with pytest.raises(ValueError):
            make()
    plain = NNModel(
        module=torch.nn.Linear(2, 2), params=NNModelParams(loss=Losses.MEAN_SQUARED_ERROR)
    )
    with pytest.raises(ValueError, match=r"forward\(x, t\)"):
        nnx.sample(plain, SCHEDULE, (2, 2))
    bad = nnx.diffusion_objective(SCHEDULE, noise_fn=lambda x, g: (torch.full((len(x),), 20), x))
    with pytest.raises(ValueError, match=r"outside of \[0, 20\)"):
        model().train(training(DATA), objective=bad)


def test_the_cosine_schedule_is_that_of_its_paper():
    T, s = 50, 0.008
    bar = [math.cos((t / T + s) / (1 + s) * math.pi / 2) ** 2 for t in range(T + 1)]
    schedule = NoiseSchedulers.COSINE(T=T)
    wanted = [min(1 - b / a, 0.999) for a, b in itertools.pairwise(bar)]
    assert schedule.betas.tolist() == pytest.approx(wanted, rel=1e-5)
    assert float(schedule.posterior_variance[0]) == 0.0
    assert schedule.to("cpu").kind is NoiseSchedulers.COSINE


def test_the_small_net_is_rebuilt_from_its_description():
    spec = nnx.ModelSpec("diffusion.mlp", 1, {"input_dim": 2, "hidden_dims": [16]}, seed=3)
    first = NNModel(params=NNModelParams(net=spec, loss=Losses.MEAN_SQUARED_ERROR))
    run = first.train(training(DATA, epochs=1), objective=nnx.diffusion_objective(SCHEDULE, seed=1))
    loaded = NNModel.from_checkpoint(nnx.NNCheckpoint.load(run.id, nnx.Checkpoints.LAST))
    for name, value in first.net.state_dict().items():
        assert torch.equal(value, loaded.net.state_dict()[name])
