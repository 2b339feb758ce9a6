"""One contribution at a time: does calling it give what its registry promises?"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from nnx.plugins.manager import registry
from nnx.plugins.testing.problems import Problems, side_effects
from nnx.plugins.testing.training import tiny_training
from nnx.utils.jsonlike import FrozenDict, freeze_mapping

VERSIONED = (
    "model factory", "optimizer factory", "objective", "loss", "scheduler", "metric", "transform",
)  # fmt: skip


def check(
    kind: str,
    id: str,
    version: int,
    label: str,
    config: Mapping[str, Any] | None,
    batch: tuple[Any, Any] | None,
) -> Problems | None:
    """The problems of one contribution; ``None`` when it needs options that are not given."""
    try:
        with side_effects(f"importing {label}") as changed:
            value = registry(kind).resolve(id, version)
    except Exception as error:
        return [f"{label} cannot be resolved: {error}"]
    if kind == "transform" and config is None:
        return None
    try:
        frozen = freeze_mapping(config or {}, label)
    except (TypeError, ValueError):
        return []  # said once, of the config
    try:
        return changed + _CHECKS[kind](value, _Asked(id, version, label, frozen, batch))
    except Exception as error:
        given = dict(config or {})
        return [*changed, f"{label} fails with {given!r}: {type(error).__name__}: {error}"]


class _Asked:
    """What is checked, under which name and with what."""

    def __init__(
        self, id: str, version: int, label: str, config: FrozenDict, batch: tuple[Any, Any] | None
    ) -> None:
        self.id, self.version, self.label = id, version, label
        self.config, self.batch = config, batch


def _model_factory(factory: Any, asked: _Asked) -> Problems:
    import torch

    import nnx
    from nnx.models import build_module

    spec = nnx.ModelSpec(asked.id, asked.version, asked.config, seed=3)
    with side_effects(asked.label) as problems:
        first, second = build_module(spec), build_module(spec)
    one, other = first.state_dict(), second.state_dict()
    if one.keys() != other.keys() or any(not torch.equal(one[name], other[name]) for name in one):
        problems.append(f"{asked.label} builds different weights from one seed")
    shared = {id(p) for p in first.parameters()} & {id(p) for p in second.parameters()}
    if shared:
        problems.append(f"{asked.label} returns modules that share parameters")
    return problems


def _optimizer_factory(factory: Any, asked: _Asked) -> Problems:
    import torch

    import nnx
    from nnx.store.data import check_data

    spec = nnx.OptimizerFactorySpec(asked.id, asked.version, asked.config)
    params = nnx.NNOptimFactoryParams(factory=spec, max_lr=0.01, weight_decay=0.1)
    net = torch.nn.Linear(3, 2)
    before = copy.deepcopy(net.state_dict())
    with side_effects(asked.label) as problems:
        optimizer = nnx.build_optimizer(net, params)
        net(torch.ones(4, 3)).sum().backward()
    if any(not torch.equal(before[name], value) for name, value in net.state_dict().items()):
        problems.append(f"{asked.label} changes the parameters when it builds the optimizer")
    rates = {(group["lr"], group["weight_decay"]) for group in optimizer.param_groups}
    if rates != {(0.01, 0.1)}:
        problems.append(
            f"{asked.label} does not keep the groups' lr and weight_decay: (0.01, 0.1) became "
            f"{', '.join(map(str, sorted(rates)))}"
        )
    optimizer.step()
    try:
        check_data(optimizer.state_dict(), f"the state of {asked.label}")
    except TypeError as error:
        problems.append(f"{error}: a checkpoint could not hold it")
    return problems


def _objective(factory: Any, asked: _Asked) -> Problems:
    from nnx import build_objective

    with side_effects(asked.label) as problems:
        build_objective(asked.id, asked.version, asked.config)
    return problems


def _loss(factory: Any, asked: _Asked) -> Problems:
    import nnx

    spec = nnx.LossSpec(asked.id, asked.version, asked.config)
    with side_effects(asked.label) as problems:
        nnx.build_loss(spec)
    return problems


def _scheduler(factory: Any, asked: _Asked) -> Problems:
    import torch

    import nnx
    from nnx.registered_schedulers import build_registered
    from nnx.store.data import check_data

    spec = nnx.SchedulerSpec(asked.id, asked.version, asked.config)

    def build() -> tuple[Any, Any]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
        return optimizer, build_registered(optimizer, spec, 8)

    def rates(optimizer: Any, scheduler: Any, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    with side_effects(asked.label) as problems:
        whole = rates(*build(), 6)
        first, half = build()
        rates(first, half, 3)
        second, rest = build()
        second.load_state_dict(first.state_dict())
        rest.load_state_dict(half.state_dict())
        if rates(second, rest, 3) != whole[3:]:
            problems.append(f"{asked.label} does not go on from its state as if it never stopped")
    try:
        check_data(half.state_dict(), f"the state of {asked.label}")
    except TypeError as error:
        problems.append(f"{error}: a checkpoint could not hold it")
    return problems


def _metric(definition: Any, asked: _Asked) -> Problems:
    from nnx.monitors import MetricDefinition

    if not isinstance(definition, MetricDefinition):
        return [f"{asked.label} must be a MetricDefinition, not {type(definition).__name__}"]
    problems: Problems = []
    if (definition.id, definition.version) != (asked.id, asked.version):
        problems.append(
            f"{asked.label} is defined as {definition.id}@v{definition.version}: the two must agree"
        )
    with side_effects(asked.label) as changed:
        if definition.check_config is not None:
            definition.check_config(asked.config)
        problems += _accumulates(definition, asked)
    return problems + changed


def _accumulates(definition: Any, asked: _Asked) -> Problems:
    """One pass over samples, in one part, in two, and continued."""
    target, prediction = _samples(definition.input)
    kept = target.copy(), prediction.copy()

    def after(*parts: slice) -> Any:
        accumulator = definition.factory(asked.config)
        for part in parts:
            accumulator.update(target[part], prediction[part])
        return accumulator

    problems = []
    empty, whole = after().result(), after(slice(None)).result()
    for when, value in (("no sample", empty), ("64 samples", whole)):
        if value is not None and not isinstance(value, float):
            problems.append(
                f"{asked.label}: result() after {when} must be a float or None, not {value!r}"
            )
    if (target != kept[0]).any() or (prediction != kept[1]).any():
        problems.append(f"{asked.label}: update() changes the arrays that it is given")
    if problems or whole is None:
        return problems
    halves = slice(0, 24), slice(24, None)
    found = {"two updates": after(*halves).result()}
    if hasattr(definition.factory(asked.config), "merge"):
        left = after(halves[0])
        left.merge(after(halves[1]))
        found["merge()"] = left.result()
    if hasattr(definition.factory(asked.config), "load_state"):
        continued = definition.factory(asked.config)
        continued.load_state(after(halves[0]).state())
        continued.update(target[halves[1]], prediction[halves[1]])
        found["load_state()"] = continued.result()
    for how, value in found.items():
        if value is None or abs(value - whole) > 1e-6 * max(1.0, abs(whole)):
            problems.append(f"{asked.label}: {how} gives {value}, one update gives {whole}")
    return problems


def _samples(input: str) -> tuple[Any, Any]:
    import numpy as np

    generator = np.random.default_rng(0)
    if input == "continuous":
        return generator.normal(size=64), generator.normal(size=64)
    target = generator.integers(0, 3, 64)
    if input == "labels":
        return target, generator.integers(0, 3, 64)
    return target, generator.dirichlet(np.ones(3), size=64)


def _exporter(exporter: Any, asked: _Asked) -> Problems:
    import torch

    model, _ = tiny_training()
    model.net.train()
    before = copy.deepcopy(model.net.state_dict())
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "exported")
        with side_effects(asked.label) as problems:
            model.export(path, asked.id, **asked.config)
    after = model.net.state_dict()
    if before.keys() != after.keys() or any(not torch.equal(before[k], after[k]) for k in before):
        problems.append(f"{asked.label} changes the model's weights")
    if not all(module.training for module in model.net.modules()):
        problems.append(f"{asked.label} leaves the model in another mode")
    return problems


def _transform(replay: Any, asked: _Asked) -> Problems:
    import torch

    model, _ = tiny_training()
    with side_effects(asked.label) as problems:
        net = replay(model.net, asked.config)
    if not isinstance(net, torch.nn.Module):
        problems.append(f"{asked.label} must return an nn.Module, not {type(net).__name__}")
    return problems


def _command(command: Any, asked: _Asked) -> Problems:
    import inspect

    problems = []
    if not callable(command):
        return [f"{asked.label} must be a function, not {type(command).__name__}"]
    if not inspect.getdoc(command):
        problems.append(f"{asked.label} has no docstring, which is its help")
    return problems


def _called(value: Any, asked: _Asked) -> Problems:
    return [] if callable(value) else [f"{asked.label} must be callable, not {value!r}"]


_CHECKS: dict[str, Callable[[Any, _Asked], Problems]] = {
    "model factory": _model_factory,
    "optimizer factory": _optimizer_factory,
    "objective": _objective,
    "loss": _loss,
    "scheduler": _scheduler,
    "metric": _metric,
    "exporter": _exporter,
    "transform": _transform,
    "command": _command,
    "net": _called,
    "renderer": _called,
}
