"""Quantization in real runs."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch
from nnx import Callback, Checkpoints, CompileSpec, NNCheckpoint, NNModel, NNRun
from nnx.transforms import TransformRecipe, lora

pytest.importorskip("torchao", reason="torchao is the quantize extra")
pytestmark = pytest.mark.filterwarnings("ignore")

from nnx.quantize import QATLifecycleCallback, qat_train_step_factory, quantize_int8  # noqa: E402


def outputs(model):
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(3))
    return torch.as_tensor(model.predict(x).logits)


def qat(kit, model=None, callback=None, **options):
    model = model or kit.model()
    callback = callback or QATLifecycleCallback(groupsize=32)
    run = model.train(
        kit.train_params(**options), callbacks=[callback], train_step_fn=qat_train_step_factory()
    )
    return model, run


class TestInt8:
    def test_a_trained_model_predicts_nearly_the_same(self, kit):
        class Mine(NNModel):
            pass

        model = kit.model(kind=Mine)
        model.train(kit.train_params())
        before = outputs(model)
        quantized = quantize_int8(model)
        assert type(quantized) is Mine
        assert (outputs(quantized) - before).abs().max() < 0.1
        assert torch.equal(outputs(model), before)
        loader = kit.data(shuffle=False)
        assert abs(quantized.evaluate(loader).accuracy - model.evaluate(loader).accuracy) < 0.1

    def test_training_it_is_refused_before_a_run_exists(self, kit):
        quantized = quantize_int8(kit.model())
        with pytest.raises(ValueError, match="for inference"):
            quantized.train(kit.train_params())
        assert not os.path.exists("runs")


class TestQAT:
    def test_last_records_the_conversion_and_rebuilds_it(self, kit):
        model, run = qat(kit)
        last = NNCheckpoint.load(run.id, Checkpoints.LAST)
        (record,) = last.transforms
        assert record.options["qat_config"] == "8da4w"
        assert record.options["groupsize"] == 32
        rebuilt = NNModel.from_checkpoint(last)
        assert rebuilt.net.layers[0].weight.dtype == torch.int8
        assert torch.equal(outputs(rebuilt), outputs(model))
        assert run.transforms == ()
        assert NNRun.load(run.id).id == run.id

    def test_the_best_checkpoint_stays_in_full_precision(self, kit):
        _, run = qat(kit)
        best = NNCheckpoint.load(run.id, Checkpoints.BEST)
        assert best.transforms == ()
        assert NNModel.from_checkpoint(best).net.layers[0].weight.dtype == torch.float32

    def test_a_converted_run_resumes_from_the_full_precision_weights(self, kit):
        whole, _ = qat(kit, n_epochs=4)
        _, first = qat(kit, n_epochs=2)
        second, _ = qat(kit, n_epochs=2, resume_from_run_id=first.id)
        assert kit.same(second.net.state_dict(), whole.net.state_dict())

    def test_a_recorded_recipe_and_the_conversion_replay_in_order(self, kit):
        model = TransformRecipe((lora("layers.0", r=2),)).materialize(kit.model())
        model, run = qat(kit, model)
        last = NNCheckpoint.load(run.id, Checkpoints.LAST)
        assert [t.name for t in last.transforms] == ["lora", "torchao_qat"]
        assert torch.equal(outputs(NNModel.from_checkpoint(last)), outputs(model))

    def test_a_converted_checkpoint_without_a_record_says_what_to_do(self, kit):
        _, run = qat(kit)
        last = dataclasses.replace(NNCheckpoint.load(run.id, Checkpoints.LAST), transforms=())
        with pytest.raises(ValueError, match="QATLifecycleCallback"):
            NNModel.from_checkpoint(last)

    def test_the_step_is_the_default_one_unless_another_is_given(self, kit):
        from nnx import default_train_step

        assert qat_train_step_factory() is default_train_step

    def test_converted_files_cross_as_safetensors(self, kit, tmp_path):
        model, run = qat(kit)
        path = str(tmp_path / "q.safetensors")
        NNCheckpoint.load(run.id, Checkpoints.LAST).to_file(path, format="safetensors")
        rebuilt = NNModel.from_checkpoint(NNCheckpoint.from_file(path))
        assert torch.equal(outputs(rebuilt), outputs(model))

    @pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
    def test_a_fit_that_fails_leaves_the_plain_full_precision_net(self, kit, error):
        class Fails(Callback):
            def on_epoch_end(self, ctx):
                if ctx.epoch == 1:
                    raise error

        model, callback = kit.model(), QATLifecycleCallback()
        layers = [model.net.layers[0], model.net.layers[2]]
        with pytest.raises(type(error)):
            model.train(kit.train_params(), callbacks=[callback, Fails()])
        assert [model.net.layers[0], model.net.layers[2]] == layers
        assert not callback.is_prepared
        assert not callback.is_converted
        assert callback.checkpoint_transforms() == ()
        model.train(kit.train_params(), callbacks=[QATLifecycleCallback()], salt="again")
        assert model.net.layers[0].weight.dtype == torch.int8

    def test_compiling_a_fit_that_changes_its_topology_is_refused(self, kit):
        model = kit.model()
        with pytest.raises(ValueError, match="QATLifecycleCallback"):
            model.train(
                kit.train_params(), callbacks=[QATLifecycleCallback()], compile=CompileSpec()
            )
        assert not os.path.exists("runs")
        assert model.net.layers[0].weight.dtype == torch.float32
