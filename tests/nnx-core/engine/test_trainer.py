"""Several named optimizers over one model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from nnx import (
    Callback,
    Checkpoints,
    Losses,
    LossTerm,
    NNCheckpoint,
    NNEvaluationDataPoint,
    NNModel,
    NNModelParams,
    NNParamGroupSpec,
    NNRun,
    NNSchedulerParams,
    NNTrainerParams,
    ObjectiveResult,
    PositionalInputs,
    PrecisionPolicy,
    Schedulers,
    Trainer,
    set_seed,
    supervised_objective,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.G = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))
        self.D = nn.Sequential(nn.Linear(1, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, z):
        return self.G(z)


def gan_model(seed=0):
    torch.manual_seed(seed)
    return NNModel(
        module=Gan(),
        params=NNModelParams(loss=Losses.MEAN_SQUARED_ERROR),
        batch_adapter=PositionalInputs(1),
    )


def real_data(n=512):
    """Two modes, at -2 and 2."""
    generator = torch.Generator().manual_seed(0)
    side = torch.randint(0, 2, (n, 1), generator=generator) * 4.0 - 2.0
    return DataLoader(
        TensorDataset(side + 0.2 * torch.randn(n, 1, generator=generator)),
        batch_size=32,
        shuffle=True,
    )


def gan_step(ctx):
    net, bce = ctx.model.net, nn.functional.binary_cross_entropy_with_logits
    net.train()
    (real,) = ctx.batch
    fake = net.G(torch.randn(len(real), 4))
    ctx.optimizers["D"].zero_grad()
    scores = net.D(real), net.D(fake.detach())
    d_loss = bce(scores[0], torch.ones_like(scores[0])) + bce(
        scores[1], torch.zeros_like(scores[1])
    )
    d_loss.backward()
    ctx.optimizers["D"].step()
    ctx.report_update("D")
    ctx.optimizers["G"].zero_grad()
    score = net.D(fake)
    g_loss = bce(score, torch.ones_like(score))
    g_loss.backward()
    ctx.optimizers["G"].step()
    ctx.report_update("G")
    value = float(d_loss.detach())
    return NNEvaluationDataPoint(loss=value, error=value, extra={"g_loss": float(g_loss.detach())})


def gan_params(kit, n_epochs=3, **kwargs):
    kwargs.setdefault("train_loader", real_data())
    return NNTrainerParams(
        n_epochs=n_epochs,
        seed=3,
        optims={
            name: kit.adam(
                max_lr=2e-3,
                momentum=(0.5, 0.999),
                param_groups=[NNParamGroupSpec(name_pattern=f"{name}.*")],
            )
            for name in ("G", "D")
        },
        **kwargs,
    )


def test_a_gan_learns_both_modes_and_equals_a_hand_written_loop(kit):
    model = gan_model()
    constant = NNSchedulerParams(min_lr=0, factor=0.5, patience=999, cooldown=0, threshold=0)
    params = gan_params(kit, n_epochs=40, schedulers={"G": constant, "D": constant})
    run = Trainer(model).train(params, trainer_step_fn=gan_step)

    set_seed(3)
    net = gan_model().net
    set_seed(3)
    optimizers = {
        name: torch.optim.Adam(getattr(net, name).parameters(), lr=2e-3, betas=(0.5, 0.999))
        for name in ("G", "D")
    }
    bce = nn.functional.binary_cross_entropy_with_logits
    losses = []
    for _ in range(40):
        for (real,) in real_data():
            fake = net.G(torch.randn(len(real), 4))
            optimizers["D"].zero_grad()
            a, b = net.D(real), net.D(fake.detach())
            d_loss = bce(a, torch.ones_like(a)) + bce(b, torch.zeros_like(b))
            d_loss.backward()
            optimizers["D"].step()
            optimizers["G"].zero_grad()
            c = net.D(fake)
            bce(c, torch.ones_like(c)).backward()
            optimizers["G"].step()
            losses.append(d_loss.item())
    assert kit.same(model.net.state_dict(), net.state_dict())
    assert [idp.train_edp.loss for idp in run.idps] == losses
    assert set(run.idps[0].train_edp.extra) == {"g_loss"}

    samples = model.net.G(torch.randn(2000, 4, generator=torch.Generator().manual_seed(1)))
    assert (samples < -1).float().mean() > 0.15
    assert (samples > 1).float().mean() > 0.15


def test_an_actor_critic_balances_its_bandit(kit):
    """Two arms that pay with 0.2 and 0.8: the actor must come to prefer the second."""

    class ActorCritic(nn.Module):
        def __init__(self):
            super().__init__()
            self.actor, self.critic = nn.Linear(1, 2), nn.Linear(1, 1)

        def forward(self, state):
            return self.actor(state)

    def step(ctx):
        net = ctx.model.net
        (state,) = ctx.batch
        policy = torch.distributions.Categorical(logits=net.actor(state))
        action = policy.sample()
        reward = torch.bernoulli(torch.tensor([0.2, 0.8])[action])
        value = net.critic(state).squeeze(1)
        critic_loss = nn.functional.mse_loss(value, reward)
        actor_loss = -(policy.log_prob(action) * (reward - value.detach())).mean()
        for name, loss in (("critic", critic_loss), ("actor", actor_loss)):
            ctx.optimizers[name].zero_grad()
            loss.backward()
            ctx.optimizers[name].step()
            ctx.report_update(name)
        return NNEvaluationDataPoint(
            loss=critic_loss.item(),
            error=1 - reward.mean().item(),
            extra={"actor": actor_loss.item()},
        )

    torch.manual_seed(0)
    model = NNModel(module=ActorCritic(), params=NNModelParams(loss=Losses.CROSS_ENTROPY))
    params = NNTrainerParams(
        n_epochs=6,
        seed=0,
        train_loader=[(torch.ones(16, 1),)] * 30,
        optims={
            name: kit.adam(max_lr=0.05, param_groups=[NNParamGroupSpec(name_pattern=f"{name}.*")])
            for name in ("actor", "critic")
        },
    )
    Trainer(model).train(params, trainer_step_fn=step)
    preference = model.net(torch.ones(1, 1)).softmax(1)[0, 1].item()
    assert preference > 0.9
    assert model.net.critic(torch.ones(1, 1)).item() == pytest.approx(0.8, abs=0.12)


# Ownership and context ----------------------------------------------------------------------


def test_each_optimizer_owns_only_what_it_matches(kit):
    seen = {}

    def look(self, ctx):
        names = {id(p): n for n, p in ctx.model.net.named_parameters()}
        for name, optimizer in ctx.optimizers.items():
            seen[name] = {names[id(p)] for g in optimizer.param_groups for p in g["params"]}
        seen["primary"] = ctx.optimizer is ctx.optimizers["D"]
        seen["scheduler"] = ctx.scheduler
        seen["trainer"] = type(ctx.trainer)

    callback = type("Look", (Callback,), {"on_train_begin": look})()
    run = Trainer(gan_model()).train(
        gan_params(kit, n_epochs=1), trainer_step_fn=gan_step, callbacks=[callback]
    )
    assert seen["G"] == {"G.0.weight", "G.0.bias", "G.2.weight", "G.2.bias"}
    assert seen["D"] == {"D.0.weight", "D.0.bias", "D.2.weight", "D.2.bias"}
    assert seen["primary"]
    assert seen["scheduler"] is None
    assert seen["trainer"] is Trainer
    loaded = NNRun.load(run.id)
    assert loaded.id == run.id
    assert loaded.trainer.state() == run.trainer.state()


def test_groups_that_match_nothing_are_refused(kit):
    params = dataclasses.replace(
        gan_params(kit), optims={"E": kit.adam(param_groups=[NNParamGroupSpec(name_pattern="E.*")])}
    )
    with pytest.raises(ValueError, match="match"):
        Trainer(gan_model()).train(params, trainer_step_fn=gan_step)
    assert not Path("runs").exists()


def test_a_parameter_that_no_optimizer_owns_is_named_once(kit):
    params = gan_params(kit, n_epochs=2)
    params = dataclasses.replace(params, optims={"G": params.optims["G"]})

    def step(ctx):
        return NNEvaluationDataPoint(loss=0.0)

    with pytest.warns(RuntimeWarning, match=r"no optimizer owns D\.0\.weight") as caught:
        Trainer(gan_model()).train(params, trainer_step_fn=step)
    assert len([w for w in caught if "no optimizer owns" in str(w.message)]) == 1


def test_a_step_must_return_a_record(kit):
    with pytest.raises(TypeError, match="trainer_step_fn must return an NNEvaluationDataPoint"):
        Trainer(gan_model()).train(gan_params(kit), trainer_step_fn=lambda ctx: 0.5)


def test_an_unknown_name_cannot_be_reported(kit):
    def step(ctx):
        ctx.report_update("X")

    with pytest.raises(ValueError, match=r"report_update\('X'\).*'G'.*'D'"):
        Trainer(gan_model()).train(gan_params(kit), trainer_step_fn=step)


# Schedulers -----------------------------------------------------------------------------------


def stepping(**kwargs):
    kwargs.setdefault("kind", Schedulers.STEP)
    return NNSchedulerParams(
        min_lr=0.0, factor=0.5, patience=0, cooldown=0, threshold=0.0, **kwargs
    )


class Rates(Callback):
    def __init__(self):
        self.rates = []

    def on_epoch_end(self, ctx):
        self.rates.append({n: o.param_groups[0]["lr"] for n, o in ctx.optimizers.items()})


def test_each_scheduler_follows_its_own_clock(kit):
    rates = Rates()
    params = gan_params(
        kit,
        n_epochs=2,
        schedulers={
            "G": stepping(step_size=1),
            "D": stepping(step_size=16, clock="optimizer_update"),
        },
    )
    Trainer(gan_model()).train(params, trainer_step_fn=gan_step, callbacks=[rates])
    assert rates.rates == [{"G": 1e-3, "D": 1e-3}, {"G": 5e-4, "D": 5e-4}]


def test_a_step_function_may_own_the_schedule(kit):
    def step(ctx):
        record = gan_step(ctx)
        if ctx.batch_idx == 0:
            ctx.schedulers["G"].step()
        return record

    rates = Rates()
    params = gan_params(
        kit,
        n_epochs=3,
        auto_step_schedulers=False,
        schedulers={"G": stepping(step_size=2), "D": stepping(step_size=1)},
    )
    Trainer(gan_model()).train(params, trainer_step_fn=step, callbacks=[rates])
    assert [r["G"] for r in rates.rates] == [2e-3, 1e-3, 1e-3]
    assert [r["D"] for r in rates.rates] == [2e-3] * 3


def test_an_update_clock_is_taken_up_where_the_step_function_left_it(kit):
    def step(ctx):
        record = gan_step(ctx)
        if ctx.batch_idx == 0:
            ctx.schedulers["G"].step()
        return record

    schedulers = {
        "G": stepping(step_size=2, clock="optimizer_update"),
        "D": stepping(step_size=100, clock="optimizer_update"),
    }
    params = gan_params(kit, n_epochs=1, auto_step_schedulers=False, schedulers=schedulers)
    first = Trainer(gan_model()).train(params, trainer_step_fn=step)
    rates = []

    def note(ctx):
        record = gan_step(ctx)
        rates.append(ctx.optimizers["G"].param_groups[0]["lr"])
        return record

    again = dataclasses.replace(
        params, auto_step_schedulers=True, resume_from_run_id=first.id, resume_mode="stateful"
    )
    Trainer(gan_model()).train(again, trainer_step_fn=note)
    assert rates[:4] == [1e-3, 1e-3, 5e-4, 5e-4]


def test_an_epoch_that_reports_no_update_warns(kit):
    def silent(ctx):
        return NNEvaluationDataPoint(loss=0.0)

    params = gan_params(
        kit, n_epochs=1,
        schedulers={"G": stepping(step_size=16, clock="optimizer_update")},
    )  # fmt: skip
    with pytest.warns(RuntimeWarning, match="reported no optimizer update"):
        Trainer(gan_model()).train(params, trainer_step_fn=silent)


# Objectives -----------------------------------------------------------------------------------


def halves(kit, **kwargs):
    return {
        name: kit.adam(param_groups=[NNParamGroupSpec(name_pattern=f"layers.{i}.*")], **kwargs)
        for i, name in enumerate(("front", "back"))
    }


class Events(Callback):
    def __init__(self):
        self.events, self.counts = [], []

    def on_optimizer_update(self, ctx, event):
        self.events.append((event.optimizer, event.update_idx, event.batch_idx, event.microbatches))
        self.counts.append(ctx.update_count)


def test_an_objective_steps_every_optimizer_once_per_window(kit):
    whole = kit.model(dropout=0.0)
    whole.train(kit.train_params(n_epochs=1, optim=kit.adam(accumulate_grad_batches=4)))
    model, events = kit.model(dropout=0.0), Events()
    params = NNTrainerParams(
        n_epochs=1, seed=7, train_loader=kit.loader(), val_loader=kit.loader(48, shuffle=False, seed=1),
        optims=halves(kit, accumulate_grad_batches=4),
    )  # fmt: skip
    run = Trainer(model).train(params, objective=supervised_objective(), callbacks=[events])
    for name, value in whole.net.state_dict().items():
        torch.testing.assert_close(model.net.state_dict()[name], value, rtol=1e-5, atol=1e-6)
    assert events.events == [
        ("front", 1, 3, 4), ("back", 1, 3, 4), ("front", 2, 5, 2), ("back", 2, 5, 2),
    ]  # fmt: skip
    assert [idp.update_count for idp in run.idps] == [0, 0, 0, 1, 1, 2]


def test_every_event_of_a_commit_comes_before_a_scheduler_moves(kit):
    seen = []

    def note(self, ctx, event):
        seen.append([o.param_groups[0]["lr"] for o in ctx.optimizers.values()])

    callback = type("Note", (Callback,), {"on_optimizer_update": note})()
    clock = stepping(step_size=1, clock="optimizer_update")
    params = NNTrainerParams(
        n_epochs=1, seed=7, train_loader=kit.loader(32), optims=halves(kit),
        schedulers={"front": clock, "back": clock},
    )  # fmt: skip
    Trainer(kit.model()).train(params, objective=supervised_objective(), callbacks=[callback])
    assert seen == [[0.01, 0.01]] * 2 + [[0.005, 0.005]] * 2


def test_only_the_optimizers_with_gradients_are_stepped(kit):
    """A loss over the generator alone leaves the discriminator's optimizer out."""

    def objective(ctx):
        (real,) = ctx.batch
        out = ctx.model.net.G(torch.randn(len(real), 4))
        return ObjectiveResult([LossTerm("g", (out - real).square().sum(), len(real))])

    model, events = gan_model(), Events()
    before = {k: v.clone() for k, v in model.net.D.state_dict().items()}
    Trainer(model).train(gan_params(kit, n_epochs=1), objective=objective, callbacks=[events])
    assert {name for name, *_ in events.events} == {"G"}
    assert kit.same(before, model.net.D.state_dict())


# Resuming ---------------------------------------------------------------------------------------


def test_a_split_gan_equals_a_straight_one(kit):
    whole = gan_model()
    Trainer(whole).train(gan_params(kit, n_epochs=4), trainer_step_fn=gan_step)
    first = Trainer(gan_model()).train(gan_params(kit, n_epochs=2), trainer_step_fn=gan_step)
    model = gan_model(seed=5)
    params = (
        NNTrainerParams.builder()
        .n_epochs(2)
        .seed(3)
        .train_loader(real_data())
        .optimizer("G", gan_params(kit).optims["G"])
        .optimizer("D", gan_params(kit).optims["D"])
        .resume_from(first.id, checkpoint="last", mode="auto")
        .build()
    )
    rest = Trainer(model).train(params, trainer_step_fn=gan_step)
    assert kit.same(whole.net.state_dict(), model.net.state_dict())
    assert rest.idps[0].epoch_idx == 2
    point = NNCheckpoint.load_training_state(run=first.id, type=Checkpoints.LAST)
    assert set(point["optimizers_state"]) == {"G", "D"}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda kit, p: {"optims": {"G": p.optims["G"]}}, "optimizers saved"),
        (
            lambda kit, p: {
                "optims": {
                    **p.optims,
                    "D": kit.adam(param_groups=[NNParamGroupSpec(name_pattern="D.0.*")]),
                }
            },
            "'D'.*other parameters",
        ),
        (lambda kit, p: {"schedulers": {"G": stepping(step_size=1)}}, "'G'.*StepLR"),
        (
            lambda kit, p: {
                "schedulers": {
                    "G": NNSchedulerParams(
                        min_lr=0.0, factor=0.5, patience=1, cooldown=0, threshold=0.3
                    )
                }
            },
            "'G'.*improvement rule",
        ),
    ],
)
def test_every_named_part_is_checked_before_anything_is_touched(kit, change, match):
    first = Trainer(gan_model()).train(gan_params(kit, n_epochs=1), trainer_step_fn=gan_step)
    params = gan_params(kit, resume_from_run_id=first.id)
    model = gan_model(seed=4)
    before = kit.weights(model.net)
    with pytest.raises(ValueError, match=match):
        Trainer(model).train(
            dataclasses.replace(params, **change(kit, params)), trainer_step_fn=gan_step
        )
    assert kit.same(before, model.net.state_dict())


def test_the_legacy_precision_flag_is_not_applied_by_a_trainer(kit, monkeypatch):
    """On a device that would reduce it (stood in for here) an objective says so."""
    from nnx.engine import optimizer_set
    from nnx.precision import ResolvedPrecision

    def resolve(params, device):
        if params.mixed_precision:
            return ResolvedPrecision("fp16", "fp16", "cuda", source="mixed_precision")
        return ResolvedPrecision("fp32", "fp32", "cpu")

    monkeypatch.setattr(optimizer_set, "resolve_precision", resolve)
    params = NNTrainerParams(n_epochs=1, train_loader=kit.loader(), optims=halves(kit))
    with pytest.warns(RuntimeWarning, match="does not apply the legacy mixed_precision flag"):
        run = Trainer(kit.model(mixed_precision=True)).train(
            params, objective=supervised_objective()
        )
    assert run.precision.effective == "fp32"


def test_an_explicit_precision_applies_to_an_objective(kit):
    model = kit.model(precision=PrecisionPolicy(mode="bf16"))
    dtypes = set()

    def look(module, inputs, output):
        if module.training:
            dtypes.add(output.dtype)

    model.net.register_forward_hook(look)
    params = NNTrainerParams(n_epochs=1, train_loader=kit.loader(), optims=halves(kit))
    run = Trainer(model).train(params, objective=supervised_objective())
    assert dtypes == {torch.bfloat16}
    assert run.precision.effective == "bf16"
