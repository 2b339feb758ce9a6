"""A model in the Hub's layout: written as a whole, and only loaded when it can be true."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from nnx import (
    Activations,
    Losses,
    MissingModelFactoryError,
    ModelSpec,
    Nets,
    NNModel,
    NNModelParams,
    NNParams,
    PrecisionPolicy,
    register_model_factory,
    unregister_model_factory,
)
from nnx.hub import inspect_pretrained
from nnx.hub.layout import PretrainedError
from safetensors.torch import load_file, save_file

ORIGINAL = Path(__file__).parents[1] / "data" / "original-hub"
X = torch.randn(50, 6, generator=torch.Generator().manual_seed(21))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def make_model(**changes):
    torch.manual_seed(0)
    net = NNParams(
        input_dim=6, output_dim=3, hidden_dims=[8], dropout_prob=0.2, activation=Activations.RELU
    )
    return NNModel(net, NNModelParams(net=Nets.FEED_FWD, loss=Losses.CROSS_ENTROPY, **changes))


def test_a_folder_of_the_original_is_loaded():
    model = NNModel.from_pretrained(ORIGINAL / "hub-feed-fwd")
    wanted = json.loads((ORIGINAL / "values.json").read_text())["hub-feed-fwd"]["predict"]
    np.testing.assert_allclose(model.predict(X[:3]).logits.ravel(), wanted, atol=1e-6)
    assert not model.net.training


def test_what_is_written_has_the_layout_of_the_original():
    NNModel.from_pretrained(ORIGINAL / "hub-feed-fwd").save_pretrained("again")
    assert sorted(os.listdir("again")) == ["README.md", "config.json", "model.safetensors"]
    for name in ("config.json", "model.safetensors"):
        written = (ORIGINAL / "hub-feed-fwd" / name).read_bytes()
        assert Path("again", name).read_bytes().rstrip() == written.rstrip(), name


def test_a_model_comes_back_bit_for_bit():
    model = make_model(precision=PrecisionPolicy("bf16"))
    model.save_pretrained("saved")
    found = NNModel.from_pretrained("saved")
    assert found.params.state() == model.params.state()
    assert found.net_params == model.net_params
    for name, value in model.net.state_dict().items():
        assert torch.equal(found.net.state_dict()[name], value)
    replaced = NNModel.from_pretrained("saved", precision=PrecisionPolicy("fp32"))
    assert replaced.params.precision is None or replaced.params.precision.mode == "fp32"


def test_loading_moves_no_random_stream():
    make_model().save_pretrained("saved")
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    NNModel.from_pretrained("saved")
    assert torch.equal(torch.rand(3), wanted)


def test_the_card_says_recorded_facts():
    make_model().save_pretrained("saved", model_card_kwargs={"license": "mit", "split": "a|b"})
    card = Path("saved/README.md").read_text()
    assert "library_name: nnx" in card
    assert "license: mit" in card
    assert "| loss | cross_entropy |" in card
    assert "| split | a\\|b |" in card
    assert "| parameters | 83 |" in card


class Calibrator:
    def state(self):
        return {
            "format": "nnx.calibration/1", "kind": "temperature", "labels": ["a", "b", "c"],
            "model_id": "mine:1", "temperature": 1.25, "split": {"calibration": "held-out"},
        }  # fmt: skip


def trained():
    """A run that declares its task, data, splits and what they are."""
    from nnx import NNTrainParams, TaskSpec
    from nnx.provenance import ExperimentManifest
    from torch.utils.data import DataLoader, TensorDataset

    model = make_model(task=TaskSpec.categorical(3, labels=["a", "b", "c"]))
    data = TensorDataset(X, torch.arange(50) % 3)
    params = NNTrainParams(
        n_epochs=2, seed=3, train_loader=DataLoader(data, batch_size=10),
        val_loader=DataLoader(data, batch_size=25), data_id="flowers-7",
    )  # fmt: skip
    plan = ExperimentManifest.for_model(
        model, train=params, data={"all": "sha256:" + "a" * 64}, splits={"test": None}
    )
    return model, model.train(params, provenance=plan)


def card_rows(path):
    lines = Path(path).read_text().splitlines()
    return dict(
        line[2:-2].split(" | ", 1)
        for line in lines
        if line.startswith("| ") and " | " in line[2:-2]
    )


def test_the_card_tells_of_the_run_its_data_its_scores_and_calibrators():
    model, run = trained()
    model.save_pretrained("saved", run=run, calibrators=[Calibrator()])
    rows, last = card_rows("saved/README.md"), run.idps[-1]
    assert rows["run"] == run.id
    assert rows["data"] == "flowers-7"
    assert rows["data all"] == f"sha256:{'a' * 64} (declared)"
    assert rows["split test"] == "unknown"
    assert rows["task"] == "kind categorical, num_outputs 3, labels a, b, c"
    assert rows["calibrator 0"] == (
        "temperature, temperature 1.25, fitted on calibration held-out, for mine:1"
    )
    assert rows["validation, epoch 1"].startswith(f"loss {last.val_edp.loss:.6g}, error ")
    assert rows["validation, epoch 1"].endswith("(n 50)")
    drawn = os.path.exists("saved/training.svg")
    assert ("](training.svg)" in Path("saved/README.md").read_text()) == drawn
    NNModel.from_pretrained("saved")
    model.save_pretrained("saved")  # without the run: its chart goes too
    assert sorted(os.listdir("saved")) == ["README.md", "config.json", "model.safetensors"]
    assert "run" not in card_rows("saved/README.md")


def test_a_run_has_its_chart_in_the_folder_when_pictures_are_there():
    pytest.importorskip("nnx.viz", exc_type=ImportError)
    model, run = trained()
    model.save_pretrained("saved", run=run)
    assert Path("saved/training.svg").read_text().startswith("<svg ")


def test_a_registered_module_comes_back_by_its_factory():
    def encoder(config):
        return torch.nn.Linear(6, config["width"])

    register_model_factory("test.hub", 1, encoder)
    try:
        NNModel(
            params=NNModelParams(net=ModelSpec("test.hub", 1, config={"width": 4}))
        ).save_pretrained("s")
        config = json.loads(Path("s/config.json").read_text())
        assert "net_params" not in config
        assert config["params"]["net"]["id"] == "test.hub"
        assert NNModel.from_pretrained("s").net.weight.shape == (4, 6)
    finally:
        unregister_model_factory("test.hub", 1)
    with pytest.raises(MissingModelFactoryError, match=r"test.hub"):
        NNModel.from_pretrained("s")


def test_what_would_not_come_back_is_not_written():
    with pytest.raises(MissingModelFactoryError, match="runtime-only"):
        NNModel(params=NNModelParams(), module=torch.nn.Linear(2, 2)).save_pretrained("s")
    model = make_model()
    model.net.layers[0] = torch.nn.Sequential(model.net.layers[0])
    with pytest.raises(ValueError, match="changed without a record"):
        model.save_pretrained("s")
    assert not os.path.exists("s")


def test_a_recorded_recipe_is_replayed():
    transforms = pytest.importorskip("nnx.transforms", exc_type=ImportError)
    model = make_model()
    transforms.TransformRecipe([transforms.lora("layers.0", r=2, alpha=4.0)]).materialize(model)
    model.save_pretrained("s")
    (recorded,) = json.loads(Path("s/config.json").read_text())["transforms"]
    assert (recorded["name"], recorded["version"]) == ("lora", 1)
    found = NNModel.from_pretrained("s")
    assert torch.equal(
        torch.from_numpy(found.predict(X).logits), torch.from_numpy(model.predict(X).logits)
    )
    recorded["version"] = 99
    config = {**json.loads(Path("s/config.json").read_text()), "transforms": [recorded]}
    Path("s/config.json").write_text(json.dumps(config))
    with pytest.raises(PretrainedError, match="transform that is not known"):
        NNModel.from_pretrained("s")


def test_extra_submodules_are_named_and_can_be_left_out():
    model = make_model()
    model.net._helper = torch.nn.Linear(2, 2)
    model.save_pretrained("s")
    with pytest.raises(ValueError, match=r"exclude_submodules=\('_helper',\)"):
        NNModel.from_pretrained("s")
    assert not hasattr(NNModel.from_pretrained("s", exclude_submodules=("_helper",)).net, "_helper")
    with pytest.raises(ValueError, match="does not hold"):
        NNModel.from_pretrained("s", exclude_submodules=("_helper", "other"))


def test_a_folder_is_inspected_and_limited_before_anything_is_built():
    make_model().save_pretrained("s")
    info = inspect_pretrained("s")
    assert (info.parameters, info.config["net_params"]["input_dim"]) == (83, 6)
    assert info.tensors["layers.0.weight"] == (8, 6)
    with pytest.raises(PretrainedError, match=r"holds 83 numbers, more than max_parameters=10"):
        NNModel.from_pretrained("s", max_parameters=10)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c["net_params"].update(input_dim=10**12), "does not describe the weights"),
        (lambda c: c["net_params"].update(hidden_dims="[4]"), "does not describe the weights"),
        (lambda c: c.update(auto_map={}), "does not know"),
        (lambda c: c.pop("params"), "has no params"),
        (lambda c: c["params"].update(net="nothing"), "cannot be read"),
        (lambda c: c.update(net_params=None), "without net_params"),
    ],
)
def test_a_configuration_that_cannot_be_true(change, said):
    make_model().save_pretrained("s")
    config = json.loads(Path("s/config.json").read_text())
    change(config)
    Path("s/config.json").write_text(json.dumps(config))
    with pytest.raises(PretrainedError, match=said):
        NNModel.from_pretrained("s")


def test_weights_that_are_missing_pickled_linked_or_cut():
    make_model().save_pretrained("s")
    path = Path("s/model.safetensors")
    data = path.read_bytes()
    path.write_bytes(data[:-4])
    with pytest.raises(PretrainedError, match="its header lists"):
        NNModel.from_pretrained("s")
    path.unlink()
    torch.save({}, "s/pytorch_model.bin")
    with pytest.raises(PretrainedError, match="a pickle is never loaded"):
        NNModel.from_pretrained("s")
    Path("outside").write_bytes(data)
    path.symlink_to(os.path.abspath("outside"))
    with pytest.raises(PretrainedError, match="symbolic link"):
        NNModel.from_pretrained("s")
    path.unlink()
    tensors = load_file("outside")
    tensors.pop("layers.0.bias")
    save_file(tensors, path)
    with pytest.raises(PretrainedError, match=r"layers.0.bias has no weights"):
        NNModel.from_pretrained("s")


def test_a_save_that_fails_leaves_what_was_there(monkeypatch):
    from nnx.utils import files

    make_model().save_pretrained("s")
    before = {p.name: p.read_bytes() for p in Path("s").iterdir()}

    class Full(files.Disk):
        def write(self, descriptor, data):
            raise OSError(28, "No space left on device")

    other = make_model()
    torch.nn.init.zeros_(other.net.layers[0].weight)
    with monkeypatch.context() as patch:
        patch.setattr(files, "disk", Full())
        with pytest.raises(OSError, match="No space"):
            other.save_pretrained("s")
    assert {p.name: p.read_bytes() for p in Path("s").iterdir()} == before
    assert os.listdir(".") == ["s"]
    Path("s/notes.txt").write_text("mine")
    other.save_pretrained("s")
    assert Path("s/notes.txt").read_text() == "mine"
    assert float(NNModel.from_pretrained("s").net.layers[0].weight.detach().abs().sum()) == 0


def test_the_folders_of_others_are_refused():
    os.mkdir("r")
    Path("r/run.yaml").write_text("")
    with pytest.raises(ValueError, match="is a run, not a folder"):
        make_model().save_pretrained("r")
    with pytest.raises(PretrainedError, match=r"has no config.json"):
        NNModel.from_pretrained("r")
    bundle = Path(__file__).parents[1] / "data" / "original-bundle" / "bundle-resume"
    with pytest.raises(PretrainedError, match="is a run bundle"):
        NNModel.from_pretrained(bundle)


def test_training_what_was_loaded_leaves_the_file_as_it_is():
    """The weights are the file's own pages until they change."""
    model = make_model()
    model.save_pretrained("s")
    before = Path("s/model.safetensors").read_bytes()
    found = NNModel.from_pretrained("s")
    optimizer = torch.optim.SGD(found.net.parameters(), lr=1.0)
    found.net(X).square().sum().backward()
    optimizer.step()
    assert not torch.equal(found.net.layers[0].weight, model.net.layers[0].weight)
    assert Path("s/model.safetensors").read_bytes() == before
    again = NNModel.from_pretrained("s")
    assert torch.equal(again.net.layers[0].weight, model.net.layers[0].weight)


def test_tied_weights_stay_tied():
    def tied(config):
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        net[1].weight = net[0].weight
        return net

    register_model_factory("test.tied", 1, tied)
    try:
        NNModel(params=NNModelParams(net=ModelSpec("test.tied", 1))).save_pretrained("s")
        found = NNModel.from_pretrained("s").net
        assert found[1].weight is found[0].weight
    finally:
        unregister_model_factory("test.tied", 1)


def test_a_model_of_another_device_is_loaded_on_this_one():
    model = make_model()
    model.save_pretrained("s")
    config = json.loads(Path("s/config.json").read_text())
    config["params"]["device"] = "cuda"
    Path("s/config.json").write_text(json.dumps(config))
    for place in ("cpu", torch.device("cpu"), model.params.device):
        found = NNModel.from_pretrained("s", map_location=place)
        assert (found.device.type, found.params.device) == ("cpu", model.params.device)
    assert torch.equal(found.net.layers[0].weight, model.net.layers[0].weight)
    with pytest.raises(RuntimeError, match="no device|Invalid device|Expected one of"):
        NNModel.from_pretrained("s", map_location="nowhere")


def test_a_precision_replaces_the_older_flag_too():
    make_model(mixed_precision=True).save_pretrained("s")
    assert NNModel.from_pretrained("s").params.mixed_precision
    found = NNModel.from_pretrained("s", precision=PrecisionPolicy("bf16"))
    assert (found.params.precision.mode, found.params.mixed_precision) == ("bf16", False)


def test_a_factory_that_builds_another_module_is_refused_and_an_adapter_is_given():
    from nnx.models import BatchAdapter

    class Rows(BatchAdapter):
        def split(self, batch):
            return (batch["x"],), {}, batch["y"]

    widths = [4, 5]
    register_model_factory("test.hub", 1, lambda config: torch.nn.Linear(6, widths[0]))
    try:
        NNModel(params=NNModelParams(net=ModelSpec("test.hub", 1))).save_pretrained("s")
        found = NNModel.from_pretrained("s", batch_adapter=Rows())
        assert found.split_batch({"x": X, "y": None})[0][0] is X
        widths.pop(0)
        with pytest.raises(
            ValueError, match=r"another topology than the saved weights: weight is \(5, 6\)"
        ):
            NNModel.from_pretrained("s")
    finally:
        unregister_model_factory("test.hub", 1)
