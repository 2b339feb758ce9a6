"""Averages of weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from nnx import (
    Callback,
    LRMonitor,
    NNCheckpoint,
    NNModel,
    NNOptimParams,
    NNSchedulerParams,
    Schedulers,
    supervised_objective,
)
from nnx.paradigms import EMA, SWA
from nnx.store.writer import RunWriter
from small_models import X, Y, feed_forward, loader, numbers, training


class ByHand(Callback):
    """The average, one update at a time."""

    def __init__(self, decay, warmup):
        self.decay, self.warmup, self.n = decay, warmup, 0

    def on_train_begin(self, ctx):
        self.average = [p.detach().clone() for p in ctx.model.net.parameters()]
        ctx.update_listeners.append(self.move)

    def move(self, ctx):
        self.n += 1
        d = min(self.decay, (1 + self.n) / (10 + self.n)) if self.warmup else self.decay
        for a, p in zip(self.average, ctx.model.net.parameters()):
            a.mul_(d).add_(p.detach(), alpha=1 - d)


@pytest.mark.parametrize("objective", [None, supervised_objective()], ids=["step", "objective"])
@pytest.mark.parametrize("warmup", [True, False])
def test_the_average_moves_by_the_formula_once_for_each_committed_update(objective, warmup):
    model, ema, hand = feed_forward(), EMA(0.9, warmup=warmup), ByHand(0.9, warmup)
    optim = NNOptimParams.builder().adamw(max_lr=1e-2).accumulate_grad(2).build()
    model.train(training(optim=optim), callbacks=[ema, hand], objective=objective)
    assert hand.n == 6  # four batches in windows of two, three epochs
    assert ema.updates == 7  # and the start
    for found, wanted in zip(ema.averaged.parameters(), hand.average):
        torch.testing.assert_close(found.detach(), wanted)


MAKERS = {
    "ema": lambda: EMA(0.9),
    "swa": lambda: SWA(1),
    "annealed": lambda: SWA(1, lr=0.03, anneal_epochs=3),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_resume_continues_the_average(make):
    whole, halves = make(), make()
    optim = NNOptimParams.builder().adamw(max_lr=1e-2).build()
    first = feed_forward()
    first.train(training(epochs=4, optim=optim, data_id="whole"), callbacks=[whole])
    params = training(epochs=2, optim=optim, data_id="half")
    run = feed_forward().train(params, callbacks=[make()])
    resumed = training(
        epochs=2, optim=optim, resume_from_run_id=run.id, resume_from_checkpoint="last"
    )
    second = feed_forward(seed=4)
    second.train(resumed, callbacks=[halves])
    for one, other in zip(first.net.parameters(), second.net.parameters()):
        assert torch.equal(one, other)
    assert whole.updates == halves.updates
    for one, other in zip(whole.averaged.parameters(), halves.averaged.parameters()):
        assert torch.equal(one, other)


def test_the_average_is_validated_stored_and_given_back():
    model, ema = feed_forward(dropout=0.0), EMA(0.5)
    val = loader(X, Y, batch=25, shuffle=False)
    run = model.train(training(val_loader=val), callbacks=[ema], eval_step_fn=ema.eval_step())
    own = [p.detach().clone() for p in model.net.parameters()]
    with ema.applied_to(model.net):
        assert model.evaluate(val).loss == pytest.approx(run.idps[-1].val_edp.loss)
    assert all(torch.equal(a, b) for a, b in zip(own, model.net.parameters()))
    stored = NNCheckpoint.load(run.id, "ema").net_state
    for name, value in ema.averaged.named_parameters():
        assert torch.equal(stored[name], value)
    best = NNCheckpoint.load(run.id, "ema_best").net_state
    assert set(best) == set(stored)


def test_the_plain_mean_is_over_the_ends_of_epochs():
    seen, swa = [], SWA(1)

    class Look(Callback):
        def on_epoch_end(self, ctx):
            seen.append([p.detach().clone() for p in ctx.model.net.parameters()])

    feed_forward().train(training(epochs=4), callbacks=[swa, Look()])
    for average, *parts in zip(swa.averaged.parameters(), *seen[1:]):
        torch.testing.assert_close(average.detach(), torch.stack(parts).mean(0))


def test_an_average_of_another_decay_is_refused_on_resume():
    run = feed_forward().train(training(), callbacks=[EMA(0.9)])
    resumed = training(resume_from_run_id=run.id, resume_from_checkpoint="last")
    with pytest.raises(ValueError, match=r"decay is 0\.5"):
        feed_forward().train(resumed, callbacks=[EMA(0.5)])
    for wrong in (1.0, -0.1, "x"):
        with pytest.raises(ValueError):
            EMA(wrong)
    with pytest.raises(RuntimeError, match="before training begins"):
        _ = EMA().averaged


@pytest.mark.parametrize("make", [lambda **o: EMA(0.5, **o), lambda **o: SWA(0, **o)])
def test_best_may_hold_the_average_that_validation_scored(make):
    model, average = feed_forward(dropout=0.0), make(best_tag="best")
    val = loader(X, Y, batch=25, shuffle=False)
    run = model.train(
        training(epochs=5, val_loader=val), callbacks=[average], eval_step_fn=average.eval_step()
    )
    records = [p.val_edp for p in run.idps if p.val_edp is not None]
    best = NNCheckpoint.load(run.id, "best")
    assert best.idp.val_edp.error == min(r.error for r in records)
    found = NNModel.from_checkpoint(best).evaluate(val)
    assert found.loss == pytest.approx(best.idp.val_edp.loss)
    assert not torch.equal(best.net_state["layers.0.weight"], model.net.layers[0].weight)


def test_an_epoch_that_did_not_improve_and_a_killed_commit_leave_best_as_it_was(monkeypatch):
    model, average = feed_forward(dropout=0.0), EMA(0.5, best_tag="best")
    errors = iter([0.5, 0.4, 0.6, 0.1])
    commit_tag = RunWriter.commit_tag

    def step(ctx):
        from nnx import NNEvaluationDataPoint

        return NNEvaluationDataPoint(error=next(errors))

    def fail(self, stem, checkpoint, **options):
        if stem == "best" and checkpoint.idp.epoch_idx == 3:
            raise OSError("the disk is full")
        commit_tag(self, stem, checkpoint, **options)

    monkeypatch.setattr(RunWriter, "commit_tag", fail)
    val, seen = loader(X, Y), []

    class Look(Callback):
        def on_epoch_end(self, ctx):
            seen.append((ctx.run.id, average.averaged.layers[0].weight.detach().clone()))

    with pytest.raises(OSError, match="disk is full"):
        model.train(
            training(epochs=4, val_loader=val), callbacks=[average, Look()], eval_step_fn=step
        )
    best = NNCheckpoint.load(seen[0][0], "best")
    assert best.idp.epoch_idx == 1
    assert torch.equal(best.net_state["layers.0.weight"], seen[1][1])


@pytest.mark.parametrize("strategy", ["cos", "linear"])
def test_the_rate_goes_to_that_of_the_average_as_torch_s_schedule_does(strategy):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    theirs = torch.optim.swa_utils.SWALR(
        optimizer, swa_lr=0.1, anneal_epochs=3, anneal_strategy=strategy
    )
    wanted = [0.5, 0.5]
    for _ in range(4):
        optimizer.step()
        theirs.step()
        wanted.append(optimizer.param_groups[0]["lr"])
    rates = LRMonitor()
    optim = NNOptimParams.builder().sgd(max_lr=0.5).build()
    swa = SWA(2, lr=0.1, anneal_epochs=3, strategy=strategy)
    feed_forward().train(training(epochs=6, optim=optim), callbacks=[swa, rates])
    assert rates.history == pytest.approx(wanted)


def with_batch_norm():
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
    )
    from nnx import Losses, NNModelParams, PositionalInputs

    params = NNModelParams(loss=Losses.CROSS_ENTROPY)
    return NNModel(module=net, params=params, batch_adapter=PositionalInputs(1))


def test_the_average_is_scored_and_stored_with_batch_statistics_of_its_own():
    model, val = with_batch_norm(), loader(X, Y, batch=25, shuffle=False)
    swa = SWA(0, refresh=loader(X, Y, batch=25, shuffle=False))
    run = model.train(training(val_loader=val), callbacks=[swa], eval_step_fn=swa.eval_step())
    hidden = swa.averaged[0](X).detach()
    means = torch.stack([hidden[:25].mean(0), hidden[25:].mean(0)]).mean(0)
    stored = NNCheckpoint.load(run.id, "swa").net_state
    torch.testing.assert_close(stored["1.running_mean"], means, rtol=1e-4, atol=1e-5)
    own = {name: value.clone() for name, value in model.net.state_dict().items()}
    assert not torch.equal(own["1.running_mean"], means)
    with swa.applied_to(model.net):
        assert model.evaluate(val).loss == pytest.approx(run.idps[-1].val_edp.loss)
    assert all(torch.equal(own[n], v) for n, v in model.net.state_dict().items())
    swa.refresh_batch_norm([numbers(1, 40, 6)])
    assert not torch.equal(dict(swa.averaged.named_buffers())["1.running_mean"], means)


def test_what_cannot_be_averaged_is_refused():
    for wrong in ({"lr": 0}, {"anneal_epochs": -1}, {"strategy": "step"}, {"start": -1}):
        with pytest.raises(ValueError):
            SWA(**wrong)
    schedule = NNSchedulerParams(
        kind=Schedulers.STEP, min_lr=0.0, factor=0.5, patience=1, cooldown=0, threshold=0.0,
        step_size=2, clock="optimizer_update",
    )  # fmt: skip
    with pytest.raises(ValueError, match="sets the learning rate at every update"):
        feed_forward().train(training(scheduler=schedule), callbacks=[SWA(1, lr=0.1)])
    assert not Path("runs").exists() or not list(Path("runs").glob("*/checkpoints"))
