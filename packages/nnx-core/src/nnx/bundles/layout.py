"""The files of a bundle and its manifest, ``bundle.json``."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nnx.bundles.errors import BundleError, BundleIntegrityError
from nnx.utils.disk import StrPath
from nnx.utils.files import is_temporary_name
from nnx.utils.strict import MAX_JSON_BYTES, parse_json, read_regular

BUNDLE_FORMAT = "nnx.run-bundle"
VERSION = 1
MANIFEST = "bundle.json"
STATE, MODEL, TRAINING = "state.json", "model.safetensors", "training.safetensors"
RESUME, INFERENCE = "resume", "inference"
MAX_MANIFEST_BYTES = 1 << 20
MAX_RECORD_BYTES = 16 << 20
# The mark in the metadata of a payload of tensors.
PART = "nnx.bundle"
FINGERPRINT = "nnx.fingerprint"

_GENERATION = re.compile(r"[0-9a-f]{32}")
_FOLDER = re.compile(r"g-[0-9a-f]{32}")
_CALIBRATOR = re.compile(r"calibrator-(0|[1-9]\d{0,3})\.json")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Payload:
    """One file of a generation, as the manifest states it."""

    sha256: str
    size: int

    def state(self) -> dict[str, Any]:
        return {"sha256": self.sha256, "size": self.size}


@dataclass(frozen=True, slots=True)
class Manifest:
    """Which generation a bundle holds now, and its files by name."""

    generation: str
    payloads: Mapping[str, Payload]

    @property
    def folder(self) -> str:
        return f"g-{self.generation}"

    def to_bytes(self) -> bytes:
        document = {
            "format": BUNDLE_FORMAT,
            "version": VERSION,
            "generation": self.generation,
            "payloads": {name: self.payloads[name].state() for name in sorted(self.payloads)},
        }
        return (json.dumps(document, indent=1) + "\n").encode("utf-8")


def is_generation_folder(name: str) -> bool:
    return _FOLDER.fullmatch(name) is not None


def is_manifest(name: str) -> bool:
    """Whether a name is the manifest's, or that of one which was being written."""
    return name == MANIFEST or (is_temporary_name(name) and name.startswith(f".{MANIFEST}."))


def is_payload(name: str) -> bool:
    return name in (STATE, MODEL, TRAINING) or _CALIBRATOR.fullmatch(name) is not None


def is_bundle(path: StrPath) -> bool:
    """Whether ``path`` is a folder with a manifest of a bundle; nothing else is looked at."""
    try:
        read_manifest(path)
    except BundleError:
        return False
    return True


def read_manifest(path: StrPath) -> Manifest:
    """The manifest of the bundle at ``path``.

    ``FileNotFoundError`` is never raised: what is no bundle is a ``BundleError`` that says
    what it is, and a manifest that cannot be true a ``BundleIntegrityError``.
    """
    shown = os.fspath(path)
    where = os.path.join(shown, MANIFEST)
    if not os.path.isdir(path):
        raise BundleError(_no_bundle(shown))
    if not os.path.lexists(where):
        raise BundleError(_no_bundle(shown))
    data = read_regular(where, limit=MAX_MANIFEST_BYTES, error=BundleIntegrityError)
    return _manifest(parse_json(data, where, error=BundleIntegrityError), where)


def _no_bundle(shown: str) -> str:
    if not os.path.lexists(shown):
        return f"there is no bundle at {shown}"
    if not os.path.isdir(shown):
        return (
            f"{shown} is a file, and a bundle is a folder with a {MANIFEST}. Checkpoints are read "
            "with NNCheckpoint.from_file; an archive must be unpacked first"
        )
    kinds = {
        "run.yaml": "a run: export it with nnx.bundles.export_bundle",
        "config.json": "a model in the Hub's layout: load it with NNModel.from_pretrained",
    }
    for name, what in kinds.items():
        if os.path.lexists(os.path.join(shown, name)):
            return f"{shown} is no bundle but {what}"
    return f"{shown} is no bundle: it has no {MANIFEST}"


def _manifest(document: Any, where: str) -> Manifest:
    if not isinstance(document, dict) or document.get("format") != BUNDLE_FORMAT:
        raise BundleIntegrityError(f"{where} is not the manifest of a run bundle")
    check_version(document, where)
    if document.keys() != {"format", "version", "generation", "payloads"}:
        raise BundleIntegrityError(
            f"{where} must hold format, version, generation and payloads, and nothing else"
        )
    generation, payloads = document["generation"], document["payloads"]
    if not isinstance(generation, str) or not _GENERATION.fullmatch(generation):
        raise BundleIntegrityError(f"{where} names no generation of 32 hexadecimal digits")
    if not isinstance(payloads, dict) or not payloads.keys() >= {STATE, MODEL}:
        raise BundleIntegrityError(f"{where} must list {STATE} and {MODEL} among its payloads")
    return Manifest(generation, {n: _payload(n, entry, where) for n, entry in payloads.items()})


def _payload(name: str, entry: Any, where: str) -> Payload:
    if not is_payload(name):
        raise BundleIntegrityError(f"{where} lists {name[:80]!r}, which is no file of a bundle")
    if not isinstance(entry, dict) or entry.keys() != {"sha256", "size"}:
        raise BundleIntegrityError(f"{where}: {name} needs exactly sha256 and size")
    digest, size = entry["sha256"], entry["size"]
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise BundleIntegrityError(f"{where}: {name} has no SHA-256")
    if type(size) is not int or not 0 <= size < 1 << 62:
        raise BundleIntegrityError(f"{where}: {name} has no valid size")
    limit = {STATE: MAX_JSON_BYTES}.get(name, MAX_RECORD_BYTES if name.endswith("json") else size)
    if size > limit:
        raise BundleIntegrityError(f"{where}: {name} has {size} bytes; at most {limit} are read")
    return Payload(digest, size)


def check_version(document: Mapping[str, Any], where: str) -> None:
    version = document.get("version")
    if type(version) is not int or version != VERSION:
        raise BundleIntegrityError(
            f"{where} is of version {str(version)[:40]!r}; this NNx reads version {VERSION}"
        )
