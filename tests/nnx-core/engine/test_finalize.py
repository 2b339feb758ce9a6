"""Imperative steps that leave the tail of their update to ``finalize_step``."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from nnx import (
    Callback,
    NNEvaluationDataPoint,
    NNOptimParams,
    NNSchedulerParams,
    Optims,
    PrecisionPolicy,
    Schedulers,
    default_train_step,
    set_seed,
)
from nnx.engine.finalize import finalize_step
from torch.nn import functional as F


def step(ctx):
    x, y = ctx.batch
    logits = ctx.model.net(x)
    loss = F.cross_entropy(logits, y) + 0.1 * logits.square().mean()
    value = finalize_step(ctx, loss)
    return NNEvaluationDataPoint(loss=value, error=value)


def sgd(**fields):
    return NNOptimParams(name=Optims.SGD, max_lr=0.05, weight_decay=0.0, momentum=0.9, **fields)


def test_it_is_the_tail_of_a_plain_loop_bit_for_bit(kit):
    ours, plain = kit.model(dropout=0.0), kit.model(dropout=0.0)
    run = ours.train(
        kit.train_params(2, val_loader=None, optim=sgd(grad_clip_norm=0.3)), train_step_fn=step
    )
    set_seed(7)
    optimizer = torch.optim.SGD(plain.net.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(2):
        plain.net.train()
        for x, y in kit.loader():
            optimizer.zero_grad()
            logits = plain.net(x)
            loss = F.cross_entropy(logits, y) + 0.1 * logits.square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(plain.net.parameters(), 0.3)
            optimizer.step()
            losses.append(loss.item())
    assert kit.same(ours.net.state_dict(), plain.net.state_dict())
    assert [idp.train_edp.loss for idp in run.idps] == losses


def test_it_reports_one_update_per_batch(kit):
    counts, rates = [], []

    class Listens(Callback):
        def on_train_begin(self, ctx):
            ctx.update_listeners.append(lambda: counts.append(ctx.committed_updates))

        def on_epoch_end(self, ctx):
            rates.append(ctx.optimizer.param_groups[0]["lr"])

    schedule = NNSchedulerParams(
        min_lr=0.0, factor=0.5, patience=1, cooldown=0, threshold=0.0,
        kind=Schedulers.STEP, step_size=3, clock="optimizer_update",
    )  # fmt: skip
    kit.model().train(
        kit.train_params(1, optim=sgd(), scheduler=schedule),
        train_step_fn=step, callbacks=[Listens()],
    )  # fmt: skip
    assert counts == [1, 2, 3, 4, 5, 6]
    assert rates == [0.05 * 0.5**2]


def test_a_diverged_loss_raises_before_anything_is_stepped(kit):
    m = kit.model()
    before = [p.clone() for p in m.net.parameters()]

    def diverges(ctx):
        finalize_step(ctx, m.net(ctx.batch[0]).sum() * math.inf)

    with pytest.raises(FloatingPointError, match="epoch 0, batch 0; nothing was back-propagated"):
        m.train(kit.train_params(1, optim=sgd()), train_step_fn=diverges)
    assert all(torch.equal(a, b) for a, b in zip(before, m.net.parameters()))


@pytest.mark.parametrize(
    ("model_fields", "optim_fields", "message"),
    [
        ({}, {"accumulate_grad_batches": 2}, "does not handle gradient accumulation"),
        ({"precision": PrecisionPolicy("bf16")}, {}, "does not handle a reduced precision"),
    ],
)
def test_what_it_cannot_honour_is_refused(kit, model_fields, optim_fields, message):
    m = kit.model(**model_fields)
    with pytest.raises(ValueError, match=message):
        m.train(kit.train_params(1, optim=sgd(**optim_fields)), train_step_fn=step)


# -- delegating to the default step ----------------------------------------------------------


def test_a_context_changed_before_delegating_is_honoured(kit):
    """A step that tightens the clipping and augments its batch, by hand and by delegation."""

    def delegates(ctx):
        x, y = ctx.batch
        changed = dataclasses.replace(ctx, batch=(x * 2, y), grad_clip_norm=0.01)
        return default_train_step(changed)

    ours, plain = kit.model(dropout=0.0), kit.model(dropout=0.0)
    ours.train(kit.train_params(1, val_loader=None, optim=sgd()), train_step_fn=delegates)
    set_seed(7)
    optimizer = torch.optim.SGD(plain.net.parameters(), lr=0.05, momentum=0.9)
    for x, y in kit.loader():
        optimizer.zero_grad()
        F.cross_entropy(plain.net(x * 2), y).backward()
        torch.nn.utils.clip_grad_norm_(plain.net.parameters(), 0.01)
        optimizer.step()
    assert kit.same(ours.net.state_dict(), plain.net.state_dict())


def test_the_helper_of_the_first_releases_takes_the_loss_first(kit):
    from nnx._step_helpers import finalize_step as loss_first

    def make(finish):
        def step(ctx):
            x, y = ctx.batch
            ctx.model.net.train()
            ctx.optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(ctx.model.net(x), y)
            return NNEvaluationDataPoint(loss=finish(ctx, loss))

        return step

    one, two = kit.model(), kit.model()
    a = one.train(kit.train_params(n_epochs=1), train_step_fn=make(finalize_step))
    b = two.train(
        kit.train_params(n_epochs=1),
        salt="b",
        train_step_fn=make(lambda ctx, loss: loss_first(loss, ctx)),
    )
    assert kit.same(one.net.state_dict(), two.net.state_dict())
    assert [i.train_edp.loss for i in a.idps] == [i.train_edp.loss for i in b.idps]
