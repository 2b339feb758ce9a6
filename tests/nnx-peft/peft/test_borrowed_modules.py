"""A module of one's own that is adapted after it became a model."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from nnx import (
    Checkpoints,
    Losses,
    NNCheckpoint,
    NNModel,
    NNModelParams,
    apply_lora_to,
    load_lora_weights,
    save_lora_weights,
)
from nnx.peft import merge_adapters
from nnx.provenance import ExperimentManifest
from nnx.transforms import TransformRecipe, lora
from torch import nn


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(32, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def own():
    torch.manual_seed(0)
    return Own()


def adapted():
    module = own()
    apply_lora_to(module, "body", r=2, freeze_base=True, modules_to_save=["head"])
    return module


def model_of(module):
    return NNModel(module=module, params=NNModelParams(loss=Losses.CROSS_ENTROPY))


def test_a_module_adapted_after_it_became_a_model_loads_with_an_adapted_one(kit):
    model = model_of(own())
    apply_lora_to(model.net, "body", r=2, freeze_base=True, modules_to_save=["head"])
    run = model.train(kit.train_params())
    checkpoint = NNCheckpoint.load(run.id, Checkpoints.LAST)
    loaded = NNModel.from_checkpoint(checkpoint, module=adapted())
    x = torch.randn(4, 32)
    assert torch.equal(loaded.net.eval()(x), model.net.eval()(x))
    with pytest.raises(ValueError, match="build it with the same layers, adapters"):
        NNModel.from_checkpoint(checkpoint, module=own())


def test_its_run_is_that_of_a_module_adapted_before(kit):
    after, before, plain = model_of(own()), model_of(adapted()), model_of(own())
    apply_lora_to(after.net, "body", r=2, freeze_base=True, modules_to_save=["head"])
    params = kit.train_params(n_epochs=1)
    ids = [m.train(params, salt="x").id for m in (after, plain)]
    assert ids[0] != ids[1]
    with pytest.raises(FileExistsError, match=ids[0][:8]):
        before.train(params, salt="x")
    assert ExperimentManifest.for_model(after) == ExperimentManifest.for_model(before)


def test_it_resumes(kit):
    def wrapped():
        model = model_of(own())
        apply_lora_to(model.net, "body", r=2, freeze_base=True)
        return model

    whole = wrapped()
    torch.manual_seed(0)
    whole.train(kit.train_params(n_epochs=3), salt="whole")
    half = wrapped()
    run = half.train(kit.train_params(n_epochs=1))
    rest = wrapped()
    rest.train(kit.train_params(n_epochs=2, resume_from_run_id=run.id))
    assert kit.same(whole.net.state_dict(), rest.net.state_dict())


def test_a_lazy_layer_that_took_its_shape_is_no_other_module(kit):
    lazy = lambda: nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 3))  # noqa: E731
    model = model_of(lazy())
    model.net(torch.zeros(1, 32))
    run = model.train(kit.train_params(n_epochs=1))
    assert run.model.net == model_of(lazy()).params.net
    NNModel.from_checkpoint(NNCheckpoint.load(run.id, Checkpoints.LAST), module=lazy())


def test_the_guides_way_keeps_what_was_trained(kit, tmp_path):
    """Pretrain, adapt with a new head, store the adapter, put it on a fresh base."""
    model = model_of(own())
    model.train(kit.train_params())
    base = {k: v.clone() for k, v in model.net.state_dict().items()}
    apply_lora_to(model.net, "body", r=2, freeze_base=True, modules_to_save=["head"])
    model.train(kit.train_params(n_epochs=8), salt="adapted")
    path = save_lora_weights(model.net, tmp_path / "lora.pt")
    scores = model.evaluate(kit.data(shuffle=False))

    again = model_of(own())
    again.net.load_state_dict(base)
    apply_lora_to(again.net, "body", r=2, freeze_base=True, modules_to_save=["head"])
    load_lora_weights(again.net, path)
    assert again.evaluate(kit.data(shuffle=False)) == scores
    merge_adapters(again.net)
    assert again.evaluate(kit.data(shuffle=False)).accuracy == scores.accuracy


def test_a_recorded_transform_is_not_replayed_on_a_callers_instance(kit):
    checkpoint = NNCheckpoint.load(
        model_of(own()).train(kit.train_params(n_epochs=1)).id, Checkpoints.LAST
    )
    recorded = dataclasses.replace(
        checkpoint, transforms=lora_recipe("body").checkpoint_transforms()
    )
    module = own()
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(ValueError, match="records lora, which is replayed on a net that a factory"):
        NNModel.from_checkpoint(recorded, module=module)
    assert type(module.body) is nn.Linear
    assert kit.same(module.state_dict(), before)


def lora_recipe(target):
    return TransformRecipe((lora(target, r=2),))
