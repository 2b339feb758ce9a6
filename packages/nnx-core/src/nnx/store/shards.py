"""A point whose sharded tensors are in files of their own, written side by side.

A point of a sharded fit is an ordinary one, except that a reference stands for every
sharded tensor in its checkpoint and training state. The tensors are in
``<tag>.dcp/<generation>/``: one safetensors file per process and a ``shards.json``
that says which piece of which tensor is where (see :mod:`nnx.store.dcp`). The
manifest lists these files like the others.

Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nnx.utils import files as fs
from nnx.utils.folders import make_folder, remove_tree_quietly

INDEX = "shards.json"
SHARD_FILE = re.compile(r"[0-9]+\.safetensors")
_REFERENCE = "$shard"


@dataclass(frozen=True, slots=True)
class Shards:
    """Files that were written for a point that is not published yet: name -> digest."""

    folder: str
    digests: Mapping[str, Mapping[str, Any]]

    @property
    def generation(self) -> str:
        return os.path.basename(self.folder)


# References ----------------------------------------------------------------------------------


def take_out(value: Any, where: str, found: dict[str, Any]) -> Any:
    """``value`` with a reference for every sharded tensor, which goes into ``found``.

    The references name the tensors by their path; a tensor that is there twice is
    stored once.
    """
    known = {id(tensor): name for name, tensor in found.items()}
    return _replaced(value, where, found, known)


def _replaced(value: Any, where: str, found: dict[str, Any], known: dict[int, str]) -> Any:
    if isinstance(value, Mapping):
        items = {k: _replaced(v, f"{where}/{k}", found, known) for k, v in value.items()}
        metadata = getattr(value, "_metadata", None)
        if metadata is None:
            return items
        state: OrderedDict[Any, Any] = OrderedDict(items)
        state._metadata = metadata  # type: ignore[attr-defined]  # of a module's state_dict
        return state
    if type(value) in (list, tuple):
        return type(value)(_replaced(v, f"{where}/{i}", found, known) for i, v in enumerate(value))
    if not is_sharded(value):
        return value
    name = known.setdefault(id(value), where)
    found[name] = value.detach()
    known[id(found[name])] = name
    return {_REFERENCE: name}


def is_sharded(value: Any) -> bool:
    """Whether ``value`` is a tensor of which each process holds a part."""
    return hasattr(value, "device_mesh") and hasattr(value, "to_local")


def put_back(value: Any, found: Mapping[str, Any]) -> Any:
    """``value`` with the tensors in place of their references."""
    if isinstance(value, Mapping):
        if value.keys() == {_REFERENCE}:
            return found[value[_REFERENCE]]
        items = {k: put_back(v, found) for k, v in value.items()}
        metadata = getattr(value, "_metadata", None)
        if metadata is None:
            return items
        state: OrderedDict[Any, Any] = OrderedDict(items)
        state._metadata = metadata  # type: ignore[attr-defined]
        return state
    if type(value) in (list, tuple):
        return type(value)(put_back(v, found) for v in value)
    return value


def references(value: Any) -> Iterator[str]:
    """The names of the tensors that ``value`` refers to."""
    if isinstance(value, Mapping):
        if value.keys() == {_REFERENCE}:
            yield value[_REFERENCE]
            return
        for item in value.values():
            yield from references(item)
    elif type(value) in (list, tuple):
        for item in value:
            yield from references(item)


# Files ---------------------------------------------------------------------------------------


def share(source: Shards, target: str) -> None:
    """Make ``target`` another name for the files of ``source``."""
    if os.path.abspath(source.folder) == os.path.abspath(target):
        return
    make_folder(target)
    for name in source.digests:
        fs.share_file(os.path.join(source.folder, name), os.path.join(target, name))
    fs.disk.flush_directory(target)
    fs.disk.flush_directory(os.path.dirname(target))


def remove(folder: str) -> None:
    """Delete a generation, and the folder of its tag when it was the last one."""
    remove_tree_quietly(folder)
    with contextlib.suppress(OSError):
        fs.disk.rmdir(os.path.dirname(folder))
