"""Which distributions a run's registered parts came from.

A run stores ids and configs, never code. Its metadata also says who provided
each id, so that a place without that plugin can say what to install.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from nnx.plugins import manager
from nnx.plugins.hookspecs import GROUP
from nnx.store.metadata import read_metadata
from nnx.store.pointer import locate_run

KEY = "plugins"
_CORE = f"{GROUP}-core"


def record(state: Mapping[str, Any]) -> dict[str, str]:
    """``{"optimizer factory acme.lion@v1": "acme-lion 0.1.0"}`` of a run's state."""
    plugins = manager.default()
    found = {}
    for kind, id, version in _registered(state):
        plugin = plugins.provider(kind, id, version)
        if plugin is not None and plugin.distribution != _CORE:
            found[f"{kind} {id}@v{version}"] = f"{plugin.distribution} {plugin.version}"
    return found


def remember(run_id: str, metadata: Mapping[str, Any]) -> None:
    """Let later errors of unknown ids name what the run of ``metadata`` had used."""
    recorded = metadata.get(KEY)
    for name, release in recorded.items() if isinstance(recorded, Mapping) else ():
        kind, _, versioned = str(name).rpartition(" ")
        id = versioned.rpartition("@v")[0]
        if kind in manager.default().registries and id and isinstance(release, str):
            manager.default().remember(kind, id, release, where=f"Run {run_id}")


def remember_of(run_id: str, root: str | None = None) -> None:
    """The same for a run on disk; nothing when there is no such run."""
    paths = locate_run(run_id, root)
    if os.path.isfile(paths.metadata):
        remember(paths.id, read_metadata(paths))


def _registered(state: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str, int]]:
    """Kind, id and version of every registered part that a run's state names."""
    if isinstance(state, (list, tuple)):
        for item in state:
            yield from _registered(item, path)
    elif isinstance(state, Mapping):
        id = state.get("name" if path[-1:] == ("transforms",) else "id")
        kind = _KINDS.get(path[-1]) if path else None
        if path[-2:-1] == ("schedulers",):  # each under the name of its optimizer
            kind = _KINDS["schedulers"]
        if kind is not None and isinstance(id, str) and isinstance(state.get("version"), int):
            yield kind, id, state["version"]
        else:
            for key, value in state.items():
                yield from _registered(value, (*path, str(key)))


# The key of a run's state under which a descriptor lies, and the registry that it names.
_KINDS = {
    "net": "model factory",
    "loss": "loss",
    "scheduler": "scheduler",
    "schedulers": "scheduler",
    "factory": "optimizer factory",
    "metrics": "metric",
    "transforms": "transform",
}
