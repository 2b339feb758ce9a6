"""Discovery: entry points of the group ``nnx`` become registered plugins."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pluggy

from nnx.plugins import hookspecs
from nnx.plugins.registry import Registry, load_reference

SELECT_VARIABLE = "NNX_PLUGINS"


class PluginWarning(UserWarning):
    """A plugin that could not be loaded; NNx goes on without it."""


@dataclass(slots=True)
class LoadedPlugin:
    """One entry point and what became of it."""

    name: str
    distribution: str
    version: str
    reference: str
    status: str = "loaded"  # loaded | failed | off
    error: str | None = None
    seconds: float = 0.0
    heavy_modules: tuple[str, ...] = ()
    contributes: dict[str, tuple[str, ...]] = field(default_factory=dict)


HEAVY_MODULES = ("torch", "numpy", "pandas", "transformers", "plotly", "torch_geometric", "sklearn")

# Hook name -> the registry it fills. Unversioned hooks register as version 1.
_HOOKS = {
    "nnx_nets": "net",
    "nnx_model_factories": "model factory",
    "nnx_optimizer_factories": "optimizer factory",
    "nnx_objectives": "objective",
    "nnx_metrics": "metric",
    "nnx_exporters": "exporter",
    "nnx_transforms": "transform",
    "nnx_renderers": "renderer",
    "nnx_commands": "command",
}


class PluginManager:
    """The registries and the plugins that filled them."""

    def __init__(self) -> None:
        self._pluggy = pluggy.PluginManager(hookspecs.GROUP)
        self._pluggy.add_hookspecs(hookspecs)
        self.registries: dict[str, Registry[Any]] = {k: Registry(k) for k in _HOOKS.values()}
        self.plugins: list[LoadedPlugin] = []
        self._names: dict[str, tuple[str, str]] = {}  # public name -> (reference, owner)

    def registry(self, kind: str) -> Registry[Any]:
        """The registry of ``kind`` ("net", "model factory", "metric", ...)."""
        return self.registries[kind]

    def discover(self, entry_points: Iterable[Any], *, select: str | None = None) -> None:
        """Load and register each entry point; a failing one becomes a warning."""
        chosen = _selection(select)
        for entry in sorted(entry_points, key=lambda e: e.name):
            self._load(entry, chosen)

    def public_names(self) -> tuple[str, ...]:
        return tuple(self._names)

    def public_name(self, name: str) -> Any:
        """The object a plugin publishes as ``name``; ``KeyError`` when none does."""
        reference, owner = self._names[name]
        try:
            return load_reference(reference)
        except ImportError as error:
            raise ImportError(f"{name!r} of {owner} cannot be imported: {error}") from error

    def _load(self, entry: Any, chosen: Mapping[str, bool] | None) -> None:
        dist = getattr(entry, "dist", None)
        plugin = LoadedPlugin(
            name=entry.name,
            distribution=getattr(dist, "name", None) or "unknown",
            version=getattr(dist, "version", None) or "unknown",
            reference=entry.value,
        )
        self.plugins.append(plugin)
        if not _is_on(plugin, chosen):
            plugin.status = "off"
            return
        import sys

        before = {m for m in HEAVY_MODULES if m in sys.modules}
        start = time.perf_counter()
        try:
            module = entry.load()
            self.register(module, plugin)
        except Exception as error:  # a plugin must never break `import nnx`
            plugin.status, plugin.error = "failed", f"{type(error).__name__}: {error}"
            self._forget(plugin.name)
            warnings.warn(
                f"the NNx plugin {plugin.name!r} of {plugin.distribution} {plugin.version} "
                f"failed to load and is off: {plugin.error}",
                PluginWarning,
                stacklevel=2,
            )
        plugin.seconds = time.perf_counter() - start
        plugin.heavy_modules = tuple(
            m for m in HEAVY_MODULES if m in sys.modules and m not in before
        )

    def register(self, module: Any, plugin: LoadedPlugin) -> None:
        """Register one plugin object under ``plugin.name`` and take its contributions."""
        self._pluggy.register(module, name=plugin.name)
        owner = f"plugin {plugin.name!r} ({plugin.distribution})"
        for hook, kind in _HOOKS.items():
            contributed = self._call(module, hook)
            for key, value in contributed.items():
                id, version = key if isinstance(key, tuple) else (key, 1)
                self.registries[kind].register(id, version, value, owner=owner)
            if contributed:
                plugin.contributes[kind] = tuple(
                    f"{k[0]}@v{k[1]}" if isinstance(k, tuple) else k for k in contributed
                )
        for name, reference in self._call(module, "nnx_public_names").items():
            if name in self._names:
                raise ValueError(
                    f"public name {name!r} is already published by {self._names[name][1]}; "
                    f"{owner} cannot publish it again"
                )
            self._names[name] = (reference, owner)
            plugin.contributes.setdefault("name", ())
            plugin.contributes["name"] += (name,)

    def _call(self, module: Any, hook: str) -> Mapping[Any, Any]:
        caller = self._pluggy.subset_hook_caller(
            hook, [p for p in self._pluggy.get_plugins() if p is not module]
        )
        merged: dict[Any, Any] = {}
        for result in caller():
            if not isinstance(result, Mapping):
                raise TypeError(f"{hook} must return a mapping, not {type(result).__name__}")
            merged.update(result)
        return merged

    def _forget(self, name: str) -> None:
        module = self._pluggy.get_plugin(name)
        if module is not None:
            self._pluggy.unregister(module)
        for record in self.plugins:
            if record.name == name:
                owner = f"plugin {record.name!r} ({record.distribution})"
                record.contributes.clear()
                for registry in self.registries.values():
                    registry.unregister_owner(owner)
                self._names = {n: v for n, v in self._names.items() if v[1] != owner}


def _selection(select: str | None) -> dict[str, bool] | None:
    """``"a,b"`` selects only those; ``"-a"`` switches one off; empty or unset: all."""
    words = [w.strip() for w in (select or "").split(",") if w.strip()]
    return {w.lstrip("-"): not w.startswith("-") for w in words} or None


def _is_on(plugin: LoadedPlugin, chosen: Mapping[str, bool] | None) -> bool:
    if chosen is None:
        return True
    for key in (plugin.name, plugin.distribution):
        if key in chosen:
            return chosen[key]
    return not any(chosen.values())


_default: PluginManager | None = None


def default() -> PluginManager:
    """The process's plugin manager, discovered at the first call."""
    global _default
    if _default is None:
        from importlib_metadata import entry_points

        _default = PluginManager()
        _default.discover(
            entry_points(group=hookspecs.GROUP), select=os.environ.get(SELECT_VARIABLE)
        )
    return _default


def registry(kind: str) -> Registry[Any]:
    """The process's registry of ``kind``."""
    return default().registry(kind)
