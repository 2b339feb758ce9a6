"""Comparing two experiments field by field, from their provenance alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nnx.provenance.manifest import FIELDS, ExperimentManifest, canonical_bytes
from nnx.provenance.records import ProvenanceRecord, load_provenance
from nnx.utils.identity import IdentityRef

_GOOD = ("equal", "verified")
_MISSING = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldComparison:
    """One field: its path, what can be said of it, and both values.

    ``status`` is "equal", "different", "missing" (on one side), "unknown" (an
    identity nobody recorded), "declared" (equal names, never checked),
    "verified" (equal digests) or "absent" (a side has no provenance).
    """

    path: str
    status: str
    left: Any = None
    right: Any = None


@dataclass(frozen=True, slots=True)
class ProvenanceComparison:
    """Every field of two experiments, sorted by path."""

    fields: tuple[FieldComparison, ...]

    def by_path(self) -> dict[str, FieldComparison]:
        return {field.path: field for field in self.fields}

    @property
    def differences(self) -> tuple[FieldComparison, ...]:
        """The fields known to differ, or known on one side only."""
        bad = ("different", "missing", "absent")
        return tuple(field for field in self.fields if field.status in bad)

    @property
    def verified_equal(self) -> bool:
        """Both sides have provenance and every field is equal or verified."""
        return all(field.status in _GOOD for field in self.fields)


def compare(left: Any, right: Any, *, root: str | None = None) -> ProvenanceComparison:
    """Compare two manifests, runs or run ids.

    Reads only provenance files: no model, loader, checkpoint or data file.
    """
    ours, theirs = _leaves(_manifest(left, root)), _leaves(_manifest(right, root))
    if ours is None or theirs is None:
        known = ours or theirs or {"provenance": None}
        return ProvenanceComparison(
            tuple(
                FieldComparison(
                    path=path,
                    status="absent",
                    left=_plain((ours or {}).get(path)),
                    right=_plain((theirs or {}).get(path)),
                )
                for path in sorted(known)
            )
        )
    paths = sorted({*ours, *theirs})
    return ProvenanceComparison(
        tuple(_field(p, ours.get(p, _MISSING), theirs.get(p, _MISSING)) for p in paths)
    )


def _manifest(side: Any, root: str | None) -> ExperimentManifest | None:
    if isinstance(side, ExperimentManifest):
        return side
    if isinstance(side, str):
        side = load_provenance(side, root)
    record = side if isinstance(side, ProvenanceRecord) else getattr(side, "provenance", side)
    if record is None:
        return None
    if not isinstance(record, ProvenanceRecord):
        raise TypeError(f"compare takes manifests, runs or run ids, not {type(side).__name__}")
    return record.manifest


def _leaves(manifest: ExperimentManifest | None) -> dict[str, Any] | None:
    if manifest is None:
        return None
    leaves: dict[str, Any] = {}
    for name in FIELDS:
        value = getattr(manifest, name)
        if value is not None:
            _collect(name, value, leaves)
    return leaves


def _collect(path: str, value: Any, leaves: dict[str, Any]) -> None:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            _collect(f"{path}.{key}", item, leaves)
    elif isinstance(value, tuple) and value:
        for i, item in enumerate(value):
            _collect(f"{path}[{i}]", item, leaves)
    elif not (isinstance(value, (Mapping, tuple)) and "." not in path and "[" not in path):
        leaves[path] = value


def _field(path: str, left: Any, right: Any) -> FieldComparison:
    known = (None if left is _MISSING else left), (None if right is _MISSING else right)
    return FieldComparison(
        path=path, status=_status(left, right), left=_plain(known[0]), right=_plain(known[1])
    )


def _status(left: Any, right: Any) -> str:
    if left is _MISSING or right is _MISSING:
        return "missing"
    if isinstance(left, IdentityRef) and isinstance(right, IdentityRef):
        if "unknown" in (left.kind, right.kind):
            return "unknown"
        if left != right:
            return "different"
        return "verified" if left.verified else "declared"
    if isinstance(left, IdentityRef) or isinstance(right, IdentityRef):
        return "different"
    return "equal" if canonical_bytes(left) == canonical_bytes(right) else "different"


def _plain(value: Any) -> Any:
    return value.state() if isinstance(value, IdentityRef) else value
