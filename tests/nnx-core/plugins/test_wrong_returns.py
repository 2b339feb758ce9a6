"""A factory that returns the wrong thing is named, with what it must return, and nothing is left."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from nnx import (
    MetricSpec,
    ModelSpec,
    NNModel,
    NNModelParams,
    NNOptimFactoryParams,
    OptimizerFactorySpec,
    build_objective,
)
from nnx.plugins import LoadedPlugin, PluginManager, hookimpl
from nnx.plugins.testing import tiny_training
from nnx.plugins.testing.fixtures import nnx_plugins, nnx_runs  # noqa: F401


@hookimpl
def nnx_model_factories():
    return {("acme.net", 1): lambda config: "a net"}


@hookimpl
def nnx_optimizer_factories():
    def first_only(groups, config):
        return torch.optim.SGD(groups[0]["params"][:1], lr=0.1)

    return {("acme.word", 1): lambda groups, config: "Lion", ("acme.first", 1): first_only}


@hookimpl
def nnx_objectives():
    return {("acme.nothing", 1): lambda config: None}


@hookimpl
def nnx_metrics():
    return {("acme.kappa", 1): 0.5}


@hookimpl
def nnx_exporters():
    return {"acme.lost": lambda model, path: path, "acme.none": lambda model, path: None}


@pytest.fixture(autouse=True)
def _registered(nnx_plugins: PluginManager, nnx_runs: Path) -> None:  # noqa: F811
    names = ("model_factories", "optimizer_factories", "objectives", "metrics", "exporters")
    plugin = ModuleType("acme_wrong")
    for name in names:
        setattr(plugin, f"nnx_{name}", globals()[f"nnx_{name}"])
    loaded = LoadedPlugin("acme", "acme-wrong", "1.0", __name__)
    nnx_plugins.register(plugin, loaded)
    yield
    nnx_plugins._forget(plugin, loaded)


def refused(error: type[Exception], act) -> str:
    with pytest.raises(error) as raised:
        act()
    assert not Path("runs").exists()
    return str(raised.value)


def test_a_model_factory_must_return_a_module() -> None:
    message = refused(TypeError, lambda: NNModel(params=NNModelParams(net=ModelSpec("acme.net"))))
    assert message == "the model factory acme.net@v1 must return a torch.nn.Module, not str"


@pytest.mark.parametrize(
    ("id", "error", "message"),
    [
        (
            "acme.word",
            TypeError,
            "the optimizer factory acme.word@v1 must return a torch.optim.Optimizer, not 'Lion'",
        ),
        (
            "acme.first",
            ValueError,
            "the optimizer factory acme.first@v1 must return an optimizer over exactly the "
            "parameters it was given; the one it returned lacks layers.0.bias, layers.1.weight, "
            "layers.1.bias",
        ),
    ],
)
def test_an_optimizer_factory_must_return_an_optimizer_over_what_it_was_given(
    id: str, error: type[Exception], message: str
) -> None:
    factory = OptimizerFactorySpec(id, 1)
    model, params = tiny_training(optim=NNOptimFactoryParams(factory=factory, max_lr=0.1))
    assert refused(error, lambda: model.train(params)) == message


def test_an_objective_factory_must_return_an_objective() -> None:
    assert refused(TypeError, lambda: build_objective("acme.nothing")) == (
        "the objective factory acme.nothing@v1 of plugin 'acme' (acme-wrong) must return an "
        "objective, a callable of one ObjectiveContext, not NoneType"
    )


def test_a_metric_must_be_a_definition() -> None:
    model, params = tiny_training(metrics=[MetricSpec("acme.kappa")])
    assert refused(TypeError, lambda: model.train(params)) == (
        "the metric acme.kappa@v1 of plugin 'acme' (acme-wrong) must be an "
        "nnx.monitors.MetricDefinition, not float"
    )


@pytest.mark.parametrize(
    ("format", "returned"), [("acme.lost", "'out.bin'"), ("acme.none", "None")]
)
def test_an_exporter_must_return_what_it_wrote(format: str, returned: str) -> None:
    model, _ = tiny_training()
    assert refused(TypeError, lambda: model.export("out.bin", format)) == (
        f"the exporter {format!r} of plugin 'acme' (acme-wrong) must return the path that it "
        f"wrote, not {returned}"
    )
