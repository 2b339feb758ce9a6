"""Values that JSON has not, spelled in it: the typed encodings of a bundle's state.

A dictionary with string keys is ``{"$dict": {...}}``, one with integer keys
``{"$intdict": [[key, value], ...]}``, a tuple ``{"$tuple": [...]}``, a number that is
not finite ``{"$float": "inf"}``, and a tensor ``{"$tensor": "t0"}``, by its name in the
file of tensors beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nnx.bundles.errors import BundleIntegrityError
from nnx.utils.jsonlike import finite

if TYPE_CHECKING:
    import torch

_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_BYTES = "$bytes"  # the store's spelling of bytes, a dictionary of one text


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor that was not read: its name in the file of tensors."""

    name: str


def encode(value: Any, where: str, tensors: dict[str, Any]) -> Any:
    """``value`` for strict JSON; its tensors are put into ``tensors`` under names.

    ``TypeError`` names the path of what is not data.
    """
    from nnx.store.data import as_data

    return _encode(as_data(value, where), where, tensors)


def _encode(value: Any, where: str, tensors: dict[str, Any]) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return finite(value)
    if type(value) is dict:
        return _encode_dict(value, where, tensors)
    if type(value) in (list, tuple):
        items = [_encode(item, f"{where}[{i}]", tensors) for i, item in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}
    if type(value) is complex:
        raise TypeError(f"{where} is a complex number, which a bundle has no form for")
    from nnx.utils.tensor_file import as_stored

    name = f"t{len(tensors)}"
    tensors[name] = as_stored(where, value)
    return {"$tensor": name}


def _encode_dict(value: dict[Any, Any], where: str, tensors: dict[str, Any]) -> Any:
    kinds = set(map(type, value))
    if kinds <= {str}:
        return {"$dict": {k: _encode(v, f"{where}[{k!r}]", tensors) for k, v in value.items()}}
    if kinds == {int}:
        pairs = [[k, _encode(v, f"{where}[{k}]", tensors)] for k, v in value.items()]
        return {"$intdict": pairs}
    named = ", ".join(sorted(kind.__name__ for kind in kinds))
    raise TypeError(f"{where} has keys of {named}; a bundle holds text keys or whole numbers")


def decode(value: Any, where: str, tensor: Callable[[str], Any] = TensorRef) -> Any:
    """The value that was encoded; ``tensor`` gives a tensor by name, by default a reference."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [decode(item, where, tensor) for item in value]
    if type(value) is not dict or len(value) != 1:
        raise BundleIntegrityError(f"{where} holds an object that is no typed encoding")
    ((kind, inner),) = value.items()
    if kind == "$dict" and type(inner) is dict:
        found = {key: decode(item, f"{where}.{key}"[:200], tensor) for key, item in inner.items()}
        return found[_BYTES].encode("latin-1") if _is_bytes(found, where) else found
    if kind == "$intdict" and type(inner) is list:
        return _decode_pairs(inner, where, tensor)
    if kind == "$tuple" and type(inner) is list:
        return tuple(decode(item, where, tensor) for item in inner)
    if kind == "$float" and type(inner) is str and inner in _FLOATS:
        return _FLOATS[inner]
    if kind == "$tensor" and type(inner) is str:
        return tensor(inner)
    raise BundleIntegrityError(f"{where} holds the encoding {kind[:40]!r}, which is not known")


def _is_bytes(found: Mapping[str, Any], where: str) -> bool:
    if found.keys() != {_BYTES}:
        return False
    text = found[_BYTES]
    if not isinstance(text, str) or any(ord(c) > 255 for c in text):
        raise BundleIntegrityError(f"{where} holds bytes that are none")
    return True


def _decode_pairs(pairs: list[Any], where: str, tensor: Callable[[str], Any]) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for pair in pairs:
        if type(pair) is not list or len(pair) != 2 or type(pair[0]) is not int:
            raise BundleIntegrityError(f"{where} holds a $intdict of other than [number, value]")
        if pair[0] in found:
            raise BundleIntegrityError(f"{where} holds the key {pair[0]} twice")
        found[pair[0]] = decode(pair[1], where, tensor)
    return found


def references(value: Any) -> list[str]:
    """The names of the tensors that a decoded value refers to, in order."""
    found, stack = [], [value]
    while stack:
        item = stack.pop()
        if isinstance(item, TensorRef):
            found.append(item.name)
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, (list, tuple)):
            stack.extend(item)
    return found


def resolve(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """A decoded value with its references replaced by the tensors."""
    if isinstance(value, TensorRef):
        return tensors[value.name]
    if isinstance(value, dict):
        return {key: resolve(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [resolve(item, tensors) for item in value]
    if isinstance(value, tuple):
        return tuple(resolve(item, tensors) for item in value)
    return value
