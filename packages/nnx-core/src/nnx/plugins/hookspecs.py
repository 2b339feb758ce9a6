"""The doors of NNx: what a plugin may contribute.

A plugin is a module (or object) named by an entry point of the group ``nnx``.
It implements any of these hooks with :data:`hookimpl` and returns *names*, as
``"package.module:attribute"`` references, or the objects themselves. A
reference is imported when the contribution is first used, so that a plugin
costs nothing until then.

A plugin may say which version of this page it is built for, by the attribute
``nnx_hookspec_version`` (1 when it says nothing). A newer one than
:data:`HOOKSPEC_VERSION` is refused as a whole, and so is a hook that is not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pluggy

GROUP = "nnx"
HOOKSPEC_VERSION = 2

hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)

Versioned = Mapping[tuple[str, int], Any]


@hookspec
def nnx_public_names() -> Mapping[str, str]:  # type: ignore[empty-body]
    """Names that ``from nnx import NAME`` finds: ``return {"Lion": "acme.lion:Lion"}``."""


@hookspec
def nnx_nets() -> Mapping[str, Any]:  # type: ignore[empty-body]
    """Builders of ``Nets`` members, by member value: ``return {"vit": "acme.vit:build"}``.

    A builder takes ``params=`` and returns an ``nn.Module``.
    """


@hookspec
def nnx_model_factories() -> Versioned:  # type: ignore[empty-body]
    """Factories of ``ModelSpec``: ``return {("acme.encoder", 1): "acme.nets:encoder"}``.

    A factory takes the spec's read-only config and returns an ``nn.Module``.
    """


@hookspec
def nnx_optimizer_factories() -> Versioned:  # type: ignore[empty-body]
    """Factories of ``OptimizerFactorySpec``: ``return {("acme.lion", 1): "acme.lion:build"}``.

    A factory takes the parameter groups and the read-only config and returns a
    ``torch.optim.Optimizer`` over exactly those parameters.
    """


@hookspec
def nnx_objectives() -> Versioned:  # type: ignore[empty-body]
    """Objective factories: ``return {("acme.focal", 1): "acme.losses:focal_objective"}``.

    A factory takes a read-only config and returns what ``NNModel.train(objective=)``
    takes. ``nnx.objectives.build_objective("acme.focal", config={...})`` calls it.
    """


@hookspec
def nnx_losses() -> Versioned:  # type: ignore[empty-body]
    """Factories of ``LossSpec``: ``return {("acme.tversky", 1): "acme.losses:tversky"}``.

    A factory takes the spec's read-only config and returns an ``nn.Module`` of raw outputs
    and targets, with nothing to train. Since version 2.
    """


@hookspec
def nnx_schedulers() -> Versioned:  # type: ignore[empty-body]
    """Factories of ``SchedulerSpec``: ``return {("acme.ramp", 1): "acme.schedules:ramp"}``.

    A factory takes the optimizer, the spec's read-only config and, when it has an end,
    ``steps``; it returns a torch ``LRScheduler``. Since version 2.
    """


@hookspec
def nnx_metrics() -> Versioned:  # type: ignore[empty-body]
    """Metric definitions: ``return {("acme.kappa", 1): "acme.metrics:KAPPA"}``.

    A definition is an ``nnx.monitors.MetricDefinition``.
    """


@hookspec
def nnx_exporters() -> Mapping[str, Any]:  # type: ignore[empty-body]
    """Exporters, by format: ``return {"onnx": "acme.export:to_onnx"}``.

    An exporter takes ``(model, path, **options)`` and returns the written path.
    ``NNModel.export(path, "acme.npz")`` calls it.
    """


@hookspec
def nnx_transforms() -> Versioned:  # type: ignore[empty-body]
    """Replays of recorded topology transforms: ``return {("acme.lora", 1): "acme.lora:replay"}``.

    A replay takes ``(net, options)`` and returns the transformed net. One that also has
    ``changes(net, options)`` yields ``(submodule, what)`` for each setting that a rebuild
    would not bring back; a checkpoint is then not written.
    """


@hookspec
def nnx_renderers() -> Mapping[str, Any]:  # type: ignore[empty-body]
    """Renderers, by purpose: ``return {"run.html": "acme.charts:run_chart"}``.

    The renderer ``"run.html"`` takes an ``NNRun`` and returns HTML for a notebook,
    ``"run.svg"`` the losses as an SVG for a model card, ``"run.page"`` takes ids and a path
    and writes a page about those runs.
    """


@hookspec
def nnx_commands() -> Mapping[str, Any]:  # type: ignore[empty-body]
    """Sub-commands of ``nnx``: ``return {"report": "acme.cli:report"}``.

    A command is a function with typer annotations, whose docstring is the help, or a
    ``typer.Typer`` with several of them.
    """
