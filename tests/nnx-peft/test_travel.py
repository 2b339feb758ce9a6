"""Changed models elsewhere: in a bundle, in the Hub's layout, in the files of other runtimes."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from nnx import NNModel
from nnx.bundles import BundleCapabilityError, export_bundle, reconstruct_bundle
from nnx.peft import apply_lora_to
from nnx.transforms import TransformRecipe, lora, low_rank

pytestmark = pytest.mark.filterwarnings("ignore")
X = torch.randn(5, 32, generator=torch.Generator().manual_seed(3))
FORMATS = [("onnx", {}), ("onnx", {"dynamo": True}), ("pt2", {})]


def outputs(model):
    return torch.as_tensor(model.predict(X).logits)


def recipe():
    return TransformRecipe([lora("layers.0", r=2, alpha=4.0), low_rank("layers.1", rank=4)])


def test_a_recipe_is_replayed_from_a_bundle_which_resumes_bit_for_bit(kit):
    def model():
        made = kit.model()
        recipe().materialize(made)
        return made

    first, whole = model(), model()
    export_bundle(first.train(kit.train_params(2)).id, "bundle")
    wanted = whole.train(kit.train_params(4))
    shutil.rmtree("runs")
    rebuilt = reconstruct_bundle("bundle")
    assert torch.equal(outputs(rebuilt.model), outputs(first))
    assert [t["name"] for t in rebuilt.info.transforms] == ["lora", "low_rank"]
    found = rebuilt.resume(kit.train_params(2))
    assert found.idps[-1].train_edp.loss == wanted.idps[-1].train_edp.loss
    assert torch.equal(outputs(rebuilt.model), outputs(whole))


@pytest.mark.parametrize(("format", "options"), FORMATS)
def test_adapters_are_part_of_an_export(kit, format, options):
    pytest.importorskip("nnx.hub", exc_type=ImportError)
    onnxruntime = pytest.importorskip("onnxruntime")
    model = kit.model()
    apply_lora_to(model.net, "layers.*", r=2, alpha=4)
    for name, parameter in model.net.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    model.export(f"m.{format}", format, example_input=X, **options)
    if format == "onnx":
        (found,) = onnxruntime.InferenceSession("m.onnx").run(None, {"input": X.numpy()})
        found = torch.from_numpy(found)
    else:
        found = torch.export.load("m.pt2").module()(X)
    torch.testing.assert_close(found, outputs(model), atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="changed without a record"):
        model.save_pretrained("saved")
    assert not os.path.exists("saved")


def test_a_quantized_net_is_refused_by_its_weight_and_nothing_is_left(kit):
    pytest.importorskip("nnx.hub", exc_type=ImportError)
    pytest.importorskip("torchao", reason="torchao is the quantize extra")
    pytest.importorskip("onnxruntime")
    from nnx.quantize import quantize_int8

    model = quantize_int8(kit.model())
    for format, options in FORMATS:
        with pytest.raises(TypeError, match=r"layers\.0\.weight is a Int8Tensor: a quantized net"):
            model.export("m", format, example_input=X, **options)
    with pytest.raises(TypeError, match=r"layers\.0\.weight' is a Int8Tensor.* only dense"):
        model.export("m", "safetensors")
    with pytest.raises(ValueError, match=r"layers\.0 .* holds a Int8Tensor weight"):
        model.save_pretrained("saved")
    assert set(os.listdir(".")) <= {"runs"}


def test_a_net_that_was_converted_when_training_ended_serves_and_does_not_resume(kit):
    pytest.importorskip("torchao", reason="torchao is the quantize extra")
    from nnx.quantize import QATLifecycleCallback, qat_train_step_factory

    model = kit.model()
    run = model.train(
        kit.train_params(), callbacks=[QATLifecycleCallback(groupsize=32)],
        train_step_fn=qat_train_step_factory(),
    )  # fmt: skip
    export_bundle(run.id, "bundle")
    rebuilt = reconstruct_bundle("bundle")
    assert torch.equal(outputs(rebuilt.model), outputs(model))
    before = set(os.listdir("runs"))
    with pytest.raises(BundleCapabilityError, match="converted when its training ended"):
        rebuilt.resume(kit.train_params(1))
    assert set(os.listdir("runs")) == before


def test_a_recipe_in_the_layout_of_the_hub_is_exported_as_it_is_loaded(kit):
    pytest.importorskip("nnx.hub", exc_type=ImportError)
    pytest.importorskip("onnxruntime")
    model = kit.model()
    recipe().materialize(model)
    model.save_pretrained("saved")
    found = NNModel.from_pretrained("saved")
    assert torch.equal(outputs(found), outputs(model))
    assert found.transforms == model.transforms
    assert found.to_onnx("m.onnx", X) == "m.onnx"
