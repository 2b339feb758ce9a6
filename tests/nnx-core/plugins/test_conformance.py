"""The check that authors run: what it finds, and that it finds nothing in a good plugin."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Callable

import numpy as np
import pytest
import torch
from nnx.plugins import PluginManager, UnknownIdError
from nnx.plugins.testing import Report, check_plugin, side_effects
from nnx.plugins.testing.fixtures import nnx_plugins, nnx_runs, nnx_training  # noqa: F401

Install = Callable[..., None]
Run = Callable[..., subprocess.CompletedProcess[str]]

# A plugin that breaks every promise, each in its own way.
SLOPPY = """
    import numpy  # at import time
    from nnx.plugins import hookimpl

    @hookimpl
    def nnx_model_factories():
        return {("wobbly", 1): "sloppy_parts:wobbly", ("nnx.sloppy", 1): "sloppy_parts:module"}

    @hookimpl
    def nnx_optimizer_factories():
        return {
            ("sloppy.forgets", 1): "sloppy_parts:forgets",
            ("sloppy.rates", 1): "sloppy_parts:rates",
            ("sloppy.wrong", 1): "sloppy_parts:wrong",
        }

    @hookimpl
    def nnx_objectives():
        return {("sloppy.seeds", 1): "sloppy_parts:seeds"}

    @hookimpl
    def nnx_metrics():
        return {
            ("sloppy.mean", 1): "sloppy_parts:MEAN",
            ("sloppy.renamed", 1): "sloppy_parts:RENAMED",
            ("sloppy.number", 1): "sloppy_parts:NUMBER",
        }

    @hookimpl
    def nnx_exporters():
        return {"sloppy.export": "sloppy_parts:export", "sloppy.lost": "sloppy_parts:lost"}

    @hookimpl
    def nnx_commands():
        return {"Sloppy_Command": "sloppy_commands:command"}

    @hookimpl
    def nnx_public_names():
        return {"Sloppy": "sloppy_parts:Sloppy"}
"""
PARTS = """
    import itertools, os, random
    import torch
    from nnx.monitors import MetricDefinition

    counter = itertools.count()

    def wobbly(config):
        net = torch.nn.Linear(6, 3)
        torch.nn.init.constant_(net.bias, next(counter))
        return net

    def module(config):
        return torch.nn.Module

    def forgets(groups, config):
        return torch.optim.SGD(groups[0]["params"][:1], lr=0.01, weight_decay=0.1)

    def rates(groups, config):
        torch.rand(1)
        return torch.optim.SGD(groups[0]["params"], lr=1.0)

    def wrong(groups, config):
        return "an optimizer"

    def seeds(config):
        os.environ["SLOPPY"] = "1"
        random.seed(0)

    class Mean:
        def __init__(self):
            self.values = []

        def update(self, target, prediction):
            self.values.append((target == prediction).mean())
            prediction[:] = 0

        def result(self):
            return float(sum(self.values) / len(self.values)) if self.values else None

    class Uneven(Mean):
        def update(self, target, prediction):
            self.values.append((target == prediction).mean())

        def merge(self, other):
            pass

    def define(id, kind):
        return MetricDefinition(
            id=id, version=1, input="labels", mode="max", factory=lambda config: kind()
        )

    MEAN = define("sloppy.mean", Mean)
    RENAMED = define("sloppy.other", Uneven)
    NUMBER = 0.5

    def export(model, path):
        model.net.eval()
        with torch.no_grad():
            next(model.net.parameters()).zero_()
        open(path, "w").close()
        return path

    def lost(model, path):
        return path
"""
COMMANDS = """
    import torch

    def command():
        pass
"""


def report_of(run: Run, call: str) -> dict[str, list[str]]:
    done = run(f"""
        import dataclasses, json, os, tempfile
        os.chdir(tempfile.mkdtemp())
        os.environ["NNX_TQDM_DISABLE"] = "1"
        from nnx.plugins.testing import check_plugin
        report = {call}
        print(json.dumps(dataclasses.asdict(report)))
    """)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_broken_promise_is_named(install: Install, run: Run) -> None:
    install("sloppy", SLOPPY)
    install("sloppy-parts", PARTS, plugin="other")
    install("sloppy-commands", COMMANDS, plugin="another")
    report = report_of(
        run, 'check_plugin("sloppy", configs={"sloppy.absent": {}, "sloppy.mean": {"x": {1, 2}}})'
    )
    problems = set(report["problems"])
    expected = {
        "the model factory id 'nnx.sloppy' lies in a namespace of NNx",
        "the model factory id 'wobbly' has no namespace: write it as 'yours.wobbly'",
        "the command 'Sloppy_Command' is not lower case words with hyphens",
        "sloppy imports numpy when it is loaded, which every `import nnx` then pays for: name "
        "things as 'package.module:attribute' and import them inside functions",
        "its commands import torch before they run, which `nnx --help` then pays for: import "
        "inside the command's function",
        "configs names 'sloppy.absent', which it does not contribute",
        "model factory wobbly@v1 builds different weights from one seed",
        "model factory nnx.sloppy@v1 fails with {}: TypeError: the model factory nnx.sloppy@v1 "
        "must return a torch.nn.Module, not type",
        "optimizer factory sloppy.forgets@v1 fails with {}: ValueError: the optimizer factory "
        "sloppy.forgets@v1 must return an optimizer over exactly the parameters it was given; "
        "the one it returned lacks bias",
        "optimizer factory sloppy.rates@v1 changed torch's random stream",
        "optimizer factory sloppy.rates@v1 does not keep the groups' lr and weight_decay: "
        "(0.01, 0.1) became (1.0, 0)",
        "optimizer factory sloppy.wrong@v1 fails with {}: TypeError: the optimizer factory "
        "sloppy.wrong@v1 must return a torch.optim.Optimizer, not 'an optimizer'",
        "objective sloppy.seeds@v1 fails with {}: TypeError: the objective factory "
        "sloppy.seeds@v1 of plugin 'sloppy' (sloppy) must return an objective, a callable of one "
        "ObjectiveContext, not NoneType",
        "metric sloppy.renamed@v1 is defined as sloppy.other@v1: the two must agree",
        "metric sloppy.number@v1 must be a MetricDefinition, not float",
        "exporter sloppy.export changes the model's weights",
        "exporter sloppy.export leaves the model in another mode",
        "command Sloppy_Command has no docstring, which is its help",
    }
    assert expected - problems == set()
    rest = sorted(problems - expected)
    starts = (
        "exporter sloppy.lost fails with {}: TypeError: the exporter 'sloppy.lost' of plugin "
        "'sloppy' (sloppy) must return the path that it wrote, not ",
        "metric sloppy.renamed@v1: merge() gives ",
        "metric sloppy.renamed@v1: two updates gives ",
        "the config of 'sloppy.mean' is not JSON-like: ",
        "the public name 'Sloppy' cannot be imported: 'Sloppy' of plugin 'sloppy' (sloppy) "
        "cannot be imported from 'sloppy_parts:Sloppy'",
    )
    assert [a.startswith(b) for a, b in zip(rest, starts)] == [True] * len(starts), rest
    assert len(rest) == len(starts)


def test_state_outside_the_state_dict_is_found_by_resuming(install: Install, run: Run) -> None:
    install(
        "acme-sticky",
        """
        from nnx.plugins import hookimpl

        @hookimpl
        def nnx_optimizer_factories():
            return {("acme.sticky", 1): "acme_sticky:build"}

        def build(groups, config):
            import torch

            class Sticky(torch.optim.SGD):
                steps = 0  # forgotten by state_dict()

                def step(self, closure=None):
                    self.steps += 1
                    for group in self.param_groups:
                        group["lr"] = 0.01 / self.steps
                    return super().step(closure)

            return Sticky(groups)
        """,
    )
    report = report_of(run, 'check_plugin("acme-sticky")')
    assert report["problems"] == [
        "a run with acme.sticky@v1 that is resumed ends with other weights than one that is not: "
        "something it needs is not in its state_dict()"
    ]


def test_a_plugin_that_is_absent_failed_or_off_is_said_to_be(install: Install, run: Run) -> None:
    assert (
        check_plugin("acme-nothing")
        .problems[0]
        .startswith("no plugin 'acme-nothing' is installed (installed: ")
    )
    install("acme-broken", "raise RuntimeError('no licence found')\n")
    assert report_of(run, 'check_plugin("acme-broken")')["problems"] == [
        "it is not loaded: RuntimeError: no licence found"
    ]


def test_a_report_raises_all_of_its_problems_at_once() -> None:
    Report("acme", ("metric acme.kappa@v1",), (), ()).check()
    with pytest.raises(AssertionError) as raised:
        Report("acme", (), (), ("one", "two")).check()
    assert str(raised.value) == "the plugin 'acme' does not conform:\n  - one\n  - two"


@pytest.mark.parametrize(
    ("act", "what"),
    [
        (lambda: random.random(), "Python's random stream"),
        (lambda: np.random.rand(), "NumPy's random stream"),
        (lambda: torch.rand(1), "torch's random stream"),
        (lambda: os.environ.update(ACME="1"), "the environment variables"),
    ],
)
def test_a_side_effect_is_named(
    act: Callable[[], object], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACME", "0")
    with side_effects("acme") as found:
        act()
    assert found == [f"acme changed {what}"]


def test_draws_can_be_allowed() -> None:
    with side_effects("acme", draws=True) as found:
        torch.rand(1)
    assert found == []


def test_what_a_test_registers_is_undone(nnx_plugins: PluginManager) -> None:  # noqa: F811
    registry = nnx_plugins.registry("metric")
    before = registry.keys()
    with nnx_plugins.restored():
        registry.register("acme.kappa", 1, object(), owner="a test")
        registry.unregister("accuracy", 1)
        assert registry.keys() != before
    assert registry.keys() == before
    with pytest.raises(UnknownIdError):
        registry.resolve("acme.kappa")


def test_a_training_of_a_test_keeps_its_runs_to_itself(nnx_training, nnx_runs) -> None:  # noqa: F811
    model, params = nnx_training(n_epochs=1)
    run = model.train(params)
    assert [path.name for path in nnx_runs.iterdir() if path.name == run.id] == [run.id]
