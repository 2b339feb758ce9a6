"""Reading a run's provenance files."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import dataclass
from typing import Any

from nnx.provenance.attempts import ATTEMPT_FILE, ATTEMPT_FORMAT, PROVENANCE_FILE, Attempt
from nnx.provenance.manifest import ExperimentManifest
from nnx.store.paths import RunPaths


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
    paths = RunPaths.reading(run_id, root)
    manifest = _read(os.path.join(paths.dir, PROVENANCE_FILE), _manifest)
    if manifest is None:
        return None
    attempt = _read(os.path.join(paths.dir, ATTEMPT_FILE), _attempt)
    return ProvenanceRecord(manifest=manifest, fingerprint=manifest.fingerprint(), attempt=attempt)


def _read(path: str, decode: Any) -> Any:
    try:
        with open(path, "rb") as stream:
            return decode(json.loads(stream.read().decode("utf-8", "surrogatepass")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        warnings.warn(f"{path} is ignored: {reason}", RuntimeWarning, stacklevel=4)
        return None


def _manifest(document: Any) -> ExperimentManifest:
    if "format" not in document["manifest"]:
        raise ValueError("it names no format")
    manifest = ExperimentManifest.from_state(document["manifest"])
    if manifest.fingerprint() != document["fingerprint"]:
        raise ValueError("its manifest does not match its fingerprint")
    return manifest


def _attempt(document: Any) -> Attempt:
    if document["format"] != ATTEMPT_FORMAT:
        raise ValueError(f"its format is {document['format']!r}")
    return Attempt.from_state(document["attempt"])
