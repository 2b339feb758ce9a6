"""One report of everything that a plugin promises and does not keep."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nnx.plugins import manager
from nnx.plugins.testing import contributions, reload
from nnx.plugins.testing.problems import Problems
from nnx.utils.jsonlike import freeze_mapping

# Kinds whose ids a run stores or a program asks for, so that they need a namespace.
NAMESPACED = (
    "model factory", "optimizer factory", "objective", "loss", "scheduler", "metric", "exporter",
    "transform",
)  # fmt: skip
RESERVED = ("nnx.", "torchao.")


@dataclass(frozen=True, slots=True)
class Report:
    """What was checked, what could not be, and what is wrong."""

    plugin: str
    checked: tuple[str, ...]
    skipped: tuple[str, ...]
    problems: tuple[str, ...]

    def check(self) -> None:
        """Raise ``AssertionError`` with every problem, if there is one."""
        if self.problems:
            lines = "".join(f"\n  - {problem}" for problem in self.problems)
            raise AssertionError(f"the plugin {self.plugin!r} does not conform:{lines}")


def check_plugin(
    name: str,
    *,
    prefix: str | None = None,
    configs: Mapping[str, Mapping[str, Any]] | None = None,
    batches: Mapping[str, tuple[Any, Any]] | None = None,
    train: bool = True,
) -> Report:
    """Check an installed plugin, by the name of its entry point.

    - It loads, and everything that it contributes can be imported.
    - Its ids begin with ``prefix`` (or, without one, have some namespace of their own).
    - A fresh process that imports ``nnx`` or lists the commands imports nothing
      heavy (torch, NumPy, pandas, ...) because of it.
    - ``configs`` (by id; ``{}`` where none is given) are JSON-like, and a factory
      called with one returns what its registry promises, leaves the process as it
      was and gives the same again.
    - Unless ``train`` is off: a run that uses its model factories, optimizers and
      metrics is reloaded and printed by a process without the plugin and without a
      network, and a resume equals the run that was never interrupted.

    ``batches`` holds ``(X, y)`` for model factories that do not take 6 features and
    return 3 logits. For an exporter, ``configs`` are its options, for a transform,
    those of the replay. Runs go to ``$NNX_RUNS`` or ``./runs``: see the fixture
    ``nnx_runs``.
    """
    found = next((p for p in manager.default().plugins if p.name == name), None)
    if found is None:
        known = ", ".join(p.name for p in manager.default().plugins) or "none"
        return Report(name, (), (), (f"no plugin {name!r} is installed (installed: {known})",))
    if found.status != "loaded":
        reason = found.error or f"switched off by {manager.SELECT_VARIABLE}"
        return Report(name, (), (), (f"it is not loaded: {reason}",))

    configs, batches = configs or {}, batches or {}
    problems: Problems = [] if found.contributes else ["it contributes nothing"]
    problems += _check_names(found, prefix)
    problems += _check_lazy(found)
    problems += _check_configs(found, configs)
    checked: list[str] = []
    skipped: list[str] = []
    for kind, id, version in _keys(found):
        label = f"{kind} {id}" + (f"@v{version}" if kind in contributions.VERSIONED else "")
        outcome = contributions.check(kind, id, version, label, configs.get(id), batches.get(id))
        if outcome is None:
            skipped.append(f"{label}: give its options in configs")
            continue
        problems += outcome
        checked.append(label)
    problems += [
        f"the public name {public!r} cannot be imported: {error}"
        for public in found.contributes.get("name", ())
        if (error := _import_error(public)) is not None
    ]
    if train and not problems:
        problems += reload.check(found, _keys(found), configs, batches)
    return Report(name, tuple(sorted(checked)), tuple(skipped), tuple(problems))


def _keys(plugin: manager.LoadedPlugin) -> list[tuple[str, str, int]]:
    """Kind, id and version of all that the plugin registered."""
    return [
        (kind, id, version)
        for kind, registry in manager.default().registries.items()
        for id, version in registry
        if registry.owner(id, version) == plugin.owner
    ]


def _check_names(plugin: manager.LoadedPlugin, prefix: str | None) -> Problems:
    problems = []
    for kind, id, _ in _keys(plugin):
        if kind in NAMESPACED:
            if id.startswith(RESERVED):
                problems.append(f"the {kind} id {id!r} lies in a namespace of NNx")
            elif prefix is not None and not id.startswith(prefix):
                problems.append(f"the {kind} id {id!r} does not begin with {prefix!r}")
            elif not re.fullmatch(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)+", id):
                problems.append(
                    f"the {kind} id {id!r} has no namespace: write it as 'yours.{id.strip('.')}'"
                )
        elif kind == "command" and not re.fullmatch(r"[a-z][a-z0-9-]*", id):
            problems.append(f"the command {id!r} is not lower case words with hyphens")
    return problems


def _check_lazy(plugin: manager.LoadedPlugin) -> Problems:
    """What a fresh process imports because of the plugin."""
    environment = {**os.environ, manager.SELECT_VARIABLE: plugin.name}
    done = subprocess.run(
        [sys.executable, "-c", _LAZY, plugin.name],
        env=environment, text=True, capture_output=True,
    )  # fmt: skip
    if done.returncode:
        return [f"a fresh process that imports nnx fails: {done.stderr.strip()}"]
    at_load, for_commands = json.loads(done.stdout.splitlines()[-1])
    problems = []
    if at_load:
        problems.append(
            f"{plugin.reference} imports {', '.join(at_load)} when it is loaded, which every "
            "`import nnx` then pays for: name things as 'package.module:attribute' and import "
            "them inside functions"
        )
    if for_commands:
        problems.append(
            f"its commands import {', '.join(for_commands)} before they run, which `nnx --help` "
            "then pays for: import inside the command's function"
        )
    return problems


_LAZY = """
import json, sys
import nnx
from nnx.plugins import manager
plugins = manager.default()
plugin = next(p for p in plugins.plugins if p.name == sys.argv[1])
before = {m for m in manager.HEAVY_MODULES if m in sys.modules}
for id, version in plugins.registry("command"):
    if plugins.registry("command").owner(id, version) == plugin.owner:
        plugins.registry("command").resolve(id, version)
after = [m for m in manager.HEAVY_MODULES if m in sys.modules and m not in before]
print(json.dumps([plugin.heavy_modules, after]))
"""


def _check_configs(
    plugin: manager.LoadedPlugin, configs: Mapping[str, Mapping[str, Any]]
) -> Problems:
    ids = {id for _, id, _ in _keys(plugin)}
    problems = [
        f"configs names {id!r}, which it does not contribute" for id in configs.keys() - ids
    ]
    for id, config in configs.items():
        try:
            freeze_mapping(config, f"the config of {id!r}")
        except (TypeError, ValueError) as error:
            problems.append(f"the config of {id!r} is not JSON-like: {error}")
    return sorted(problems)


def _import_error(public: str) -> Exception | None:
    try:
        manager.default().public_name(public)
    except Exception as error:
        return error
    return None
