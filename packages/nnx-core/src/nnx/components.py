"""State that training carries across epochs, saved with every checkpoint.

A component is any object with ``component_spec()``, ``component_state()`` and
``load_component_state(state, *, version)``: a callback's patience, an EMA
target, a step function's running statistics. Its state is written into the same
sidecar generation as the weights and restored before the first resumed epoch,
all components or none.

State holds only what ``torch.load(weights_only=True)`` reads: tensors, numbers,
strings, booleans, ``None`` and dicts, lists and tuples of those.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from nnx.errors import NNxError
from nnx.params.component import ComponentSpec
from nnx.records import ResumeStatus
from nnx.utils.caller import warn_caller

__all__ = [
    "COMPONENT_STATE_VERSION",
    "ComponentRegistry",
    "ComponentRestoreError",
    "ComponentSpec",
    "ResumeStatus",
    "StatefulComponent",
]

COMPONENT_STATE_VERSION = 1
"""Version of the mapping that :meth:`ComponentRegistry.collect` returns."""

_METHODS = ("component_spec", "component_state", "load_component_state")


@runtime_checkable
class StatefulComponent(Protocol):
    """The component protocol.

    A component may also define ``check_component_state(state, *, version)``, which
    returns a list of problems; they join the report made before anything is restored.
    """

    def component_spec(self) -> ComponentSpec:
        """Name, schema version and whether a resume requires it."""
        ...

    def component_state(self) -> dict[str, Any]:
        """The state to save."""
        ...

    def load_component_state(self, state: Mapping[str, Any], *, version: int) -> None:
        """Take over ``state``, which was saved under schema ``version``."""
        ...


class ComponentRestoreError(ValueError, NNxError):
    """Saved component state that does not fit the registered components.

    ``problems`` lists everything that was found, not only the first.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        lines = "".join(f"\n  - {problem}" for problem in self.problems)
        super().__init__(
            f"the checkpoint's component state cannot be restored:{lines}\n"
            "Nothing was restored. Pass the components of the run that wrote the checkpoint, or "
            'resume with resume_mode="weights_only" to start them afresh.'
        )


@dataclass(frozen=True, slots=True)
class _Saved:
    version: int
    state: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a resume will do, decided before anything is touched."""

    saved: Mapping[str, _Saved]
    fresh: tuple[str, ...]

    @property
    def restored(self) -> tuple[str, ...]:
        """Names of the components whose state will be loaded."""
        return tuple(self.saved)

    def without(self, name: str) -> _Plan:
        """The same, with the component ``name`` starting fresh."""
        if name not in self.saved:
            return self
        saved = {n: entry for n, entry in self.saved.items() if n != name}
        return _Plan(saved, (*self.fresh, name))


class ComponentRegistry:
    """The components of one run, by name, in the order of registration."""

    def __init__(self, components: Iterable[Any] = ()) -> None:
        self._components: dict[str, Any] = {}
        self._specs: dict[str, ComponentSpec] = {}
        for component in components:
            self.register(component)

    @staticmethod
    def discover(*sources: Any, explicit: Iterable[Any] = ()) -> ComponentRegistry:
        """Register the components among ``sources``, then every ``explicit`` one.

        A source is an object or a list or tuple of objects; ``None`` and whatever
        is no component are passed over. An explicit entry that is no component
        raises ``TypeError``.
        """
        registry = ComponentRegistry()
        for source in sources:
            for candidate in source if isinstance(source, (list, tuple)) else (source,):
                if _is_component(candidate):
                    registry.register(candidate)
        for component in explicit:
            registry.register(component)
        return registry

    def register(self, component: Any) -> str:
        """Add ``component`` and return its name. The same object twice registers once."""
        for name, held in self._components.items():
            if held is component:
                return name
        if not _is_component(component):
            missing = [m for m in _METHODS if not callable(getattr(component, m, None))]
            raise TypeError(
                f"components: {_show(component)} is not a component, it lacks "
                f"{', '.join(missing)}. A component defines component_spec(), component_state() "
                "and load_component_state(state, *, version)."
            )
        spec = component.component_spec()
        if not isinstance(spec, ComponentSpec):
            raise TypeError(
                f"component_spec() of {_show(component)} must return a ComponentSpec, not {spec!r}"
            )
        name = self._free_name(spec)
        if name in self._components:
            raise ValueError(
                f"two components are named {name!r}: {_show(self._components[name])} and "
                f"{_show(component)}. Give one of them another name."
            )
        self._components[name] = component
        self._specs[name] = spec
        return name

    @property
    def names(self) -> tuple[str, ...]:
        """The registered names, in order."""
        return tuple(self._components)

    def collect(self) -> dict[str, dict[str, Any]]:
        """Every component's state, as the checkpoint's sidecar holds it."""
        return {
            name: {
                "version": self._specs[name].version,
                "required": self._specs[name].required,
                "state": _checked_state(name, component.component_state()),
            }
            for name, component in self._components.items()
        }

    def fresh_plan(self) -> _Plan:
        """A plan that restores nothing (a fresh run, a weights-only resume)."""
        return _Plan({}, self.names)

    def plan(self, saved: Mapping[str, Any] | None) -> _Plan:
        """Check what a checkpoint holds against what is registered; change nothing.

        ``None`` is a checkpoint from before component state: every component
        starts fresh, with a warning. Raises :class:`ComponentRestoreError` with
        all problems at once.
        """
        if saved is None:
            if self._components:
                warn_caller(
                    "the checkpoint was written without component state; these components start "
                    f"fresh: {', '.join(self.names)}",
                    RuntimeWarning,
                )
            return self.fresh_plan()
        if not isinstance(saved, Mapping):
            raise ComponentRestoreError(
                [f"component state must be a mapping of names, not {type(saved).__name__}"]
            )
        problems = self._unknown_required(saved)
        ready: dict[str, _Saved] = {}
        for name, spec in self._specs.items():
            if name in saved:
                found = self._check(name, spec, saved[name])
                problems.extend(found)
                if not found:
                    ready[name] = _Saved(saved[name]["version"], saved[name]["state"])
            elif spec.required:
                problems.append(f"{name}: required, but the checkpoint has no state for it")
        if problems:
            raise ComponentRestoreError(problems)
        return _Plan(ready, tuple(name for name in self._components if name not in ready))

    def restore(self, plan: _Plan) -> tuple[str, ...]:
        """Load the planned state and return the restored names: all, or none.

        When a component fails to load, it and those before it get back the state
        they had, and its error propagates. A component that cannot be put back is
        reported as a ``RuntimeWarning``.
        """
        before = {
            name: copy.deepcopy(self._components[name].component_state()) for name in plan.saved
        }
        touched: list[str] = []
        try:
            for name, entry in plan.saved.items():
                touched.append(name)
                self._components[name].load_component_state(entry.state, version=entry.version)
        except BaseException:
            self._roll_back(before, touched)
            raise
        return plan.restored

    def _roll_back(self, before: Mapping[str, Any], touched: list[str]) -> None:
        for name in reversed(touched):
            try:
                self._components[name].load_component_state(
                    before[name], version=self._specs[name].version
                )
            except Exception as error:
                warn_caller(
                    f"component {name!r} could not be rolled back after a failed restore: "
                    f"{type(error).__name__}: {error}",
                    RuntimeWarning,
                )

    def _free_name(self, spec: ComponentSpec) -> str:
        if not spec.numbered or spec.name not in self._components:
            return spec.name
        taken = sum(1 for s in self._specs.values() if s.numbered and s.name == spec.name)
        return f"{spec.name}.{taken + 1}" if taken else spec.name

    def _unknown_required(self, saved: Mapping[str, Any]) -> list[str]:
        return [
            f"{name}: the checkpoint requires it, but no such component is registered"
            for name, entry in saved.items()
            if name not in self._components
            and not (isinstance(entry, Mapping) and entry.get("required") is False)
        ]

    def _check(self, name: str, spec: ComponentSpec, entry: Any) -> list[str]:
        version = entry.get("version") if isinstance(entry, Mapping) else None
        if not isinstance(version, int) or isinstance(version, bool) or "state" not in entry:
            return [f"{name}: the saved entry is malformed, it needs a version and a state"]
        if not isinstance(entry["state"], Mapping):
            return [f"{name}: the saved state is a {type(entry['state']).__name__}, not a mapping"]
        if version > spec.version:
            return [
                f"{name}: saved with schema version {version}, newer than this component's "
                f"version {spec.version}; update the library that provides it"
            ]
        check = getattr(self._components[name], "check_component_state", None)
        if not callable(check):
            return []
        return [f"{name}: {problem}" for problem in check(entry["state"], version=version) or ()]


def _is_component(candidate: Any) -> bool:
    return not isinstance(candidate, type) and all(
        callable(getattr(candidate, method, None)) for method in _METHODS
    )


def _checked_state(name: str, state: Any) -> dict[str, Any]:
    if not isinstance(state, Mapping):
        raise TypeError(
            f"component_state() of {name!r} must return a dict, not {type(state).__name__}"
        )
    _check_plain(name, state, "state")
    return dict(state)


def _check_plain(name: str, value: Any, path: str) -> None:
    """Refuse what ``torch.load(weights_only=True)`` would refuse, naming where it is."""
    if value is None or type(value) in (bool, int, float, complex, str):
        return
    if isinstance(value, torch.Tensor):
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            _check_plain(name, key, f"{path} key {key!r}")
            _check_plain(name, item, f"{path}[{key!r}]")
        return
    if type(value) in (list, tuple, set, torch.Size):
        for index, item in enumerate(value):
            _check_plain(name, item, f"{path}[{index}]")
        return
    raise TypeError(
        f"component {name!r}: {path} is a {type(value).__module__}.{type(value).__qualname__}, "
        "which a checkpoint cannot hold. Save tensors, numbers, strings, booleans, None and "
        "dicts, lists and tuples of those."
    )


def _show(component: Any) -> str:
    return f"{type(component).__module__}.{type(component).__qualname__} object"
