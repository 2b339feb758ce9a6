"""The model facade: how it is made, rebuilt, exported, and what it refuses."""

from __future__ import annotations

import copy

import pytest
import torch
from nnx import (
    Checkpoints,
    Devices,
    Losses,
    MissingModelFactoryError,
    ModelSpec,
    Nets,
    NNCheckpoint,
    NNModel,
    NNModelParams,
    NNParams,
    NNTrainParams,
    PrecisionPolicy,
    RuntimeModule,
    TaskSpec,
    register_model_factory,
    unregister_model_factory,
)
from nnx.plugins import manager, siblings
from torch import nn

NET = NNParams(input_dim=4, output_dim=3, hidden_dims=[8], dropout_prob=0.1)
BATCHES = [(torch.randn(8, 4), torch.arange(8) % 3)]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NNX_TQDM_DISABLE", "1")


def model(**kwargs):
    return NNModel(net_params=NET, params=NNModelParams(net=Nets.FEED_FWD, **kwargs))


def trained(model, **kwargs):
    run = model.train(NNTrainParams(n_epochs=1, train_loader=BATCHES, **kwargs))
    return NNCheckpoint.load(run=run.id, type=Checkpoints.LAST)


def same(a, b):
    left, right = a.net.state_dict(), b.net.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


# Making one --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "match", "error"),
    [
        ({}, "needs params", ValueError),
        ({"params": NNModelParams()}, "net is not set", ValueError),
        ({"params": NNModelParams(net=Nets.FEED_FWD)}, "needs net_params", ValueError),
        (
            {"params": NNModelParams(net=ModelSpec("a.b", 1)), "net_params": NET},
            "takes no net_params",
            ValueError,
        ),
        ({"params": NNModelParams(net=ModelSpec("a.b", 1))}, "a.b@v1", MissingModelFactoryError),
        (
            {"params": NNModelParams(net=RuntimeModule("a.B", "0" * 8))},
            "runtime-only",
            MissingModelFactoryError,
        ),
        ({"params": NNModelParams(), "module": object()}, "must be a torch.nn.Module", TypeError),
        (
            {"params": NNModelParams(), "module": nn.Linear(1, 1), "net_params": NET},
            "takes no net_params",
            ValueError,
        ),
        (
            {"params": NNModelParams(net=Nets.FEED_FWD), "module": nn.Linear(1, 1)},
            "without a net",
            ValueError,
        ),
        (
            {
                "params": NNModelParams(net=RuntimeModule.of(nn.Linear(1, 2))),
                "module": nn.Linear(1, 1),
            },
            "another topology",
            ValueError,
        ),
        (
            {"params": NNModelParams(net=Nets.FEED_FWD), "net_params": NET, "batch_adapter": 3},
            "batch_adapter",
            TypeError,
        ),
        (
            {
                "params": NNModelParams(net=Nets.FEED_FWD, task=TaskSpec.categorical(5)),
                "net_params": NET,
            },
            "output_dim|5",
            ValueError,
        ),
    ],
)
def test_what_cannot_be_made_is_refused(arguments, match, error):
    with pytest.raises(error, match=match):
        NNModel(**arguments)


def test_a_module_is_used_as_it_is():
    module = nn.Sequential(nn.Linear(4, 3))
    before = torch.get_rng_state()
    wrapped = NNModel(module=module, params=NNModelParams(loss=Losses.CROSS_ENTROPY))
    assert wrapped.net is module
    assert isinstance(wrapped.params.net, RuntimeModule)
    assert torch.equal(before, torch.get_rng_state())
    assert wrapped.device == torch.device("cpu")


def test_a_model_can_be_copied_with_another_net():
    first = model()
    other = copy.copy(first)
    other.net = nn.Sequential(nn.Linear(4, 3))
    assert first.net is not other.net
    assert other.predict(torch.zeros(2, 4)).logits.shape == (2, 3)


# Rebuilding one ----------------------------------------------------------------------------


def test_a_checkpoint_rebuilds_each_kind_of_model():
    register_model_factory("tests.mlp", 1, lambda config: nn.Linear(4, config["out"]))
    try:
        spec = ModelSpec("tests.mlp", 1, {"out": 3}, seed=5)
        for original in (model(), NNModel(params=NNModelParams(net=spec))):
            checkpoint = trained(original)
            before = torch.get_rng_state()
            rebuilt = NNModel.from_checkpoint(checkpoint)
            assert torch.equal(before, torch.get_rng_state())
            assert same(original, rebuilt)
            assert trained(rebuilt, data_id="again") is not None
    finally:
        unregister_model_factory("tests.mlp", 1)


def test_a_runtime_module_is_rebuilt_from_a_fresh_instance():
    original = NNModel(module=nn.Linear(4, 3), params=NNModelParams())
    checkpoint = trained(original)
    assert not checkpoint.reconstructible
    with pytest.raises(MissingModelFactoryError, match="module="):
        NNModel.from_checkpoint(checkpoint)
    with pytest.raises(ValueError, match="another topology"):
        NNModel.from_checkpoint(checkpoint, module=nn.Linear(4, 2))
    assert same(original, NNModel.from_checkpoint(checkpoint, module=nn.Linear(4, 3)))
    with pytest.raises(ValueError, match="builds its own"):
        NNModel.from_checkpoint(trained(model()), module=nn.Linear(4, 3))
    with pytest.raises(ValueError, match="no such checkpoint"):
        NNModel.from_checkpoint(None)


def test_device_and_precision_can_be_replaced():
    checkpoint = trained(model(mixed_precision=True))
    policy = PrecisionPolicy(mode="bf16")
    rebuilt = NNModel.from_checkpoint(checkpoint, Devices.CPU, precision=policy)
    assert rebuilt.params.precision == policy
    assert not rebuilt.params.mixed_precision
    assert rebuilt.resolved_precision.effective == "bf16"


def test_submodules_added_to_the_net_can_be_left_out():
    original = model()
    original.net.extra = nn.Linear(3, 3)
    checkpoint = trained(original)
    with pytest.raises(ValueError, match=r"exclude_submodules=\('extra',\)"):
        NNModel.from_checkpoint(checkpoint)
    with pytest.raises(ValueError, match="'other'.*does not hold"):
        NNModel.from_checkpoint(checkpoint, exclude_submodules=("other",))
    rebuilt = NNModel.from_checkpoint(checkpoint, exclude_submodules=("extra",))
    assert torch.equal(rebuilt.net.layers[0].weight, original.net.layers[0].weight)


# Weights and exchange ----------------------------------------------------------------------


def test_exported_weights_are_a_plain_state_dict(tmp_path):
    original = model()
    path = str(tmp_path / "weights.pt")
    assert original.export_state_dict(path) == path
    loaded = torch.load(path, weights_only=True)
    assert loaded.keys() == original.net.state_dict().keys()


def test_freezing_by_pattern_counts_what_changed():
    net = model()
    assert net.freeze("layers.0.*") == 2
    assert net.freeze("layers.0.*") == 0
    assert not net.net.layers[0].weight.requires_grad
    assert net.unfreeze("*") == 2


@pytest.mark.parametrize(
    ("exporter", "call", "extra"),
    [
        ("onnx", lambda m: m.to_onnx("m.onnx", torch.zeros(1, 4)), "onnx"),
        ("hub.save_pretrained", lambda m: m.save_pretrained("d"), None),
        ("hub.push_to_hub", lambda m: m.push_to_hub("a/b"), None),
        ("hub.from_pretrained", lambda m: NNModel.from_pretrained("d"), None),
    ],
)
def test_what_an_exporter_does_names_how_to_get_it(exporter, call, extra, tmp_path):
    if (exporter, 1) in manager.registry("exporter"):
        pytest.skip(f"{exporter} is installed")
    with pytest.raises(ImportError) as caught:
        call(model())
    what = f"needs the exporter {exporter!r}. That"
    assert siblings.how_to_get(what, "nnx-hub", extra) in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_exporter_gets_the_model_and_its_arguments():
    seen = []
    registry = manager.registry("exporter")
    if ("onnx", 1) in registry:
        pytest.skip("the real exporter is installed")

    def export(model, path, **options):
        seen.append((model, path, options))
        return path

    registry.register("onnx", 1, export, owner="tests")
    try:
        net, example = model(), torch.zeros(1, 4)
        assert net.to_onnx("m.onnx", example, dynamic_batch=False) == "m.onnx"
    finally:
        registry.unregister("onnx", 1)
    assert seen[0][0] is net
    assert seen[0][2]["example_input"] is example
    assert seen[0][2]["dynamic_batch"] is False
    assert seen[0][2]["opset_version"] == 17
