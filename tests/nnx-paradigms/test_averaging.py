"""Averages of weights."""

from __future__ import annotations

import pytest
import torch
from nnx import Callback, NNCheckpoint, NNOptimParams, supervised_objective
from nnx.paradigms import EMA, SWA
from small_models import X, Y, feed_forward, loader, training


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


@pytest.mark.parametrize("make", [lambda: EMA(0.9), lambda: SWA(1)], ids=["ema", "swa"])
def test_a_resume_continues_the_average(make):
    whole, halves = make(), make()
    feed_forward().train(training(epochs=4, data_id="whole"), callbacks=[whole])
    run = feed_forward().train(training(epochs=2, data_id="half"), callbacks=[make()])
    resumed = training(epochs=2, resume_from_run_id=run.id, resume_from_checkpoint="last")
    feed_forward(seed=4).train(resumed, callbacks=[halves])
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
