"""The manifest of a resume point: which files make it, and what they are.

It is small JSON with a digest of its own, so that a damaged one is told from a
true one, and it is read without torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

from nnx.store.errors import ResumePointError
from nnx.store.paths import LAST, PointFiles
from nnx.utils.jsonlike import finite, restore

FORMAT = "nnx.resume-point"
VERSION = 1
_OPEN, _CLOSE = b'{"digest": "', b'", '


def encode(document: Mapping[str, Any]) -> bytes:
    """The bytes of a manifest: JSON whose first entry is the digest of the rest."""
    body = {"format": FORMAT, "version": VERSION, **document}
    try:
        text = json.dumps(body, allow_nan=False)
    except ValueError:
        text = json.dumps(finite(body), allow_nan=False)
    rest = text[1:].encode()
    return _OPEN + hashlib.sha256(rest).hexdigest().encode() + _CLOSE + rest


def decode(data: bytes, path: str) -> dict[str, Any] | None:
    """Read a manifest; ``None`` for another system's, an error for a damaged one."""
    try:
        body = json.loads(data)
        if body.get("format") != FORMAT and not data.startswith(_OPEN):
            return None  # another system's
        rest = data[len(_OPEN) + 64 + len(_CLOSE) :]
        if body.pop("digest") != hashlib.sha256(rest).hexdigest():
            raise ValueError("its content does not match its digest")
        if b'"$float"' in data:
            body = restore(body)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ResumePointError(
            f"{path} is corrupted: the manifest cannot be read ({error})"
        ) from error
    if body["version"] != VERSION:
        raise ResumePointError(
            f"{path} is a manifest of version {body['version']!r}; this NNx reads {VERSION}"
        )
    assert isinstance(body, dict)
    return body


def read(path: str) -> dict[str, Any] | None:
    """The manifest at ``path``; ``None`` when there is none."""
    try:
        with open(path, "rb") as stream:
            data = stream.read(1 << 24)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return decode(data, path)


class Located:
    """Which files are a tag's point now, a dying writer's leftovers included."""

    __slots__ = ("checkpoint", "manifest", "manifest_path")

    def __init__(self, checkpoint: str, manifest: dict[str, Any] | None, path: str) -> None:
        self.checkpoint = checkpoint
        self.manifest = manifest
        self.manifest_path = path

    @property
    def exists(self) -> bool:
        return self.manifest is not None or os.path.lexists(self.checkpoint)


def locate(files: PointFiles) -> Located:
    """Find a tag's checkpoint and manifest.

    A writer stages the checkpoint and its manifest, renames the checkpoint,
    then the manifest. So a staged manifest whose staged checkpoint is gone
    belongs to the published checkpoint. And where LAST already holds the staged
    state of another tag, that epoch is committed and the tag is its staged one.
    """
    if os.path.exists(files.staged_manifest):
        try:
            staged = read(files.staged_manifest)
        except ResumePointError:
            staged = None
        if staged is not None:
            if not os.path.exists(files.staged):
                return Located(files.checkpoint, staged, files.staged_manifest)
            if follows_last(files, staged):
                return Located(files.staged, staged, files.staged_manifest)
    return Located(files.checkpoint, read(files.manifest), files.manifest)


def follows_last(files: PointFiles, staged: Mapping[str, Any]) -> bool:
    """Whether a staged tag belongs to an epoch that LAST has committed."""
    if files.tag == LAST or not staged.get("epoch_tag"):
        return False
    try:
        last = locate(PointFiles(files.folder, LAST)).manifest
    except ResumePointError:
        return False
    return last is not None and last["checkpoint_id"] == staged["checkpoint_id"]
