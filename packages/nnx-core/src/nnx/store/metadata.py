"""``metadata.yaml``: where and how a run ran, none of which is part of its id."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from nnx.store.paths import RunPaths
from nnx.store.yamlio import read_yaml
from nnx.utils.caller import warn_caller

_T = TypeVar("_T")


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
