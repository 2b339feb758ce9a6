"""A plan is a value: who owns the updates, what the optimizers are called, what the run will be."""

from __future__ import annotations

import copy
import dataclasses
import os

import pytest
import torch
from nnx import Losses, NNModel, NNModelParams, supervised_objective
from nnx.engine.optimizer_set import NamedOptimizers, OneOptimizer
from nnx.engine.owner import OwnerKind, UpdateOwner
from nnx.engine.plan import plan_fit
from nnx.engine.ranks import join
from nnx.engine.request import FitRequest
from nnx.engine.step import default_train_step


def borrowed() -> NNModel:
    return NNModel(module=torch.nn.Linear(3, 2), params=NNModelParams(loss=Losses.CROSS_ENTROPY))


def test_to_plan_a_fit_changes_nothing(kit, tmp_path, monkeypatch):
    """Not even the description of a borrowed module whose tensors are others by now."""
    monkeypatch.chdir(tmp_path)
    model = borrowed()
    model.net.scale = torch.nn.Parameter(torch.ones(1))
    described, streams = model.params, torch.get_rng_state()
    weights = copy.deepcopy(model.net.state_dict())
    request = FitRequest(model=model, params=kit.train_params(n_epochs=1))
    plan = plan_fit(request, join(request))
    assert model.params is described
    assert plan.model_params.net.describes(model.net)
    assert not described.net.describes(model.net)
    assert kit.same(weights, model.net.state_dict())
    assert torch.equal(streams, torch.get_rng_state())
    assert not os.listdir(tmp_path)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.run = None


def test_one_request_is_planned_alike_each_time(kit):
    request = FitRequest(model=kit.model(), params=kit.train_params(n_epochs=1))
    one, two = (plan_fit(request, join(request)) for _ in range(2))
    assert one.run.id == two.run.id
    assert (one.optims, one.schedules, one.precision) == (two.optims, two.schedules, two.precision)


def test_an_update_has_one_of_four_owners():
    def step(ctx): ...

    objective = supervised_objective()
    assert UpdateOwner.of(None, None) == UpdateOwner.of(default_train_step, None) == UpdateOwner()
    assert UpdateOwner.of(step, None) == UpdateOwner(OwnerKind.STEP_FUNCTION, step)
    trained = UpdateOwner.of(step, None, step=OwnerKind.TRAINER_STEP)
    assert (trained.kind, trained.step_fn, trained.objective) == (
        OwnerKind.TRAINER_STEP, step, None,
    )  # fmt: skip
    owner = UpdateOwner.of(None, objective)
    assert (owner.kind, owner.step_fn, owner.objective) == (OwnerKind.OBJECTIVE, None, objective)
    with pytest.raises(ValueError, match=r"either objective= or trainer_step_fn=, not both"):
        UpdateOwner.of(step, objective, step=OwnerKind.TRAINER_STEP)
    with pytest.raises(TypeError, match="train_step_fn must be callable, not int"):
        UpdateOwner.of(3, None)


def test_each_facade_reads_what_it_wrote_and_knows_the_other_ones():
    one, named = OneOptimizer(), NamedOptimizers(trainer=None)
    alone = {"default": {"optimizer_state": {"a": 1}, "optimizer_type": "torch.Adam"}}
    several = {"d": {"optimizer_state": {"a": 1}}, "g": {"optimizer_state": {"b": 2}}}
    packed = one.pack(alone)
    assert packed == {"optimizer_state": {"a": 1}, "optimizer_type": "torch.Adam"}
    assert one.unpack(packed)["default"]["optimizer_type"] == "torch.Adam"
    assert named.unpack(packed) is None
    packed = named.pack(several)
    assert packed == {"optimizers_state": {"d": {"a": 1}, "g": {"b": 2}}}
    assert named.unpack(packed)["g"]["optimizer_state"] == {"b": 2}
    assert one.unpack(packed) is None
