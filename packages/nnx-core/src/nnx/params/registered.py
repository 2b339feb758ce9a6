"""Descriptors of registered code: an id, a version and a read-only config, never a callable."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from nnx.params.base import check_keys, put
from nnx.utils import validation as check
from nnx.utils.jsonlike import canonical, freeze_mapping, thaw


class _Registered:
    """What the descriptors share; equal means the same JSON, ``1`` apart from ``True``."""

    __slots__ = ()

    id: str
    version: int
    config: Mapping[str, Any]

    def _check(self) -> None:
        owner = type(self).__name__
        put(
            self,
            id=check.identifier(owner, "id", self.id),
            version=check.count(owner, "version", self.version),
            config=freeze_mapping(self.config, f"{owner}.config"),
        )

    @property
    def versioned_id(self) -> str:
        """``"acme.lion@v1"``: how it is shown."""
        return f"{self.id}@v{self.version}"

    def __str__(self) -> str:
        return self.versioned_id

    def state(self) -> dict[str, Any]:
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self is other or canonical(self.state()) == canonical(other.state())

    def __hash__(self) -> int:
        return hash((type(self), self.id, self.version))


@dataclass(frozen=True, slots=True, eq=False)
class ModelSpec(_Registered):
    """A network that a registered factory builds: ``factory(config)`` seeded with ``seed``."""

    id: str
    version: int = 1
    config: Mapping[str, Any] = None  # type: ignore[assignment]
    seed: int = field(default=0, kw_only=True)

    kind: ClassVar[str] = "registered"
    reconstructible: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _Registered._check(self)
        put(self, seed=check.count("ModelSpec", "seed", self.seed, at_least=0))

    def state(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "id": self.id,
            "version": self.version,
            "config": thaw(self.config),
            "seed": self.seed,
        }

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> ModelSpec:
        values = _read("ModelSpec", state, ("id", "version", "config", "seed"), "registered")
        return ModelSpec(**values)


@dataclass(frozen=True, slots=True)
class RuntimeModule:
    """A module that its caller built: its class and a fingerprint of its topology."""

    module: str
    topology: str

    kind: ClassVar[str] = "runtime"
    reconstructible: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check.text("RuntimeModule", "module", self.module)
        check.text("RuntimeModule", "topology", self.topology)

    @classmethod
    def of(cls, module: Any) -> RuntimeModule:
        """Describe a live ``nn.Module``."""
        from nnx.utils.topology import module_topology, qualified_name

        return cls(qualified_name(type(module)), module_topology(module))

    def describes(self, module: Any) -> bool:
        """Whether a live ``nn.Module`` has this topology, by its fingerprint of either form."""
        from nnx.utils.topology import earlier_topology, module_topology

        fingerprint = earlier_topology if len(self.topology) == 64 else module_topology
        return fingerprint(module) == self.topology

    def state(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "module": self.module,
            "topology": self.topology,
            "reconstructible": self.reconstructible,
        }

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> RuntimeModule:
        keys = ("module", "topology", "reconstructible")
        values = _read("RuntimeModule", state, keys, "runtime")
        if values.pop("reconstructible", False) is not False:
            check.refuse("RuntimeModule", "reconstructible", state["reconstructible"], "False")
        return RuntimeModule(**values)


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerFactorySpec(_Registered):
    """An optimizer that a registered factory builds from parameter groups and ``config``."""

    id: str
    version: int
    config: Mapping[str, Any] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        _Registered._check(self)

    def state(self) -> dict[str, Any]:
        return {"id": self.id, "version": self.version, "config": thaw(self.config)}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> OptimizerFactorySpec:
        return OptimizerFactorySpec(
            **_read("OptimizerFactorySpec", state, ("id", "version", "config"))
        )


@dataclass(frozen=True, slots=True, eq=False)
class MetricSpec(_Registered):
    """A registered metric, reported under ``label`` (``name``, or the id).

    What the metric reads, and which direction is better, belong to its
    registration and are looked up when asked.
    """

    id: str
    version: int = 1
    config: Mapping[str, Any] = None  # type: ignore[assignment]
    name: str | None = None

    def __post_init__(self) -> None:
        _Registered._check(self)
        if self.name is not None:
            put(self, name=check.name("MetricSpec", "name", self.name))

    @property
    def label(self) -> str:
        return self.id if self.name is None else self.name

    @property
    def definition(self) -> Any:
        """The registered ``MetricDefinition``; an unknown id or version raises."""
        from nnx.plugins import manager

        metrics = manager.registry("metric")
        found = metrics.resolve(self.id, self.version)
        if not all(hasattr(found, name) for name in ("input", "mode", "factory", "check_config")):
            raise TypeError(
                f"the metric {self.versioned_id} of {metrics.owner(self.id, self.version)} must be "
                f"an nnx.monitors.MetricDefinition, not {type(found).__name__}"
            )
        return found

    @property
    def input(self) -> str:
        """What the metric reads: "labels", "probabilities" or "continuous"."""
        return self.definition.input

    @property
    def mode(self) -> str:
        """Which direction is better: "min" or "max"."""
        return self.definition.mode

    def check(self) -> None:
        """Raise unless the metric is registered and takes this config."""
        check_config = self.definition.check_config
        if check_config is not None:
            check_config(self.config)

    def accumulator(self) -> Any:
        """A fresh accumulator for one pass over the data."""
        return self.definition.factory(self.config)

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"id": self.id, "version": self.version}
        if self.config:
            state["config"] = thaw(self.config)
        if self.name is not None:
            state["name"] = self.name
        return state

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> MetricSpec:
        return MetricSpec(**_read("MetricSpec", state, ("id", "version", "config", "name")))


@dataclass(frozen=True, slots=True, eq=False)
class NNCheckpointTransform:
    """One recorded change of a network's topology, replayed when it is rebuilt."""

    name: str
    version: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        owner = "NNCheckpointTransform"
        put(
            self,
            name=check.identifier(owner, "name", self.name),
            version=check.count(owner, "version", self.version),
            options=freeze_mapping(self.options, f"{owner}.options"),
        )

    def state(self) -> dict[str, Any]:
        return {"name": self.name, "options": thaw(self.options), "version": self.version}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> NNCheckpointTransform:
        values = _read("NNCheckpointTransform", state, ("name", "version", "options"))
        return NNCheckpointTransform(**_with_flat_options(values))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NNCheckpointTransform):
            return NotImplemented
        return canonical(self.state()) == canonical(other.state())

    def __hash__(self) -> int:
        return hash((self.name, self.version))


# Names under which an earlier form recorded the operations that NNx ships.
_EARLIER_NAMES = {"nnx.lora": "lora", "nnx.low_rank": "low_rank", "torchao.qat": "torchao_qat"}


def _with_flat_options(values: dict[str, Any]) -> dict[str, Any]:
    """The earlier form, a ``config`` beside the ``targets``, in the form of today."""
    name, options = _EARLIER_NAMES.get(values["name"]), values.get("options")
    if name is None or not isinstance(options, Mapping) or set(options) != {"targets", "config"}:
        return values
    return {**values, "name": name, "options": {**options["config"], "targets": options["targets"]}}


@functools.cache
def _known(keys: tuple[str, ...], kind: str | None) -> frozenset[str]:
    return frozenset((*keys, "kind") if kind else keys)


def _read(
    owner: str, state: Mapping[str, Any], keys: tuple[str, ...], kind: str | None = None
) -> dict[str, Any]:
    check_keys(owner, state, _known(keys, kind))
    if kind is not None and state.get("kind") != kind:
        check.refuse(owner, "kind", state.get("kind"), repr(kind))
    if keys[0] not in state:
        raise ValueError(f"{owner} lacks {keys[0]!r}")
    return {key: state[key] for key in keys if key in state}
