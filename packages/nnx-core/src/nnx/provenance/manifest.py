"""The experiment manifest: declared intent with one spelling, and its fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nnx.utils.identity import IdentityRef
from nnx.utils.jsonlike import FrozenDict, canonical, freeze, freeze_mapping, thaw

FORMAT = "nnx.provenance/1"
FIELDS = ("task", "labels", "model", "data", "splits", "objective", "config")
# What a training configuration says of one attempt, not of the experiment.
_ATTEMPT_KEYS = ("n_epochs", "resume_epochs", "parent_run_id", "parent_checkpoint")


def canonical_bytes(value: Any) -> bytes:
    """The UTF-8 JSON of a JSON-like value: keys sorted, arrays in order.

    What is not JSON-like (a non-finite float, a set, bytes, an object) raises
    ``ValueError`` naming its path.
    """
    return canonical(freeze(value))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExperimentManifest:
    """What an experiment is about; every value is copied and frozen.

    ``data`` and ``splits`` map names to identities: an ``IdentityRef``, a
    string (declared), ``None`` (unknown), or under ``splits`` a split manifest,
    of which the digest is recorded. Two manifests are equal when their
    canonical bytes are.
    """

    task: Mapping[str, Any] | None = None
    labels: Sequence[str] | None = None
    model: Mapping[str, Any] | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    splits: Mapping[str, Any] = field(default_factory=dict)
    objective: Mapping[str, Any] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("task", "model", "objective"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, freeze_mapping(value, name))
        if self.labels is not None:
            if isinstance(self.labels, str) or not isinstance(self.labels, Sequence):
                raise ValueError(f"labels must be a sequence of strings, not {self.labels!r}")
            for i, label in enumerate(self.labels):
                if not isinstance(label, str):
                    raise ValueError(f"labels[{i}] must be a string, not {label!r}")
            object.__setattr__(self, "labels", tuple(self.labels))
        for name in ("data", "splits"):
            object.__setattr__(self, name, _identities(getattr(self, name), name))
        object.__setattr__(self, "config", freeze_mapping(self.config, "config"))

    @classmethod
    def for_model(
        cls,
        model: Any,
        *,
        train: Any = None,
        data: Mapping[str, Any] | None = None,
        splits: Mapping[str, Any] | None = None,
        objective: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        preprocessing: Any = None,
    ) -> ExperimentManifest:
        """Collect what a model and its training configuration already say.

        The task, labels, network and recorded transforms come from ``model``;
        ``train`` is recorded under ``config["train"]``, without what describes one attempt (the epochs asked for, the resume),
        so that resuming keeps the fingerprint. ``preprocessing`` is a fitted
        transform, whose state is recorded. Builds nothing and reads no loader.
        """
        from nnx.models import describe_borrowed

        describe_borrowed(model)
        params, net = model.params, model.net_params
        task = None if params.task is None else thaw(freeze(params.task.state(), "task"))
        descriptor = {k: v for k, v in params.state().items() if k not in ("task", "device")}
        if net is not None:
            descriptor["net_params"] = net.state()
        transforms = [transform.state() for transform in getattr(model, "transforms", ())]
        if transforms:
            descriptor["transforms"] = transforms
        settings = dict(config or {})
        if train is not None:
            state = {k: v for k, v in train.state().items() if k not in _ATTEMPT_KEYS}
            settings = {"train": state, **settings}
        if preprocessing is not None:
            settings["preprocessing"] = preprocessing.state()
        return cls(
            task=task,
            labels=(task or {}).get("labels"),
            model=descriptor,
            data=data or {},
            splits=splits or {},
            objective=objective,
            config=settings,
        )

    def document(self) -> dict[str, Any]:
        """The hashed document: the format and every field, as plain JSON values."""
        return {"format": FORMAT, **self.state()}

    def state(self) -> dict[str, Any]:
        return {
            "task": thaw(self.task),
            "labels": None if self.labels is None else list(self.labels),
            "model": thaw(self.model),
            "data": {name: self.data[name].state() for name in sorted(self.data)},
            "splits": {name: self.splits[name].state() for name in sorted(self.splits)},
            "objective": thaw(self.objective),
            "config": thaw(self.config),
        }

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> ExperimentManifest:
        """Rebuild from :meth:`state` or :meth:`document`; unknown keys are refused."""
        known = (*FIELDS, "format")
        unknown = sorted(set(state) - set(known))
        if unknown:
            raise ValueError(f"an ExperimentManifest has no {', '.join(unknown)}")
        if state.get("format", FORMAT) != FORMAT:
            raise ValueError(f"the format {state['format']!r} is not {FORMAT!r}")
        fields = {name: state[name] for name in FIELDS if name in state}
        for name in ("data", "splits"):
            refs = fields.get(name) or {}
            fields[name] = {key: IdentityRef.from_state(ref) for key, ref in refs.items()}
        fields["config"] = fields.get("config") or {}
        return ExperimentManifest(**fields)

    def canonical_bytes(self) -> bytes:
        return canonical(freeze(self.document()))

    def fingerprint(self) -> str:
        """The SHA-256 of :meth:`canonical_bytes`, in hexadecimal."""
        return hashlib.sha256(self.canonical_bytes()).hexdigest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ExperimentManifest):
            return NotImplemented
        return self.canonical_bytes() == other.canonical_bytes()

    def __hash__(self) -> int:
        return hash(self.canonical_bytes())


def _identities(value: Any, where: str) -> FrozenDict[str, IdentityRef]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be a mapping of names to identities, not {value!r}")
    refs = {}
    for name, identity in value.items():
        if not isinstance(name, str):
            raise ValueError(f"{where} has the key {name!r}; keys must be strings")
        digest = getattr(identity, "digest", None)
        if callable(digest):  # a split manifest stands for its digest
            text = str(digest())
            text = text if text.startswith("sha256:") else f"sha256:{text}"
            identity = IdentityRef("digest", text)
        try:
            refs[name] = IdentityRef.of(identity)
        except TypeError as error:
            raise ValueError(f"{where}.{name}: {error}") from None
    return FrozenDict(refs)
