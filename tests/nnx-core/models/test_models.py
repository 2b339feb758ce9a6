"""Any module can be a model: built by a registered factory or borrowed as it is."""

from __future__ import annotations

import random
import subprocess
import sys
import types

import numpy
import pytest
import torch
from nnx.enums import Nets
from nnx.models import (
    BatchAdapter,
    KeywordInputs,
    MissingModelFactoryError,
    ModelSpec,
    ModuleInputs,
    PositionalInputs,
    RuntimeModule,
    adapter_for,
    build_module,
    check_state_topology,
    check_topology,
    module_topology,
    register_model_factory,
    registered_model_factories,
    resolve_model_factory,
    state_topology,
    unregister_model_factory,
)
from nnx.nets import FeedFwdNN
from nnx.params import NNModelParams, NNParams
from torch import nn


class Encoder(nn.Module):
    def __init__(self, width=4, scales=()):
        super().__init__()
        self.body = nn.Linear(3, width)
        self.noise = [random.random(), float(numpy.random.rand())]
        self.scales = scales


@pytest.fixture
def encoder():
    register_model_factory("test.encoder", 1, lambda config: Encoder(**config))
    yield ModelSpec("test.encoder", 1, {"width": 5, "scales": [1, 2]}, seed=3)
    unregister_model_factory("test.encoder", 1)


def test_a_spec_builds_the_same_weights_and_moves_no_stream(encoder):
    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
    expected = random.random(), numpy.random.rand(), torch.rand(2)
    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
    one = build_module(encoder)
    after = random.random(), numpy.random.rand(), torch.rand(2)
    assert after[:2] == expected[:2]
    assert torch.equal(after[2], expected[2])
    two = build_module(encoder)
    assert torch.equal(one.body.weight, two.body.weight)
    assert one.noise == two.noise
    assert one.scales == (1, 2)  # lists arrive as tuples
    torch.manual_seed(3)
    assert torch.equal(one.body.weight, nn.Linear(3, 5).weight)
    other = build_module(ModelSpec("test.encoder", 1, {"width": 5}, seed=4))
    assert not torch.equal(one.body.weight, other.body.weight)


def test_the_config_cannot_be_changed_by_the_factory(encoder):
    def greedy(config):
        config["width"] = 7

    register_model_factory("test.greedy", 1, greedy)
    try:
        with pytest.raises(TypeError):
            build_module(ModelSpec("test.greedy", 1, {"width": 1}))
    finally:
        unregister_model_factory("test.greedy", 1)


def test_streams_come_back_when_a_factory_fails():
    def fail(config):
        torch.rand(1), random.random()
        raise RuntimeError("no")

    register_model_factory("test.fail", 1, fail)
    torch.manual_seed(0), random.seed(0)
    states = torch.get_rng_state(), random.getstate()
    try:
        with pytest.raises(RuntimeError, match="no"):
            build_module(ModelSpec("test.fail"))
    finally:
        unregister_model_factory("test.fail", 1)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()


def test_an_unknown_version_names_the_registered_ones(encoder):
    register_model_factory("test.encoder", 4, lambda config: Encoder())
    try:
        with pytest.raises(MissingModelFactoryError, match=r"test.encoder@v2.*versions.*1, 4"):
            build_module(ModelSpec("test.encoder", 2))
    finally:
        unregister_model_factory("test.encoder", 4)
    assert issubclass(MissingModelFactoryError, ValueError)


def test_an_unknown_id_names_close_ones_and_how_to_register(encoder):
    with pytest.raises(
        MissingModelFactoryError,
        match=r"did you mean 'test.encoder'.*register_model_factory\('test.encodr', 1, factory\)",
    ):
        resolve_model_factory(ModelSpec("test.encodr"))


def test_a_factory_must_return_a_module():
    register_model_factory("test.none", 1, lambda config: None)
    try:
        with pytest.raises(TypeError, match=r"test.none@v1 must return a torch.nn.Module.*None"):
            build_module(ModelSpec("test.none"))
    finally:
        unregister_model_factory("test.none", 1)


def test_registration_is_listed_refused_twice_and_replaceable(encoder):
    assert ("test.encoder", 1) in registered_model_factories()
    with pytest.raises(ValueError, match=r"already registered by.*test_models"):
        register_model_factory("test.encoder", 1, Encoder)
    register_model_factory("test.encoder", 1, lambda config: nn.Identity(), replace=True)
    assert type(build_module(encoder)) is nn.Identity
    assert unregister_model_factory("test.encoder", 1)
    assert not unregister_model_factory("test.encoder", 1)
    with pytest.raises(TypeError, match="callable of one config mapping, not str"):
        register_model_factory("test.encoder", 1, "acme:build")


# -- topology ------------------------------------------------------------------------


def layers(p=0.1, width=4, dtype=torch.float32):
    return nn.Sequential(nn.Linear(3, width, dtype=dtype), nn.Dropout(p))


def test_one_architecture_has_one_fingerprint_whatever_the_weights():
    assert module_topology(layers()) == module_topology(layers())
    assert RuntimeModule.of(layers()) == RuntimeModule.of(layers())
    assert RuntimeModule.of(layers()).module == "torch.nn.modules.container.Sequential"


@pytest.mark.parametrize(
    "other",
    [
        layers(p=0.2),
        layers(width=5),
        layers(dtype=torch.float64),
        nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1), nn.Identity()),
        nn.ModuleDict({"0": nn.Linear(3, 4), "x": nn.Dropout(0.1)}),
    ],
)
def test_another_architecture_has_another_fingerprint(other):
    assert module_topology(other) != module_topology(layers())


class WithHook(nn.Module):
    def extra_repr(self):
        return f"hook={object()}"


def test_a_fingerprint_is_equal_in_every_process():
    code = (
        "import torch.nn as nn\n"
        "from nnx.utils.topology import module_topology\n"
        "class WithHook(nn.Module):\n"
        "    def extra_repr(self): return f'hook={object()}'\n"
        "print(module_topology(nn.Sequential(nn.Linear(2, 2), WithHook())))"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        for _ in range(2)
    }
    assert printed == {module_topology(nn.Sequential(nn.Linear(2, 2), WithHook()))}


def test_a_lazy_layer_has_a_fingerprint_before_its_shapes():
    lazy = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    assert module_topology(lazy) == module_topology(
        nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    )
    before = module_topology(lazy)
    lazy(torch.randn(2, 3))
    assert module_topology(lazy) != before


def test_saved_weights_are_compared_before_any_is_loaded():
    module = layers()
    check_state_topology(module, layers().state_dict())
    with pytest.raises(ValueError, match=r"the factory.*0.weight is \(4, 3\) but \(5, 3\)"):
        check_state_topology(module, layers(width=5).state_dict(), what="the factory")
    state = layers().state_dict()
    state["extra"] = state.pop("0.bias")
    with pytest.raises(ValueError, match=r"0.bias is not in the checkpoint; extra is only in the"):
        check_state_topology(module, state)


def test_an_uninitialized_layer_fits_any_saved_shape():
    lazy = nn.Sequential(nn.LazyLinear(4))
    state = nn.Sequential(nn.Linear(9, 4)).state_dict()
    assert state_topology(lazy) == {"0.weight": None, "0.bias": None}
    check_state_topology(lazy, state)
    lazy.load_state_dict(state)
    assert torch.equal(lazy[0].weight, state["0.weight"])


def model_of(net, descriptor, transforms=()):
    return types.SimpleNamespace(
        net=net,
        params=NNModelParams(net=descriptor),
        transforms=transforms,
        recorded_topology=state_topology(net),
    )


SHAPE = NNParams(input_dim=4, output_dim=2, hidden_dims=[6], dropout_prob=0.0)


def builtin():
    return model_of(FeedFwdNN(SHAPE), Nets.FEED_FWD)


def test_an_unchanged_net_passes_the_guard(encoder):
    check_topology(builtin())
    check_topology(model_of(build_module(encoder), encoder))


def test_an_unrecorded_change_is_refused_with_the_way_out():
    model = builtin()
    model.net.layers[0] = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 6))
    with pytest.raises(
        ValueError, match=r"layers.0.weight.*TransformRecipe.*NNModel\(module=net, ...\)"
    ):
        check_topology(model)
    model.recorded_topology = state_topology(model.net)  # what a recipe does
    check_topology(model)


def test_surgery_that_keeps_the_params_true_passes():
    model = builtin()
    wider = NNParams(input_dim=4, output_dim=2, hidden_dims=[9], dropout_prob=0.0)
    model.net = FeedFwdNN(wider)
    state = torch.get_rng_state()
    check_topology(model)
    assert torch.equal(torch.get_rng_state(), state)
    model.net.params = SHAPE
    with pytest.raises(ValueError, match="without a record"):
        check_topology(model)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (lambda m: torch.nn.utils.prune.l1_unstructured(m, "weight", 0.5), "prune.remove"),
        (torch.nn.utils.weight_norm, "remove_weight_norm"),
        (torch.nn.utils.spectral_norm, "remove_spectral_norm"),
        (torch.nn.utils.parametrizations.weight_norm, "remove_parametrizations"),
        (torch.nn.utils.parametrizations.orthogonal, "remove_parametrizations"),
    ],
)
def test_masks_and_parametrizations_are_refused_except_on_a_borrowed_module(wrap, message):
    model = builtin()
    wrap(model.net.layers[0])
    with pytest.raises(ValueError, match=rf"layers.0 .*torch.nn.utils.*{message}"):
        check_topology(model)
    check_topology(model_of(model.net, RuntimeModule.of(model.net)))


# -- batches -------------------------------------------------------------------------

A, B, Y = torch.zeros(2, 3), torch.ones(2, 1), torch.tensor([0, 1])


def test_positional_batches():
    assert PositionalInputs().split((A, Y)) == ((A,), {}, Y)
    assert PositionalInputs(2).split([A, B, Y]) == ((A, B), {}, Y)
    assert PositionalInputs(2).split((A, B)) == ((A, B), {}, None)
    assert PositionalInputs().split(A) == ((A,), {}, None)
    assert PositionalInputs(2).inputs((A, B)) == ((A, B), {})


@pytest.mark.parametrize("batch", [(A, B, B, Y), {"x": A}, A, "ab", (A,)])
def test_a_batch_of_another_layout_is_refused_by_name(batch):
    with pytest.raises(ValueError, match=r"PositionalInputs\(2\) expects a batch of 2 input"):
        PositionalInputs(2).split(batch)


@pytest.mark.parametrize("n", [0, -1, True, 1.0, "1"])
def test_a_count_of_inputs_is_an_integer_of_at_least_one(n):
    with pytest.raises(ValueError, match="n_inputs must be an integer >= 1"):
        PositionalInputs(n)


def test_keyword_batches():
    adapter = KeywordInputs(("input_ids", "attention_mask"))
    batch = {"input_ids": A, "attention_mask": B, "labels": Y, "length": 3}
    inputs = {"input_ids": A, "attention_mask": B}
    assert adapter.split(batch) == ((), inputs, Y)
    assert adapter.split(inputs) == ((), inputs, None)
    assert adapter.inputs(batch) == ((), inputs)
    assert KeywordInputs(["input_ids"], target=None).split(batch) == ((), {"input_ids": A}, None)
    assert KeywordInputs(["input_ids"], target="y").split({"input_ids": A, "y": B})[2] is B
    with pytest.raises(ValueError, match=r"lacks the input\(s\) \['attention_mask'\].*labels"):
        adapter.split({"input_ids": A, "labels": Y})
    with pytest.raises(ValueError, match="expects a mapping, got a tuple of 2"):
        adapter.split((A, Y))


@pytest.mark.parametrize(
    ("inputs", "target", "message"),
    [
        ((), "labels", "at least one"),
        (("a", "a"), "labels", "repeats a name"),
        (("a",), "a", "not an input"),
        ((1,), "labels", "at least one"),
        (("a",), 3, "must be a string"),
    ],
)
def test_keyword_inputs_are_checked(inputs, target, message):
    with pytest.raises(ValueError, match=message):
        KeywordInputs(inputs, target)


class Logits:
    def __init__(self, logits):
        self.logits = logits


def test_outputs_are_tensors_unless_an_adapter_extracts_one():
    class First(PositionalInputs):
        def output(self, raw):
            return raw.logits

    assert PositionalInputs().output(A) is A
    assert First().output(Logits(A)) is A
    with pytest.raises(ValueError, match=r"returned Logits, not a tensor.*raw\.logits"):
        PositionalInputs().output(Logits(A))


class Declares(nn.Module):
    def unpack_batch(self, batch):
        return batch["x"], batch["y"]


def test_a_module_keeps_its_own_layout_unless_an_adapter_is_given():
    own = adapter_for(Declares())
    assert isinstance(own, ModuleInputs)
    assert own.split({"x": A, "y": Y}) == ((A,), {}, Y)
    assert own.split({"x": (A, B), "y": Y}) == ((A, B), {}, Y)
    assert own.split({"x": {"ids": A}, "y": Y}) == ((), {"ids": A}, Y)
    given = KeywordInputs(["x"], target="y")
    assert adapter_for(Declares(), given) is given
    assert isinstance(adapter_for(nn.Linear(1, 1)), PositionalInputs)
    with pytest.raises(TypeError, match="BatchAdapter, not function"):
        adapter_for(nn.Linear(1, 1), lambda batch: batch)


class Forwards(nn.Module):
    """A wrapper that forwards what it does not have, like torch's compiled modules."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


def test_a_wrapper_forwards_the_layout():
    assert isinstance(adapter_for(Forwards(Declares())), ModuleInputs)
    assert isinstance(adapter_for(Forwards(nn.Linear(1, 1))), PositionalInputs)
    late = nn.Linear(1, 1)
    late.unpack_batch = lambda batch: (A, Y)
    assert adapter_for(late).split(None) == ((A,), {}, Y)


def test_an_adapter_of_ones_own_says_what_is_missing():
    class Mine(BatchAdapter):
        pass

    with pytest.raises(NotImplementedError, match=r"Mine must implement split"):
        Mine().split((A, Y))
    assert Mine().inputs((A, B)) == ((A, B), {})
