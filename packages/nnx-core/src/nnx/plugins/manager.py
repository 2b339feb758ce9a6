"""Discovery: entry points of the group ``nnx`` become registered plugins."""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pluggy

from nnx._version import __version__
from nnx.plugins import core, hookspecs, siblings
from nnx.plugins.registry import Registry, RegistryConflictError, load_reference

SELECT_VARIABLE = "NNX_PLUGINS"
NOTHING = "none"
VERSION_ATTRIBUTE = "nnx_hookspec_version"


class PluginWarning(UserWarning):
    """A plugin that could not be loaded; NNx goes on without it."""


@dataclass(slots=True)
class LoadedPlugin:
    """One entry point and what became of it."""

    name: str
    distribution: str
    version: str
    reference: str
    location: str | None = None  # the file it was imported from
    status: str = "loaded"  # loaded | failed | off
    error: str | None = None
    seconds: float = 0.0
    heavy_modules: tuple[str, ...] = ()
    contributes: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def owner(self) -> str:
        """How errors name this plugin."""
        return f"plugin {self.name!r} ({self.distribution})"

    def contribute(self, kind: str, what: str) -> None:
        """Note one contribution, for ``nnx plugins``."""
        self.contributes[kind] = (*self.contributes.get(kind, ()), what)


HEAVY_MODULES = ("torch", "numpy", "pandas", "transformers", "plotly", "torch_geometric", "sklearn")

# Hook name -> the registry it fills. Unversioned hooks register as version 1.
_HOOKS = {
    "nnx_nets": "net",
    "nnx_model_factories": "model factory",
    "nnx_optimizer_factories": "optimizer factory",
    "nnx_objectives": "objective",
    "nnx_losses": "loss",
    "nnx_schedulers": "scheduler",
    "nnx_metrics": "metric",
    "nnx_exporters": "exporter",
    "nnx_transforms": "transform",
    "nnx_renderers": "renderer",
    "nnx_commands": "command",
}


class PluginManager:
    """The registries and the plugins that filled them.

    ``core_names`` are the public names that no plugin may publish.
    """

    def __init__(self, *, core_names: Iterable[str] = ()) -> None:
        self._pluggy = pluggy.PluginManager(hookspecs.GROUP)
        self._pluggy.add_hookspecs(hookspecs)
        self.registries: dict[str, Registry[Any]] = {
            kind: Registry(kind, hint=partial(self._hint, kind)) for kind in _HOOKS.values()
        }
        self.plugins: list[LoadedPlugin] = []
        self._core_names = frozenset(core_names)
        self._names: dict[str, tuple[str, str]] = {}  # public name -> (reference, owner)
        self._remembered: dict[tuple[str, str], str] = {}  # (kind, id) -> who had provided it

    def registry(self, kind: str) -> Registry[Any]:
        """The registry of ``kind`` ("net", "model factory", "metric", ...)."""
        return self.registries[kind]

    def discover(self, entry_points: Iterable[Any], *, select: str | None = None) -> None:
        """Load and register each entry point; a failing one becomes a warning.

        ``select`` is the value of ``NNX_PLUGINS``: ``"a,b"`` loads only those,
        ``"-a"`` all but that one, ``"none"`` nothing; names are those of
        plugins or of their distributions.
        """
        found = sorted(entry_points, key=lambda entry: entry.name)
        chosen = _selection(select)
        for entry in found:
            self._load(entry, chosen)
        known = {word for plugin in self.plugins for word in (plugin.name, plugin.distribution)}
        for word in sorted(set(chosen) - known - {NOTHING}):
            _warn(
                f"{SELECT_VARIABLE} names {word!r}, which is not installed; "
                f"installed: {', '.join(sorted(known)) or 'nothing'}"
            )

    def public_names(self) -> tuple[str, ...]:
        """The names that plugins publish, in the order of their registration."""
        return tuple(self._names)

    def public_name(self, name: str) -> Any:
        """The object a plugin publishes as ``name``; ``KeyError`` when none does."""
        reference, owner = self._names[name]
        try:
            return load_reference(reference)
        except Exception as error:  # a module may fail in any way
            kind = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
            raise ImportError(
                f"{name!r} of {owner} cannot be imported from {reference!r}: {kind}{error}"
            ) from error

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Put every registry back as it was after the block."""
        with contextlib.ExitStack() as stack:
            for registry in self.registries.values():
                stack.enter_context(registry.restored())
            yield

    def provider(self, kind: str, id: str, version: int = 1) -> LoadedPlugin | None:
        """The plugin that contributed a key; ``None`` when core or a program registered it."""
        registry = self.registries[kind]
        if (id, version) not in registry:
            return None
        owner = registry.owner(id, version)
        return next((plugin for plugin in self.plugins if plugin.owner == owner), None)

    def remember(self, kind: str, id: str, release: str, *, where: str) -> None:
        """Let the error of an unknown ``id`` say that ``where`` used it from ``release``.

        ``release`` is ``"distribution version"``.
        """
        distribution, _, version = release.rpartition(" ")
        ours = distribution in siblings.MODULES
        line = siblings.install_line(distribution) if ours else None
        self._remembered[kind, id] = f"{where} used it from {release}. Install it with: " + (
            line or f'pip install "{distribution}=={version}"'
        )

    def _load(self, entry: Any, chosen: Mapping[str, bool]) -> None:
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
        before = {m for m in HEAVY_MODULES if m in sys.modules}
        start = time.perf_counter()
        try:
            module = entry.load()
            plugin.location = getattr(module, "__file__", None)
            self.register(module, plugin)
        except (Exception, SystemExit) as error:  # a plugin must never break `import nnx`
            plugin.status, plugin.error = "failed", f"{type(error).__name__}: {error}"
            _warn(
                f"the NNx plugin {plugin.name!r} of {plugin.distribution} {plugin.version} "
                f"failed to load and is off: {plugin.error}"
            )
        plugin.seconds = time.perf_counter() - start
        plugin.heavy_modules = tuple(
            m for m in HEAVY_MODULES if m in sys.modules and m not in before
        )

    def register(self, module: Any, plugin: LoadedPlugin) -> None:
        """Register one plugin object and take all of its contributions, or none."""
        self._check_hooks(module)
        self._pluggy.register(module, name=plugin.name)
        try:
            for hook, kind in _HOOKS.items():
                for key, value in self._call(module, hook).items():
                    id, version = key if isinstance(key, tuple) and len(key) == 2 else (key, 1)
                    self.registries[kind].register(id, version, value, owner=plugin.owner)
                    plugin.contribute(kind, f"{id}@v{version}" if isinstance(key, tuple) else id)
            for name, reference in self._call(module, "nnx_public_names").items():
                self._publish(name, reference, plugin)
        except BaseException:
            self._forget(module, plugin)
            raise

    def _check_hooks(self, module: Any) -> None:
        """Refuse hooks that this NNx does not know, and the plugin of a newer NNx."""
        hooks = {*_HOOKS, "nnx_public_names"}
        marked = [n for n in dir(module) if self._pluggy.parse_hookimpl_opts(module, n) is not None]
        unknown = [name for name in marked if name not in hooks]
        version = getattr(module, VERSION_ATTRIBUTE, 1)
        if isinstance(version, bool) or not isinstance(version, int) or version < 1:
            raise ValueError(f"{VERSION_ATTRIBUTE} must be an integer >= 1, not {version!r}")
        if version > hookspecs.HOOKSPEC_VERSION:
            missing = f" and not its {', '.join(unknown)}" if unknown else ""
            raise ValueError(
                f"it is built for version {version} of the hook specification, and nnx-core "
                f"{__version__} knows version {hookspecs.HOOKSPEC_VERSION}{missing}. "
                "Install a newer nnx-core, or an older release of the plugin."
            )
        if unknown:
            close = difflib.get_close_matches(unknown[0], hooks, n=1)
            guess = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(
                f"there is no hook {', '.join(unknown)} in version "
                f"{hookspecs.HOOKSPEC_VERSION} of the hook specification{guess}"
            )

    def _publish(self, name: str, reference: str, plugin: LoadedPlugin) -> None:
        holder = "nnx-core" if name in self._core_names else self._names.get(name, ("", ""))[1]
        if holder:
            raise RegistryConflictError(
                f"the public name {name!r} is already published by {holder}; "
                f"{plugin.owner} cannot publish it again. Choose another name."
            )
        self._names[name] = (reference, plugin.owner)
        plugin.contribute("name", name)

    def _call(self, module: Any, hook: str) -> Mapping[Any, Any]:
        """What one plugin returns from one hook; nothing when it has no such hook."""
        others = [p for p in self._pluggy.get_plugins() if p is not module]
        results = self._pluggy.subset_hook_caller(hook, others)()
        for result in results:
            if not isinstance(result, Mapping):
                raise TypeError(f"{hook} must return a mapping, not {type(result).__name__}")
        return results[0] if results else {}

    def _forget(self, module: Any, plugin: LoadedPlugin) -> None:
        self._pluggy.unregister(module)
        plugin.contributes.clear()
        for registry in self.registries.values():
            registry.unregister_owner(plugin.owner)
        self._names = {n: v for n, v in self._names.items() if v[1] != plugin.owner}

    def _hint(self, kind: str, id: str) -> str | None:
        """What could provide an unknown id: a sibling to install, or a plugin that is not on."""
        known = siblings.hint_for_id(id) or self._remembered.get((kind, id))
        hints = [known] if known else []
        for plugin in self.plugins:
            if plugin.status == "failed":
                hints.append(f"{plugin.owner} failed to load: {plugin.error}")
            elif plugin.status == "off":
                hints.append(f"{plugin.owner} is switched off by {SELECT_VARIABLE}")
        return ". ".join(hints) or None


def _selection(select: str | None) -> dict[str, bool]:
    """Words of ``NNX_PLUGINS``: name -> whether it was named to be on. Empty: all are on."""
    words = [w.strip() for w in (select or "").split(",") if w.strip()]
    return {w.lstrip("-"): not w.startswith("-") for w in words}


def _is_on(plugin: LoadedPlugin, chosen: Mapping[str, bool]) -> bool:
    for key in (plugin.name, plugin.distribution):
        if key in chosen:
            return chosen[key]
    return NOTHING not in chosen and not any(chosen.values())


def _warn(message: str) -> None:
    # Said by the package, not by the line of code that noticed it.
    warnings.warn_explicit(message, PluginWarning, filename="nnx", lineno=1)


_default: PluginManager | None = None


def start(core_names: Iterable[str]) -> PluginManager:
    """Discover the plugins of this process; ``nnx/__init__`` calls it once, at import."""
    global _default
    if _default is None:
        from importlib_metadata import entry_points

        _default = PluginManager(core_names=core_names)
        # Core's own contributions cannot be switched off, so it is not listed as a plugin.
        _default.register(core, LoadedPlugin("core", "nnx-core", __version__, core.__name__))
        _default.discover(
            entry_points(group=hookspecs.GROUP), select=os.environ.get(SELECT_VARIABLE)
        )
    return _default


def default() -> PluginManager:
    """The process's plugin manager."""
    if _default is None:
        raise RuntimeError("nnx is still importing: its plugins are not discovered yet")
    return _default


def registry(kind: str) -> Registry[Any]:
    """The process's registry of ``kind``: "net", "model factory", "optimizer factory",
    "objective", "loss", "scheduler", "metric", "exporter", "transform", "renderer" or "command"."""
    return default().registry(kind)
