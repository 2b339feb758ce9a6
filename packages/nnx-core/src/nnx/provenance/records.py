"""Reading a run's provenance files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nnx.params import NNTrainerParams, NNTrainParams
from nnx.params.base import field_names
from nnx.provenance.attempts import ATTEMPT_FILE, ATTEMPT_FORMAT, PROVENANCE_FILE, Attempt
from nnx.provenance.manifest import FORMAT, ExperimentManifest, canonical_bytes
from nnx.store.pointer import locate_run
from nnx.utils.caller import warn_caller

if TYPE_CHECKING:
    from nnx.store.points import ResumePoint


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenanceRecord:
    """A run's plan, its fingerprint, and the latest attempt at it."""

    manifest: ExperimentManifest
    fingerprint: str
    attempt: Attempt | None = None


def load_provenance(run_id: str, root: str | None = None) -> ProvenanceRecord | None:
    """The provenance of a run; ``None`` when it has none.

    Format and fingerprint are checked. A file that cannot be read is ignored
    with a warning: provenance never keeps a run from loading or resuming.
    """
    paths = locate_run(run_id, root)
    plan = _read(os.path.join(paths.dir, PROVENANCE_FILE), _plan)
    if plan is None:
        return None
    attempt = _read(os.path.join(paths.dir, ATTEMPT_FILE), _attempt)
    manifest, fingerprint = plan
    return ProvenanceRecord(manifest=manifest, fingerprint=fingerprint, attempt=attempt)


def _read(path: str, decode: Any) -> Any:
    try:
        with open(path, "rb") as stream:
            return decode(json.loads(stream.read().decode("utf-8", "surrogatepass")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        warn_caller(f"{path} is ignored: {reason}", RuntimeWarning)
        return None


def _plan(document: Any) -> tuple[ExperimentManifest, str]:
    """The manifest, and its fingerprint: that of the document as it was written."""
    stored, fingerprint = document["manifest"], document["fingerprint"]
    if "format" not in stored:
        raise ValueError("it names no format")
    if hashlib.sha256(canonical_bytes(stored)).hexdigest() != fingerprint:
        raise ValueError("its manifest does not match its fingerprint")
    return ExperimentManifest.from_state(_in_todays_form(stored)), fingerprint


def _in_todays_form(stored: Mapping[str, Any]) -> dict[str, Any]:
    """An earlier form kept the training among the other settings, and labels without a width."""
    manifest, config = dict(stored), dict(stored.get("config") or {})
    if "train" not in config and ("optim" in config or "optims" in config):
        train = {key: config.pop(key) for key in _TRAINING if key in config}
        manifest["config"] = {**config, "train": train}
    task = stored.get("task") or {}
    if task.get("kind") in ("multilabel", "regression") and task.get("labels"):
        manifest["task"] = {"num_outputs": len(task["labels"]), **task}
    return manifest


_TRAINING = {*field_names(NNTrainParams), *field_names(NNTrainerParams)}


def _attempt(document: Any) -> Attempt:
    if document.get("format", FORMAT) not in (ATTEMPT_FORMAT, FORMAT):
        raise ValueError(f"its format is {document['format']!r}")
    return Attempt.from_state(document.get("attempt", document))


def parent_link(point: ResumePoint, root: str | None) -> dict[str, Any]:
    """What an attempt says of the point it resumed."""
    link: dict[str, Any] = {
        "run_id": point.run_id,
        "checkpoint": point.tag,
        "epoch": point.completed_epoch,
        "generation": point.generation if point.bundle is None else point.bundle,
        "checkpoint_id": point.checkpoint_id,
    }
    if point.bundle is not None:
        return link
    record = load_provenance(point.run_id, root)
    if record is not None and record.attempt is not None:
        link["attempt_id"] = record.attempt.attempt_id
    return link
