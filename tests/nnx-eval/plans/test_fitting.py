"""A plan's fit is the script's, an attempt is a run, and a probe leaves nothing."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch
from made_plans import X, Y, net, plan, train_data, training, val_data
from nnx import (
    Callback,
    Losses,
    LRMonitor,
    Nets,
    NNModel,
    NNModelParams,
    NNRun,
    TaskSpec,
    set_seed,
)
from nnx.plans import PlanError
from torch.nn import functional as F


def same_weights(left, right) -> bool:
    theirs = right.net.state_dict()
    return all(torch.equal(value, theirs[name]) for name, value in left.net.state_dict().items())


def records(run):
    return [idp.state() for idp in run.idps]


def test_a_fit_is_the_equally_seeded_script() -> None:
    order = []

    class Noted(Callback):
        def on_epoch_end(self, ctx):
            order.append((ctx.epoch, random.random(), float(torch.rand(()))))

    fitted = plan(callback_factories=(Noted,)).fit()
    planned, order[:] = list(order), []
    set_seed(7)
    loader, validation = train_data(), val_data()
    callback = Noted()
    model = NNModel(net(), NNModelParams(net=Nets.FEED_FWD))
    run = model.train(
        training(seed=7, train_loader=loader, val_loader=validation), callbacks=[callback]
    )
    assert same_weights(fitted.model, model)
    assert records(fitted.run) == records(run)
    assert order == planned
    assert fitted.run.train.state() == run.train.state()
    assert isinstance(fitted.run, NNRun)


def test_every_fit_is_an_attempt_and_an_attempt_is_one_run() -> None:
    first, second = plan().fit(), plan().fit()
    assert first.run.id != second.run.id
    assert records(first.run) == records(second.run)
    assert first.run.salt == f"plan-attempt:{first.attempt_id}"
    named = plan().fit(attempt="a")
    assert named.attempt_id == "a"
    assert named.run.id == plan().run_id("a")
    with pytest.raises(FileExistsError):
        plan().fit(attempt="a")
    assert plan(seed=8).run_id("a") != plan().run_id("a")


def test_factories_run_once_per_fit_after_seeding_and_borrowed_objects_are_shared() -> None:
    made, shared = [], LRMonitor()

    def loader():
        made.append(random.random())
        return train_data()

    planned = plan(train_data=loader, callbacks=(shared,), callback_factories=(LRMonitor,))
    planned.fit()
    planned.fit()
    set_seed(7)
    assert made == [random.random()] * 2
    assert len(shared.history) == 6  # it accumulates


def test_metrics_are_those_of_the_last_epoch() -> None:
    fitted = plan(
        train=training(extra_metrics={"rows": lambda y, p: len(y)}), data_identity="data-1"
    ).fit()
    last = fitted.run.idps[-1]
    val, train = fitted.metrics["val"], fitted.metrics["train"]
    assert (val.available, val.epoch, val.source) == (True, 2, "epoch")
    assert val.values["nll"] == last.val_edp.metrics["nll"]
    assert val.values["extra/rows"] == 20
    assert (train.source, train.values["loss"]) == ("epoch", last.train_summary.loss)
    assert "extra/rows" not in train.values
    assert fitted.run.train.data_id == "data-1"

    alone = plan(val_data=None, train=training(metrics=(), monitor=None)).fit().metrics
    assert not alone["val"].available
    assert "no validation data" in alone["val"].reason
    assert alone["train"].source == "last_batch"


def test_a_stopped_plan_goes_on_to_the_planned_horizon_bit_for_bit() -> None:
    class StopAfterOne(Callback):
        def on_epoch_end(self, ctx):
            ctx.should_stop = ctx.epoch == 0

    whole = plan().fit()
    first = plan(callback_factories=(StopAfterOne,)).fit()
    before = sorted(os.listdir(f"runs/{first.run.id}"))
    second = plan().resuming(first.run.id, mode="stateful", epochs="planned").fit()
    assert [idp.epoch_idx for idp in second.run.idps] == [1] * 5 + [2] * 5
    assert same_weights(whole.model, second.model)
    assert records(whole.run)[5:] == records(second.run)
    assert second.run.train.parent_run_id or second.run.train.resume_from_run_id == first.run.id
    assert sorted(os.listdir(f"runs/{first.run.id}")) == before


def test_replicates_train_what_is_missing_and_go_on_with_what_was_interrupted() -> None:
    class Die(Callback):
        def on_epoch_begin(self, ctx):
            if ctx.epoch == 2:
                raise KeyboardInterrupt

    broken = plan(callback_factories=(Die,)).replicates([3])
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    replicates = plan().replicates([3, 4])
    assert replicates.missing() == (3, 4)
    assert set(replicates.run_ids()) == {3}
    runs = replicates.train()
    assert replicates.missing() == ()
    assert [idp.epoch_idx for idp in runs[3].idps] == [2] * 5  # only what was missing
    assert {i: run.id for i, run in replicates.train().items()} == dict(replicates.run_ids())
    assert runs[3].idps[-1].state() == plan(seed=3).fit().run.idps[-1].state()
    with pytest.raises(ValueError, match="each once"):
        plan().replicates([1, 1])


def test_a_probe_says_what_a_batch_gives() -> None:
    found = plan().probe((X[:5], Y[:5]))
    assert (found.output_shape, found.output_dtype, found.target_shape) == ((5, 2), "float32", (5,))
    assert (found.n_parameters, found.n_trainable) == (58, 58)
    set_seed(7)
    model = NNModel(net(dropout_prob=0.0), NNModelParams(net=Nets.FEED_FWD))
    wanted = float(F.cross_entropy(model.net(X[:5]), Y[:5]))
    assert plan(net=net(dropout_prob=0.0)).probe((X[:5], Y[:5])).loss == pytest.approx(wanted)
    for inputs in (X[:5], (X[:5],)):
        alone = plan().probe(inputs)
        assert (alone.output_shape, alone.target_shape, alone.loss) == ((5, 2), None, None)
    assert plan(objective=lambda ctx: None).probe((X[:5], Y[:5])).loss is None
    masked = NNModelParams(
        net=Nets.FEED_FWD, loss=Losses.CROSS_ENTROPY, task=TaskSpec.categorical(2, ignore_index=-1)
    )
    nothing = plan(model=masked).probe((X[:5], torch.full((5,), -1)))
    assert nothing.loss is None
    assert nothing.output_shape == (5, 2)


@pytest.mark.parametrize("batch", [(X[:5], Y[:5]), (X[:5, :3], Y[:5])], ids=["good", "bad"])
def test_a_probe_leaves_the_process_as_it_was(batch, monkeypatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setenv("PYTHONHASHSEED", "5")
    torch.backends.cudnn.benchmark = True

    def state():
        return (
            random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist(),
            torch.initial_seed(), torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled(),
            os.environ.get("PYTHONHASHSEED"), os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
            os.listdir(),
        )  # fmt: skip

    def explode():
        raise AssertionError("a probe calls no factory")

    before = state()
    probed = plan(train_data=explode, callback_factories=(explode,))
    try:
        probed.probe(batch)
    except (RuntimeError, ValueError) as error:
        assert batch[0].shape[1] == 3, error
    assert state() == before
    torch.backends.cudnn.benchmark = False
    with pytest.raises(PlanError, match="seed"):
        plan(seed=-1).probe(batch)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_group_of_ranks_is_refused_before_anything(ranks) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def explode():
        raise AssertionError("a factory was called")

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        if ranks == 1:
            assert plan().fit().run.idps
            return
        with pytest.raises(RuntimeError, match=r"a group of 2.*distributed=DDP\(\)"):
            plan(train_data=explode, seed=-1).fit()
        assert not os.path.exists("runs")
    finally:
        torch.distributed.destroy_process_group()
