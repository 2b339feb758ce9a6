"""Functions that the caller brings: training steps, evaluation, objectives; and odd sources."""

from __future__ import annotations

import dataclasses
import io
import math
import sys
from pathlib import Path

import pytest
import torch
from nnx import (
    Callback,
    Checkpoints,
    EvalStepContext,
    Losses,
    NNCheckpoint,
    NNEvaluationDataPoint,
    NNModel,
    NNModelParams,
    NNParamGroupSpec,
    NNRun,
    PrecisionPolicy,
    TrainStepContext,
    default_train_step,
    set_seed,
    supervised_objective,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def at(hook, act):
    return type("At", (Callback,), {hook: lambda self, *args: act(*args)})()


# train_step_fn --------------------------------------------------------------------------------


def test_a_step_function_owns_its_update_and_sees_the_knobs(kit):
    contexts = []

    def step(ctx):
        contexts.append(ctx)
        ctx.model.net.train()
        x, y = ctx.batch
        ctx.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ctx.model.net(x), y)
        loss.backward()
        ctx.optimizer.step()
        return NNEvaluationDataPoint(loss=loss.item(), error=loss.item(), extra={"half": 0.5})

    ours, theirs = kit.model(), kit.model()
    optim = kit.adam(grad_clip_norm=2.0, accumulate_grad_batches=3)
    metrics = {"one": lambda y, p: 1.0}
    run = ours.train(
        kit.train_params(n_epochs=1, optim=optim, extra_metrics=metrics, val_loader=None),
        train_step_fn=step,
    )
    set_seed(7)
    optimizer = torch.optim.Adam(theirs.net.parameters(), lr=0.01)
    theirs.net.train()
    for x, y in kit.loader():
        optimizer.zero_grad()
        nn.functional.cross_entropy(theirs.net(x), y).backward()
        optimizer.step()
    assert kit.same(ours.net.state_dict(), theirs.net.state_dict())
    assert [c.batch_idx for c in contexts] == list(range(6))
    assert [c.is_last_batch for c in contexts] == [False] * 5 + [True]
    first = contexts[0]
    assert (first.grad_clip_norm, first.accumulate_grad_batches, first.scaler) == (2.0, 3, None)
    assert first.extra_metrics == metrics
    assert not first.precision.reduced
    assert run.idps[0].train_edp.extra == {"half": 0.5}
    assert NNRun.load(run.id).idps[0].train_edp.extra == {"half": 0.5}


def test_delegating_to_the_default_step_is_the_default_step(kit):
    optim = kit.adam(accumulate_grad_batches=4, grad_clip_norm=0.5)
    plain, wrapped = kit.model(), kit.model()
    a = plain.train(kit.train_params(n_epochs=2, optim=optim, data_id="plain"))
    b = wrapped.train(
        kit.train_params(n_epochs=2, optim=optim), train_step_fn=lambda ctx: default_train_step(ctx)
    )
    assert kit.same(plain.net.state_dict(), wrapped.net.state_dict())
    assert [i.train_edp.state() for i in a.idps] == [i.train_edp.state() for i in b.idps]


def test_the_default_step_works_outside_a_run(kit):
    """Uneven microbatches of one window make the update of their union."""
    x, y = kit.blobs(21)
    window, whole = kit.model(dropout=0.0), kit.model(dropout=0.0)
    optimizer = torch.optim.SGD(window.net.parameters(), lr=0.1)
    reported = []
    for index, rows in enumerate((slice(0, 16), slice(16, 20), slice(20, 21))):
        record = default_train_step(
            TrainStepContext(
                model=window, batch=(x[rows], y[rows]), optimizer=optimizer, scaler=None,
                grad_clip_norm=None, extra_metrics=None, accumulate_grad_batches=8,
                batch_idx=index, epoch_idx=0, is_last_batch=index == 2,
                report_update=lambda: reported.append(1),
            )
        )  # fmt: skip
        assert record.loss is not None
    reference = torch.optim.SGD(whole.net.parameters(), lr=0.1)
    nn.functional.cross_entropy(whole.net(x), y).backward()
    reference.step()
    assert reported == [1]
    for name, value in whole.net.state_dict().items():
        torch.testing.assert_close(window.net.state_dict()[name], value)


def test_a_step_may_change_the_knobs_of_the_default_step(kit):
    """Clipping for the first epoch only, and an optimizer of its own in the last batch."""
    ours, theirs = kit.model(dropout=0.0), kit.model(dropout=0.0)
    own = torch.optim.SGD(ours.net.parameters(), lr=0.5)

    def step(ctx):
        change = {"grad_clip_norm": 0.01} if ctx.epoch_idx == 0 else {}
        if ctx.epoch_idx == 1 and ctx.is_last_batch:
            change["optimizer"] = own
        return default_train_step(dataclasses.replace(ctx, **change))

    ours.train(kit.train_params(n_epochs=2, val_loader=None), train_step_fn=step)
    set_seed(7)
    adam = torch.optim.Adam(theirs.net.parameters(), lr=0.01)
    sgd = torch.optim.SGD(theirs.net.parameters(), lr=0.5)
    loader = kit.loader()
    for epoch in range(2):
        for index, (x, y) in enumerate(loader):
            optimizer = sgd if (epoch, index) == (1, 5) else adam
            optimizer.zero_grad()
            nn.functional.cross_entropy(theirs.net(x), y).backward()
            if epoch == 0:
                nn.utils.clip_grad_norm_(theirs.net.parameters(), 0.01)
            optimizer.step()
    assert kit.same(ours.net.state_dict(), theirs.net.state_dict())


def test_a_step_function_owns_the_mode(kit):
    model = kit.model()
    model.net.eval()
    modes = []

    def step(ctx):
        modes.append(ctx.model.net.training)
        return NNEvaluationDataPoint(loss=0.0)

    model.train(kit.train_params(n_epochs=2), train_step_fn=step)
    assert set(modes) == {False}


@pytest.mark.parametrize("returned", [None, 0.5, {"loss": 1.0}])
def test_a_step_must_return_a_record(kit, returned):
    with pytest.raises(TypeError, match="must return an NNEvaluationDataPoint"):
        kit.model().train(kit.train_params(), train_step_fn=lambda ctx: returned)
    assert not [p for p in Path("runs").iterdir() if not p.name.startswith(".")]


def test_an_autoencoder_trains_without_labels(kit):
    net = nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 6))
    model = NNModel(module=net, params=NNModelParams(loss=Losses.MEAN_SQUARED_ERROR))

    def step(ctx):
        x = ctx.batch[0]
        ctx.optimizer.zero_grad()
        loss = nn.functional.mse_loss(ctx.model.net(x), x)
        loss.backward()
        ctx.optimizer.step()
        return NNEvaluationDataPoint(loss=loss.item(), error=loss.item())

    run = model.train(kit.train_params(n_epochs=10, val_loader=None), train_step_fn=step)
    assert run.idps[-1].train_edp.loss < run.idps[0].train_edp.loss
    assert NNCheckpoint.load(run=run.id, type=Checkpoints.BEST) is not None


# eval_step_fn -----------------------------------------------------------------------------------


def test_an_evaluation_of_ones_own_runs_once_per_epoch_without_gradients(kit):
    seen = []

    def evaluate(ctx):
        assert isinstance(ctx, EvalStepContext)
        seen.append((ctx.epoch_idx, torch.is_grad_enabled(), ctx.model.net.training))
        assert ctx.val_loader is params.val_loader
        return NNEvaluationDataPoint(loss=1.0 / (1 + ctx.epoch_idx), extra={"rmse": 0.25})

    params = kit.train_params(n_epochs=3)
    model = kit.model()
    run = model.train(params, eval_step_fn=evaluate)
    assert seen == [(0, False, False), (1, False, False), (2, False, False)]
    assert [i.val_edp.extra for i in run.idps if i.val_edp] == [{"rmse": 0.25}] * 3
    assert NNCheckpoint.load(run=run.id, type=Checkpoints.BEST).idp.epoch_idx == 2
    with pytest.raises(TypeError, match="eval_step_fn must return"):
        kit.model().train(kit.train_params(data_id="bad"), eval_step_fn=lambda ctx: 0.1)


def test_best_passes_over_values_that_are_not_finite_and_says_so(kit):
    values = {0: (math.nan, 0.5), 1: (0.4, 0.9), 2: (math.nan, math.inf)}

    def evaluate(ctx):
        error, loss = values[ctx.epoch_idx]
        return NNEvaluationDataPoint(error=error, loss=loss)

    with pytest.warns(RuntimeWarning) as caught:
        run = kit.model().train(kit.train_params(n_epochs=3), eval_step_fn=evaluate)
    messages = [str(w.message) for w in caught if "is not finite" in str(w.message)]
    assert len(messages) == 2
    assert "val_edp.error=nan" in messages[0]
    assert "used val_edp.loss=0.5" in messages[0]
    assert "used train_edp.error" in messages[1]
    best = NNCheckpoint.load(run=run.id, type=Checkpoints.BEST)
    assert best.idp.epoch_idx == 1  # an epoch whose loss is not finite is never the best
    assert math.isnan(run.idps[5].val_edp.error)


def test_an_epoch_without_any_finite_value_is_no_decision(kit):
    def step(ctx):
        return NNEvaluationDataPoint(loss=math.nan)

    with pytest.warns(RuntimeWarning, match="no metric available"):
        run = kit.model().train(kit.train_params(n_epochs=1, val_loader=None), train_step_fn=step)
    assert NNCheckpoint.load(run=run.id, type=Checkpoints.BEST) is None


# Sources ------------------------------------------------------------------------------------------


class Growing:
    """Yields one batch more in every epoch and lies about its length."""

    def __init__(self, kit, start=2, claims=3):
        self.batches, self.count, self.claims = list(kit.loader(160)), start, claims

    def __len__(self):
        return self.claims

    def __iter__(self):
        self.count += 1
        return iter(self.batches[: self.count - 1])


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("how", ["default", "objective", "delegating"])
def test_a_source_that_changes_its_length(kit, accumulate, how):
    """Every batch trains, and a window that the epoch cut short is still closed."""
    arguments = {
        "default": {},
        "objective": {"objective": supervised_objective()},
        "delegating": {"train_step_fn": lambda ctx: default_train_step(ctx)},
    }[how]
    updates = []
    run = kit.model().train(
        kit.train_params(
            n_epochs=3,
            train_loader=Growing(kit),
            optim=kit.adam(accumulate_grad_batches=accumulate),
        ),
        callbacks=[at("on_epoch_end", lambda ctx: updates.append(ctx.committed_updates))],
        **arguments,
    )
    assert [i.epoch_idx for i in run.idps] == [0] * 2 + [1] * 3 + [2] * 4
    # at accumulation 4: a window cut short, one closed at the claimed length, one more after it
    assert updates == ([2, 5, 9] if accumulate == 1 else [1, 2, 4])


def test_a_source_that_runs_dry_keeps_what_was_committed(kit):
    class Dry(Growing):
        def __iter__(self):
            self.count -= 1
            return iter(self.batches[: self.count])

    with pytest.raises(ValueError, match="no batches in epoch 1"):
        kit.model().train(kit.train_params(n_epochs=3, train_loader=Dry(kit)))
    name = next(p.name for p in Path("runs").iterdir() if p.name[0] != "." and p.name != "best")
    assert NNRun.load(name).idps[-1].epoch_idx == 0


def test_an_empty_source_without_length_leaves_no_run(kit):
    class Nothing:
        def __iter__(self):
            return iter(())

    with pytest.raises(ValueError, match="no batches in epoch 0"):
        kit.model().train(kit.train_params(train_loader=Nothing()))
    assert not [p for p in Path("runs").iterdir() if not p.name.startswith(".")]


def test_a_batch_without_a_target_is_named(kit):
    loader = DataLoader(TensorDataset(torch.randn(8, 6)), batch_size=4)
    with pytest.raises(ValueError, match=r"target|unpack"):
        kit.model().train(kit.train_params(train_loader=loader))


def test_set_epoch_is_told_to_the_loader_or_its_sampler(kit):
    told = []

    class Sampler(torch.utils.data.RandomSampler):
        def set_epoch(self, epoch):
            told.append(epoch)

    dataset = TensorDataset(*kit.blobs())
    loader = DataLoader(dataset, batch_size=16, sampler=Sampler(dataset))
    kit.model().train(kit.train_params(n_epochs=3, train_loader=loader))
    assert told == [0, 1, 2]


def test_a_source_without_length_is_looked_ahead_only_for_a_step_that_needs_it(kit):
    class NoLength:
        def __iter__(self):
            return iter(kit.loader())

    seen = []

    def step(ctx):
        seen.append(ctx.is_last_batch)
        return default_train_step(ctx)

    known, unknown = kit.model(), kit.model()
    known.train(kit.train_params(n_epochs=1), train_step_fn=step)
    unknown.train(
        kit.train_params(n_epochs=1, train_loader=NoLength(), data_id="b"), train_step_fn=step
    )
    assert seen == ([False] * 5 + [True]) * 2
    assert kit.same(known.net.state_dict(), unknown.net.state_dict())


# Freezing, precision, progress ----------------------------------------------------------------------


def test_parameters_unfrozen_between_epochs_begin_to_train(kit):
    model = kit.model()
    model.freeze("layers.0.*")
    frozen = model.net.layers[0].weight.detach().clone()
    seen = []

    def thaw(ctx):
        seen.append(torch.equal(frozen, ctx.model.net.layers[0].weight))
        ctx.model.unfreeze("layers.0.*")

    model.train(kit.train_params(n_epochs=2), callbacks=[at("on_epoch_end", thaw)])
    assert seen == [True, False]


def test_unfreezing_what_no_optimizer_owns_trains_nothing_and_warns_once(kit):
    model = kit.model()
    model.freeze("layers.0.*")
    before = model.net.layers[0].weight.detach().clone()
    params = kit.train_params(
        n_epochs=3, optim=kit.adam(param_groups=[NNParamGroupSpec(name_pattern="*")])
    )
    with pytest.warns(RuntimeWarning, match=r"no optimizer owns layers\.0\.weight") as caught:
        model.train(
            params, callbacks=[at("on_epoch_end", lambda ctx: ctx.model.unfreeze("layers.0.*"))]
        )
    assert torch.equal(before, model.net.layers[0].weight)
    assert len([w for w in caught if "no optimizer owns" in str(w.message)]) == 1


def test_a_reduced_run_is_its_hand_written_loop(kit):
    ours, theirs = kit.model(precision=PrecisionPolicy(mode="bf16")), kit.model()
    run = ours.train(kit.train_params(n_epochs=1))
    set_seed(7)
    optimizer = torch.optim.Adam(theirs.net.parameters(), lr=0.01)
    theirs.net.train()
    for x, y in kit.loader():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = theirs.net(x)
        nn.functional.cross_entropy(out.float(), y).backward()
        optimizer.step()
    assert kit.same(ours.net.state_dict(), theirs.net.state_dict())
    assert run.precision.effective == "bf16"
    assert NNRun.load(run.id).precision.effective == "bf16"


def test_the_bar_shows_on_a_terminal_and_can_be_switched_off(kit, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    def drawn(**environment):
        monkeypatch.setattr(sys, "stderr", screen := Terminal())
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        kit.model().train(kit.train_params(n_epochs=2), salt=f"{environment}")
        return screen.getvalue()

    text = drawn(NNX_TQDM_DISABLE="0")
    assert "epoch 2/2" in text
    assert "12/12" in text
    assert "val_loss" in text
    assert drawn(NNX_TQDM_DISABLE="1") == ""
    monkeypatch.setenv("NNX_TQDM_DISABLE", "0")
    monkeypatch.setattr(sys, "stderr", quiet := io.StringIO())
    kit.model().train(kit.train_params(n_epochs=1))
    assert quiet.getvalue() == ""
