"""Small YAML files, read safely and written with sorted keys."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import yaml

from nnx.utils.files import atomic_write
from nnx.utils.yamlio import read_exponents

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SafeDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Dumper(_SafeDumper):  # type: ignore[misc]
    """Quotes a string such as ``1e5``, so that every YAML reader sees a string."""


read_exponents(_Dumper)


def read_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The mapping in a YAML file; ``ValueError`` when it holds anything else."""
    try:
        with open(path, "rb") as stream:
            value = yaml.load(stream, Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{os.fspath(path)} is not readable YAML: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{os.fspath(path)} must hold a mapping, not {type(value).__name__}")
    return value


def write_yaml(path: str | os.PathLike[str], value: Mapping[str, Any]) -> None:
    """Replace a YAML file atomically."""
    text = yaml.dump(
        plain(value), Dumper=_Dumper, sort_keys=True, default_flow_style=False, allow_unicode=True
    )
    with atomic_write(path) as stream:
        stream.write(text)


def plain(value: Any) -> Any:
    """Mappings as dictionaries and sequences as lists, all the way down."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value
