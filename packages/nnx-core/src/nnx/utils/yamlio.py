"""YAML that people write by hand, read without surprises, and the small files of a run.

PyYAML follows YAML 1.1, where ``1e-3`` is a string and the second of two equal
keys silently wins. Here ``1e-3`` is a number, a repeated key is refused with
its line, and a string that looks like such a number is quoted when it is
written. What :func:`dump` writes, PyYAML's own ``safe_load`` reads equally.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import yaml

from nnx.utils.files import atomic_write
from nnx.utils.jsonlike import thaw

_NUMBER = re.compile(r"^[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Safe: builds plain data only."""


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Safe: writes plain data only."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = loader.construct_object(key_node, deep=True)
        try:
            repeated = key in seen
            seen.add(key)
        except TypeError:
            repeated = False  # an unhashable key; PyYAML names it below
        if repeated:
            line = key_node.start_mark.line + 1
            raise yaml.constructor.ConstructorError(
                problem=f"the key {key!r} is given twice (line {line})"
            )
    loader.flatten_mapping(node)  # a merged key gives way to the mapping's own
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read_exponents(side: Any) -> None:
    """Make a loader read, and a dumper quote, what YAML 1.2 calls a float (``1e-3``)."""
    side.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789"))


read_exponents(_Loader)
read_exponents(_Dumper)


def _string(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # PyYAML folds the next-line character into spaces unless the string is double-quoted.
    style = '"' if "\x85" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _string)


def load(text: str, where: str = "YAML") -> Any:
    """The plain data in ``text``; ``where`` names the source in errors (``ValueError``)."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{where} is not valid YAML: {error}") from error


def dump(data: Any) -> str:
    """``data`` as block-style YAML, keys in their own order."""
    return yaml.dump(
        data, Dumper=_Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True
    )


# Files that NNx itself writes: libyaml where it is there, and keys in order.

_FastLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SafeDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _FastDumper(_SafeDumper):  # type: ignore[misc]
    """Quotes a string such as ``1e5``, so that every YAML reader sees a string."""


read_exponents(_FastDumper)


def read_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The mapping in a YAML file; ``ValueError`` when it holds anything else."""
    try:
        with open(path, "rb") as stream:
            value = yaml.load(stream, Loader=_FastLoader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{os.fspath(path)} is not readable YAML: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{os.fspath(path)} must hold a mapping, not {type(value).__name__}")
    return value


def write_yaml(path: str | os.PathLike[str], value: Mapping[str, Any]) -> None:
    """Replace a YAML file atomically."""
    text = yaml.dump(
        thaw(value),
        Dumper=_FastDumper,
        sort_keys=True,
        default_flow_style=False,
        allow_unicode=True,
    )
    with atomic_write(path) as stream:
        stream.write(text)
