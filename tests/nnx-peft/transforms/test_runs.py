"""Recipes, adapters, surgery and masks in real runs: ids, checkpoints, resumes, refusals."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import threading

import pytest
import torch
from nnx import (
    Callback,
    Checkpoints,
    Losses,
    ModelCheckpoint,
    ModelSpec,
    NNCheckpoint,
    NNModel,
    NNModelParams,
    NNRun,
    NNTrainerParams,
    Trainer,
    apply_lora_to,
    deepen,
    register_model_factory,
    save_lora_weights,
    unregister_model_factory,
    widen,
)
from nnx.peft import LoRALinear, add_adapter, merge_adapters, unmerge_adapters
from nnx.prune import magnitude_prune
from nnx.surgery import low_rank_factorize
from nnx.transforms import RecipeError, TransformRecipe, check_optimizer, lora, low_rank
from torch import nn

RECIPE = TransformRecipe(
    (lora("layers.0", r=2, alpha=4.0, dropout=0.1), low_rank("layers.1", rank=4))
)


def adapted(kit, recipe=RECIPE, **options):
    model = recipe.materialize(kit.model(**options))
    return model


def outputs(model):
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(3))
    return torch.as_tensor(model.predict(x).logits)


def runs_on_disk():
    return sorted(os.listdir("runs")) if os.path.isdir("runs") else []


class TestAdaptersWithoutARecord:
    def test_pretrain_wrap_finetune_leaves_the_base_bit_identical(self, kit, tmp_path):
        model = kit.model()
        model.train(kit.train_params())
        base = kit.weights(model.net)
        assert apply_lora_to(model.net, "layers.*", r=4, alpha=8.0) == 3
        before = outputs(model)
        model.train(kit.train_params(), salt="finetune")
        after = {k.replace(".base.", "."): v for k, v in model.net.state_dict().items()}
        assert all(torch.equal(after[k], v) for k, v in base.items())
        assert not torch.equal(outputs(model), before)
        save_lora_weights(model.net, tmp_path / "lora.pt")

    def test_inference_restores_every_wrappers_mode(self, kit):
        model = kit.model()
        apply_lora_to(model.net, "layers.*", r=2, dropout=0.5)
        model.net.train()
        model.net.layers[0].eval()
        modes = [m.training for m in model.net.modules()]
        assert torch.equal(outputs(model), outputs(model))
        model.evaluate(kit.data(shuffle=False))
        assert [m.training for m in model.net.modules()] == modes

    def test_a_merged_model_predicts_alike_and_training_it_trains_its_adapters(self, kit):
        model = adapted(kit)
        model.train(kit.train_params())
        before = outputs(model)
        merge_adapters(model.net)
        torch.testing.assert_close(outputs(model), before)
        assert model.net.layers[0].merged
        matrix = model.net.layers[0].lora_B.detach().clone()
        base = model.net.state_dict()["layers.0.base.weight"].clone()
        model.train(kit.train_params(), salt="more")
        assert not torch.equal(model.net.layers[0].lora_B, matrix)
        assert torch.equal(model.net.layers[0].base.weight, base)

    def test_a_net_merged_in_training_mode_stays_merged_while_it_is_borrowed(self, kit):
        model = kit.model()
        apply_lora_to(model.net, "layers.*", r=2, freeze_base=True)
        model.train(kit.train_params())
        assert model.net.training
        modes = [m.training for m in model.net.modules()]
        merge_adapters(model.net)
        wrappers = [m for m in model.net.modules() if isinstance(m, LoRALinear)]
        model.predict(torch.randn(2, 32))
        model.evaluate(kit.data())
        assert [layer.merged for layer in wrappers] == [True] * 3
        unmerge_adapters(model.net)
        assert [m.training for m in model.net.modules()] == modes
        merge_adapters(model.net)
        model.net.train()
        assert [layer.merged for layer in wrappers] == [False] * 3

    def test_a_supervised_step_switches_dropout_on(self, kit):
        model = kit.model()
        model.net.eval()
        apply_lora_to(model.net, "layers.0", r=2, dropout=0.5)
        model.train(kit.train_params(n_epochs=1))
        assert model.net.layers[0].lora_B.abs().sum() > 0


class TestTheRun:
    def test_the_recipe_is_part_of_the_run_and_of_its_id(self, kit):
        plain = kit.model().train(kit.train_params())
        run = adapted(kit).train(kit.train_params())
        assert run.id != plain.id
        assert run.transforms == RECIPE.checkpoint_transforms()
        assert plain.transforms == ()
        state = {k: v for k, v in run.state().items() if k != "id"}
        assert "transforms" in state
        assert hashlib.md5(str(state).encode()).hexdigest() == run.id
        del state["transforms"]
        assert hashlib.md5(str(state).encode()).hexdigest() == plain.id
        assert NNRun.load(run.id).transforms == run.transforms
        assert NNRun.load(run.id).id == run.id

    def test_another_recipe_is_another_run(self, kit):
        one = adapted(kit, TransformRecipe((lora("layers.0", r=2),))).train(kit.train_params())
        two = adapted(kit, TransformRecipe((lora("layers.0", r=3),))).train(kit.train_params())
        assert one.id != two.id

    def test_every_checkpoint_carries_it_and_rebuilds_the_model(self, kit):
        model = adapted(kit)
        run = model.train(kit.train_params(n_epochs=8), callbacks=[ModelCheckpoint(epochs=[3, 7])])
        tags = [NNCheckpoint.load(run.id, tag) for tag in Checkpoints]
        assert all(c.transforms == RECIPE.checkpoint_transforms() for c in tags)
        folder = f"runs/{run.id}/checkpoints"
        snapshots = [f for f in os.listdir(folder) if "_e" in f and f.endswith(".pt")]
        assert snapshots
        for file in snapshots:
            snapshot = NNCheckpoint.from_file(f"{folder}/{file}")
            assert snapshot.transforms == RECIPE.checkpoint_transforms()
        last = NNCheckpoint.load(run.id, Checkpoints.LAST)
        rebuilt = NNModel.from_checkpoint(last)
        assert torch.equal(outputs(rebuilt), outputs(model))
        assert rebuilt.transforms == model.transforms
        assert kit.same(rebuilt.net.state_dict(), model.net.state_dict())

    @pytest.mark.parametrize("format", ["pickle", "safetensors"])
    def test_both_file_formats_keep_it(self, kit, format, tmp_path):
        model = adapted(kit)
        run = model.train(kit.train_params())
        path = str(tmp_path / f"c.{format}")
        NNCheckpoint.load(run.id, Checkpoints.LAST).to_file(path, format=format)
        rebuilt = NNModel.from_checkpoint(NNCheckpoint.from_file(path))
        assert torch.equal(outputs(rebuilt), outputs(model))

    def test_a_rebuild_runs_no_svd_and_moves_no_stream(self, kit, monkeypatch):
        run = adapted(kit).train(kit.train_params())
        checkpoint = NNCheckpoint.load(run.id, Checkpoints.LAST)

        def no_svd(*_, **__):
            raise AssertionError("replay ran an SVD")

        monkeypatch.setattr(torch.linalg, "svd", no_svd)
        state = torch.get_rng_state()
        NNModel.from_checkpoint(checkpoint)
        assert torch.equal(torch.get_rng_state(), state)

    def test_a_rebuilt_model_trains_on_under_the_same_recipe(self, kit):
        run = adapted(kit).train(kit.train_params())
        rebuilt = NNModel.from_checkpoint(NNCheckpoint.load(run.id, Checkpoints.LAST))
        again = rebuilt.train(kit.train_params(), salt="again")
        assert again.transforms == run.transforms

    def test_an_unknown_operation_is_refused_before_a_tensor_is_loaded(self, kit):
        run = adapted(kit).train(kit.train_params())
        checkpoint = NNCheckpoint.load(run.id, Checkpoints.LAST)
        odd = dataclasses.replace(checkpoint.transforms[0], name="acme.rotate")
        with pytest.raises(LookupError, match=r"acme\.rotate@v1"):
            NNModel.from_checkpoint(dataclasses.replace(checkpoint, transforms=(odd,)))


class TestResume:
    def test_a_resumed_run_equals_the_uninterrupted_one(self, kit):
        whole = adapted(kit)
        whole.train(kit.train_params(n_epochs=4))
        first = adapted(kit).train(kit.train_params(n_epochs=2))
        second = adapted(kit, seed=5)
        second.train(kit.train_params(n_epochs=2, resume_from_run_id=first.id))
        assert kit.same(second.net.state_dict(), whole.net.state_dict())

    @pytest.mark.parametrize(
        "recipe", [None, TransformRecipe((lora("layers.0", r=2, alpha=5.0, dropout=0.1),))]
    )
    def test_a_model_without_the_same_recipe_is_refused_untouched(self, kit, recipe):
        first = adapted(kit).train(kit.train_params())
        model = kit.model() if recipe is None else adapted(kit, recipe)
        before, disk = kit.weights(model.net), runs_on_disk()
        with pytest.raises(ValueError, match="materialize the same recipe"):
            model.train(kit.train_params(resume_from_run_id=first.id))
        assert kit.same(model.net.state_dict(), before)
        assert runs_on_disk() == disk


class TestRefusals:
    def test_unrecorded_low_rank_factors_are_refused_before_a_run_exists(self, kit):
        model = kit.model()
        model.net.layers[1] = low_rank_factorize(model.net.layers[1], rank=2)
        with pytest.raises(ValueError, match="no recipe records"):
            model.train(kit.train_params())
        assert runs_on_disk() == []

    @pytest.mark.parametrize(
        "change",
        [
            lambda net: apply_lora_to(net, "layers.2"),
            lambda net: setattr(net.layers, "1", nn.Linear(16, 32)),
            lambda net: add_adapter(net, "other"),
        ],
    )
    def test_a_further_change_of_a_recorded_model_is_refused(self, kit, change):
        model = adapted(kit)
        change(model.net)
        before = kit.weights(model.net)
        with pytest.raises(ValueError, match="without a record"):
            model.train(kit.train_params())
        assert runs_on_disk() == []
        assert kit.same(model.net.state_dict(), before)

    def test_a_submodule_attached_for_training_is_no_change_of_the_net(self, kit):
        model = adapted(kit)
        model.net._predictor = nn.Linear(3, 3)
        run = model.train(kit.train_params())
        last = NNCheckpoint.load(run.id, Checkpoints.LAST)
        with pytest.raises(ValueError, match="exclude_submodules"):
            NNModel.from_checkpoint(last)
        rebuilt = NNModel.from_checkpoint(last, exclude_submodules=("_predictor",))
        assert torch.equal(outputs(rebuilt), outputs(model))

    def test_a_net_that_cannot_be_copied_is_refused(self, kit):
        model = kit.model()
        model.net.lock = threading.Lock()
        with pytest.raises(RecipeError, match="cannot be copied for a trial"):
            RECIPE.validate(model)

    def test_masks_that_stay_are_refused_and_baked_ones_are_not(self, kit):
        model = kit.model()
        magnitude_prune(model.net, 0.5, bake=False)
        with pytest.raises(ValueError, match=r"pruning masks.*prune\.remove"):
            model.train(kit.train_params())
        assert runs_on_disk() == []
        magnitude_prune(model.net, 0.0)
        run = model.train(kit.train_params())
        rebuilt = NNModel.from_checkpoint(NNCheckpoint.load(run.id, Checkpoints.LAST))
        assert torch.equal(outputs(rebuilt), outputs(model))

    def test_a_masked_module_of_ones_own_trains(self, kit):
        net = nn.Sequential(nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 3))
        magnitude_prune(net, 0.5, bake=False)
        model = NNModel(module=net, params=NNModelParams(loss=Losses.CROSS_ENTROPY))
        model.train(kit.train_params())
        assert int((net[0].weight == 0).sum()) >= 128

    def test_a_recipe_on_a_module_of_ones_own_is_refused(self):
        net = nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 3))
        model = NNModel(module=net, params=NNModelParams(loss=Losses.CROSS_ENTROPY))
        with pytest.raises(RecipeError, match="runtime-only"):
            TransformRecipe((lora("0"),)).materialize(model)
        assert type(net[0]) is nn.Linear


class TestWhileItTrains:
    def test_a_recipe_materialized_after_training_began_is_refused(self, kit):
        seen = []

        class Materializes(Callback):
            def on_epoch_begin(self, ctx):
                before = kit.weights(ctx.model.net)
                try:
                    RECIPE.materialize(ctx.model)
                except RecipeError as error:
                    seen.append(str(error))
                assert kit.same(ctx.model.net.state_dict(), before)

        model = kit.model()
        run = model.train(kit.train_params(n_epochs=1), callbacks=[Materializes()])
        assert ["the model is in training" in text for text in seen] == [True]
        assert run.transforms == ()
        RECIPE.materialize(model)  # afterwards it may

    def test_a_fresh_copy_may_be_made_meanwhile(self, kit):
        made = []

        class Copies(Callback):
            def on_epoch_end(self, ctx):
                made.append(TransformRecipe(RECIPE.operations, "fresh").materialize(ctx.model))

        kit.model().train(kit.train_params(n_epochs=1), callbacks=[Copies()])
        assert made[0].train(kit.train_params(n_epochs=1)).transforms

    @pytest.mark.parametrize("hook", ["on_epoch_end", "on_train_end"])
    def test_a_wrapper_changed_in_training_is_refused_at_the_save(self, kit, hook):
        class Changes(Callback):
            pass

        def change(self, ctx):
            if ctx.epoch == 1:
                ctx.model.net.layers[0].alpha = 99.0

        setattr(Changes, hook, change)
        with pytest.raises(ValueError, match="its alpha is 99.0, and .* was recorded"):
            adapted(kit).train(kit.train_params(n_epochs=2), callbacks=[Changes()])
        [run] = (name for name in runs_on_disk() if len(name) == 32)
        last = NNCheckpoint.load(run, Checkpoints.LAST)
        assert NNModel.from_checkpoint(last).net.layers[0].alpha != 99.0

    def test_a_wrapper_changed_before_training_is_refused_before_a_run_exists(self, kit):
        model = adapted(kit)
        model.net.layers[0].alpha = 99.0
        with pytest.raises(ValueError, match="its alpha is 99.0"):
            model.train(kit.train_params())
        assert runs_on_disk() == []

    def test_a_recipe_that_freezes_the_base_is_rebuilt_and_resumed_frozen(self, kit):
        op = lora("layers.0", r=2, freeze_base=True, modules_to_save=["layers.2"])

        def made():
            return TransformRecipe((op,)).materialize(kit.model())

        whole, half, rest = made(), made(), made()
        whole.train(kit.train_params(n_epochs=3), salt="whole")
        run = half.train(kit.train_params(n_epochs=1))
        rest.train(kit.train_params(n_epochs=2, resume_from_run_id=run.id))
        assert kit.same(whole.net.state_dict(), rest.net.state_dict())
        rebuilt = NNModel.from_checkpoint(NNCheckpoint.load(run.id, Checkpoints.LAST))
        flags = lambda m: [p.requires_grad for p in m.net.parameters()]  # noqa: E731
        assert flags(rebuilt) == flags(half)
        plain = kit.model().net.layers[1].weight
        assert torch.equal(rest.net.layers[1].weight, plain)


class TestOtherModels:
    def test_a_registered_factory_is_rebuilt_with_its_recipe(self, kit):
        def build(config):
            return nn.Sequential(nn.Linear(32, config["width"]), nn.Linear(config["width"], 3))

        register_model_factory("test.recipe", 1, build)
        try:
            spec = ModelSpec("test.recipe", 1, {"width": 8}, seed=0)
            model = NNModel(params=NNModelParams(net=spec, loss=Losses.CROSS_ENTROPY))
            TransformRecipe((lora("0", r=2),)).materialize(model)
            run = model.train(kit.train_params())
            rebuilt = NNModel.from_checkpoint(NNCheckpoint.load(run.id, Checkpoints.LAST))
            assert torch.equal(outputs(rebuilt), outputs(model))
        finally:
            unregister_model_factory("test.recipe", 1)

    def test_a_fresh_model_is_of_the_same_class_and_independent(self, kit):
        class Mine(NNModel):
            pass

        model = kit.model(kind=Mine)
        before = outputs(model)
        fresh = TransformRecipe((lora("layers.0", r=2),), "fresh").materialize(model)
        assert type(fresh) is Mine
        run = fresh.train(kit.train_params())
        assert run.transforms
        assert torch.equal(outputs(model), before)
        assert model.transforms == ()
        assert model.train(kit.train_params()).transforms == ()

    def test_a_trainer_carries_the_recipe_too(self, kit):
        model = adapted(kit)
        params = NNTrainerParams(
            n_epochs=1, optims={"main": kit.optim()}, seed=1, train_loader=kit.data()
        )

        def step(ctx):
            from nnx import NNEvaluationDataPoint

            (x, y), optimizer = ctx.batch, ctx.optimizers["main"]
            check_optimizer(model, optimizer)
            loss = nn.functional.cross_entropy(ctx.model.net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return NNEvaluationDataPoint(loss=loss.item())

        run = Trainer(model).train(params, trainer_step_fn=step)
        assert run.transforms == RECIPE.checkpoint_transforms()
        rebuilt = NNModel.from_checkpoint(NNCheckpoint.load(run.id, Checkpoints.LAST))
        assert torch.equal(outputs(rebuilt), outputs(model))

    @pytest.mark.parametrize(
        "operate",
        [
            lambda net: widen(net, layer_name="layers.0", new_width=20),
            lambda net: deepen(net, after_layer_name="layers.1"),
        ],
    )
    def test_net2net_edits_refine_and_reload(self, kit, operate):
        model = kit.model()
        model.train(kit.train_params(n_epochs=1))
        before = outputs(model)
        model.net = operate(model.net)
        torch.testing.assert_close(outputs(model), before, atol=1e-5, rtol=1e-5)
        run = model.train(kit.train_params(n_epochs=1), salt="refine")
        assert NNRun.load(run.id).net == model.net.params
        rebuilt = NNModel.from_checkpoint(NNCheckpoint.load(run.id, Checkpoints.LAST))
        assert torch.equal(outputs(rebuilt), outputs(model))

    def test_surgery_that_kept_its_params_true_takes_a_recipe(self, kit):
        model = kit.model()
        model.net = widen(model.net, layer_name="layers.0", new_width=20)
        TransformRecipe((lora("layers.0", r=2),)).materialize(model)
        run = model.train(kit.train_params())
        rebuilt = NNModel.from_checkpoint(NNCheckpoint.load(run.id, Checkpoints.LAST))
        assert torch.equal(outputs(rebuilt), outputs(model))
