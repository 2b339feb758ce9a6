"""A language model goes elsewhere with its tokenizer: in a bundle, and in the Hub's layout."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from nnx import Checkpoints, NNModel, NNTrainParams
from nnx.bundles import BundleIntegrityError, export_bundle, reconstruct_bundle
from nnx.lm import GenerativeNNModel
from nnx.lm_tasks import CausalLMTask

GREEDY = {"temperature": 0, "max_new_tokens": 12}


def trained(kit, n_epochs=1, model=None, **options):
    model = model or kit.model(drop=0.1)
    ids = [model.tokenizer.encode(text)[:12] for text in kit.texts[:8]]
    rows = torch.tensor([row + [0] * (12 - len(row)) for row in ids])
    lm = CausalLMTask(vocab_size=model.tokenizer.vocab_size, pad_id=0)
    params = NNTrainParams(n_epochs=n_epochs, train_loader=[rows, rows + 0], seed=5, **options)
    return model, params, {"objective": lm.objective()}


def test_a_bundle_brings_the_tokenizer_and_resumes_with_it(kit):
    model, params, step = trained(kit)
    run = model.train(params, **step)
    export_bundle(run.id, "bundle")
    whole, params, step = trained(kit, 2)
    wanted = whole.train(params, **step)
    shutil.rmtree("runs")
    os.unlink("tok.json")  # nothing but the bundle is left
    rebuilt = reconstruct_bundle("bundle", model_class=GenerativeNNModel)
    assert rebuilt.model.generate("the cat", **GREEDY) == model.generate("the cat", **GREEDY)
    _, params, step = trained(kit, 1, rebuilt.model)
    found = rebuilt.resume(params, **step)
    assert found.idps[-1].train_edp.loss == wanted.idps[-1].train_edp.loss
    again = GenerativeNNModel.from_run(found.id, Checkpoints.LAST)
    assert again.generate("the cat", **GREEDY) == whole.generate("the cat", **GREEDY)
    assert type(reconstruct_bundle("bundle").model) is NNModel


def test_what_is_no_tokenizer_in_a_bundle_is_refused(kit, monkeypatch):
    from nnx.lm import tokenizer_record

    model, params, step = trained(kit)
    monkeypatch.setattr(tokenizer_record, "tokenizer_bytes", lambda tokenizer: b"{}")
    run = model.train(params, **step)
    export_bundle(run.id, "bundle")
    with pytest.raises(BundleIntegrityError, match=r"tokenizer.json is no tokenizer"):
        reconstruct_bundle("bundle", model_class=GenerativeNNModel)
    reconstruct_bundle("bundle")


def test_the_layout_of_the_hub_has_a_tokenizer_that_its_library_reads(kit):
    pytest.importorskip("nnx.hub", exc_type=ImportError)
    from tokenizers import Tokenizer

    model = kit.model()
    model.save_pretrained("saved")
    os.unlink("tok.json")
    assert sorted(os.listdir("saved")) == [
        "README.md", "config.json", "model.safetensors", "tokenizer.json"
    ]  # fmt: skip
    text = "the cat"
    ids = Tokenizer.from_file("saved/tokenizer.json").encode(text).ids
    assert ids == model.tokenizer.encode(text)
    found = GenerativeNNModel.from_pretrained("saved")
    assert found.generate(text, **GREEDY) == model.generate(text, **GREEDY)
    other = kit.tokenizer("other.json")
    assert GenerativeNNModel.from_pretrained("saved", tokenizer=other).tokenizer is other
    assert type(NNModel.from_pretrained("saved")) is NNModel


def test_a_tokenizer_of_another_model_does_not_stay_beside_new_weights(kit):
    pytest.importorskip("nnx.hub", exc_type=ImportError)
    model = kit.model()
    for notes in (False, True):
        model.tokenizer = kit.tokenizer()
        model.save_pretrained("saved")
        if notes:
            Path("saved/notes.txt").write_text("mine")
        model.tokenizer = None
        model.save_pretrained("saved")
        assert not os.path.exists("saved/tokenizer.json")
        assert GenerativeNNModel.from_pretrained("saved").tokenizer is None
    assert Path("saved/notes.txt").read_text() == "mine"


@pytest.mark.parametrize("content", [b"{}", b"\xff", json.dumps({"model": {}}).encode()])
def test_a_tokenizer_file_that_is_none_is_refused(kit, content):
    pytest.importorskip("nnx.hub", exc_type=ImportError)
    kit.model().save_pretrained("saved")
    Path("saved/tokenizer.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"saved: tokenizer.json is no tokenizer"):
        GenerativeNNModel.from_pretrained("saved")
    os.unlink("saved/tokenizer.json")
    os.symlink("/etc/passwd", "saved/tokenizer.json")
    with pytest.raises(ValueError, match="symbolic link"):
        GenerativeNNModel.from_pretrained("saved")


def test_the_network_is_exported_or_refused_by_name(kit):
    pytest.importorskip("nnx.hub", exc_type=ImportError)
    onnxruntime = pytest.importorskip("onnxruntime")
    model = kit.model()
    ids = torch.randint(0, model.tokenizer.vocab_size, (3, 10))
    wanted = torch.as_tensor(model.predict(ids).logits)
    model.to_onnx("m.onnx", ids, dynamo=True)
    (found,) = onnxruntime.InferenceSession("m.onnx").run(None, {"input": ids.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), wanted, atol=1e-4, rtol=1e-4)
    model.export("m.pt2", "pt2", example_input=ids)
    with torch.no_grad():
        program = torch.export.load("m.pt2").module()(ids)
    torch.testing.assert_close(program, wanted, atol=1e-4, rtol=1e-4)
    with pytest.raises(RuntimeError, match=r"torch.onnx cannot write TransformerNN .*rms_norm"):
        model.to_onnx("other.onnx", ids)  # the older exporter
    assert not os.path.exists("other.onnx")
