"""``metadata.yaml``: where and how a run ran, what people call it, whether it finished.

None of it is part of the run's id.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from nnx.store.paths import RunPaths
from nnx.utils import validation as check
from nnx.utils.caller import warn_caller
from nnx.utils.yamlio import read_yaml, write_yaml

_T = TypeVar("_T")
_LABELS = ("name", "tags")


def read_metadata(paths: RunPaths) -> dict[str, Any]:
    """The environment record; a damaged one is a warning and counts as none."""
    try:
        return read_yaml(paths.metadata)
    except FileNotFoundError:
        return {}
    except (ValueError, OSError) as error:
        warn_caller(f"{error}; it is ignored", RuntimeWarning)
        return {}


def told(
    paths: RunPaths, metadata: Mapping[str, Any], key: str, read: Callable[[Any], _T]
) -> _T | None:
    """What the environment record says under ``key``; what cannot be understood is none."""
    if metadata.get(key) is None:
        return None
    try:
        return read(metadata[key])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        warn_caller(
            f"{paths.metadata}: what it says under {key!r} is not understood and is ignored "
            f"({reason})",
            RuntimeWarning,
        )
        return None


def labels(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The name and the tags in an environment record; what is no such thing counts as none."""
    name, tags = metadata.get("name"), metadata.get("tags")
    try:
        tags = check.tags("metadata", "tags", () if tags is None else tags)
        name = None if name is None else check.name("metadata", "name", name)
    except ValueError:
        return {"name": None, "tags": ()}
    return {"name": name, "tags": tags}


def change_labels(paths: RunPaths, name: str | None, tags: Sequence[str]) -> None:
    """Replace name and tags, and nothing else; the caller holds the run's lock."""
    metadata = {k: v for k, v in read_metadata(paths).items() if k not in _LABELS}
    write_yaml(paths.metadata, {**metadata, **labels_of(name, tags)})


def glance_at_labels(paths: RunPaths) -> dict[str, Any]:
    """The :func:`labels` of a run; parses nothing where there are none."""
    text = _text(paths)
    labelled = any(b"\n%s:" % key.encode() in text for key in _LABELS)
    return labels(read_metadata(paths)) if labelled else {}


def has_finished(paths: RunPaths) -> bool:
    """Whether a fit of the run came to its end, be it before its last planned epoch."""
    return b"\nfinished: true" in _text(paths)


def _text(paths: RunPaths) -> bytes:
    """The file, in which each of our keys starts a line."""
    try:
        with open(paths.metadata, "rb") as stream:
            return b"\n" + stream.read()
    except OSError:
        return b""


def labels_of(name: str | None, tags: Sequence[str]) -> dict[str, Any]:
    values = {"name": name, "tags": list(tags)}
    return {key: value for key, value in values.items() if value}
