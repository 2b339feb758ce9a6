"""Only data goes to disk and only data comes back.

A file of the store is a ``torch.save`` of dictionaries, lists, tuples, strings,
numbers, booleans, ``None`` and tensors, read with ``weights_only=True``. What
would need code to load is refused in both directions.
"""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from nnx.store.archive import Archive
from nnx.store.errors import ForeignFileError, ResumePointError
from nnx.utils.files import BLOCK
from nnx.utils.flushing import Flushes, HashingFile

_LEAVES = frozenset({str, int, float, bool, type(None), complex, torch.Tensor})
_KEYS = frozenset({str, int, float, bool, type(None), tuple})
_BYTES = "$bytes"  # torch reads no empty bytes back, so they are stored as text


def as_data(value: Any, where: str) -> Any:
    """``value`` as plain data; what cannot be data raises ``TypeError`` by its path.

    Mappings become dictionaries, named tuples tuples, parameters tensors, and
    NumPy arrays and scalars tensors and numbers. A tensor keeps its storage.
    """
    kind = type(value)
    if kind in _LEAVES:
        return value
    if kind is bytes:
        return {_BYTES: value.decode("latin-1")}
    if kind is dict or isinstance(value, Mapping):
        out = {}
        for key, item in value.items():
            if type(key) not in _KEYS:
                raise TypeError(
                    f"{where} has the key {key!r} of type {type(key).__name__}; "
                    f"a checkpoint holds only string, number and tuple keys"
                )
            leaf = type(item) in _LEAVES  # most are: spare them a call and a path
            out[key] = item if leaf else as_data(item, f"{where}[{key!r}]")
        return out
    if kind is list or isinstance(value, tuple):
        if _LEAVES.issuperset(map(type, value)):
            items = list(value)
        else:
            items = [as_data(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return items if kind is list else tuple(items)
    if isinstance(value, torch.nn.Parameter):
        return value.detach()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return torch.from_numpy(np.ascontiguousarray(_tensor_dtype(value)))
    if isinstance(value, np.generic):
        return as_data(value.item(), where)
    for plain in (str, bool, int, float):
        if isinstance(value, plain):
            return plain(value)
    raise TypeError(
        f"{where} holds a {kind.__module__}.{kind.__qualname__}, which is not data; "
        f"a checkpoint holds tensors, numbers, strings, booleans, None, and lists, tuples "
        f"and dictionaries of them"
    )


def check_data(value: Any, where: str) -> None:
    """Raise ``TypeError``, naming the path, when ``value`` could not be stored."""
    as_data(value, where)


def save_data(value: Any, path: str, flushes: Flushes) -> tuple[str, int]:
    """Write data to a new file and have it flushed; its SHA-256 and its size in bytes."""
    archive = Archive.of(value)
    if archive is None:
        alive = _memory(value)
    else:
        storages = [storage for storage, _ in archive.storages.values()]
        alive = [_range(storage) for storage in storages if storage.nbytes() >= BLOCK]
    file: Any = HashingFile(path, alive)
    try:
        if archive is None:
            torch.save(value, file)
        else:
            archive.write(file)
        return file.finish(flushes), file.size
    except BaseException:
        file.abandon()
        raise


def load_data(
    path: str | os.PathLike[str], map_location: Any = "cpu", *, mapped: bool = False
) -> Any:
    """Read a data file; ``ResumePointError`` when it is damaged or is not data.

    ``mapped`` tensors are the file's pages, read as they are used, where the file allows it.
    """
    mapped = mapped and zipfile.is_zipfile(path)  # torch maps no other kind
    try:
        value = torch.load(
            os.fspath(path), map_location=map_location, weights_only=True, mmap=mapped
        )
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        if named is None:
            raise ResumePointError(f"{path} is corrupted: it cannot be read as data") from error
        raise ForeignFileError(
            f"{path} is not plain data and is refused: loading it could run code, "
            f"{named[1]}. A checkpoint of NNx holds only tensors and plain values."
        ) from None
    except (
        RuntimeError,
        EOFError,
        OSError,
        ValueError,
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
    ) as e:
        # torch reports a cut-off archive as an OSError without a file name.
        if _is_device_error(e) or (isinstance(e, OSError) and e.filename is not None):
            raise
        reason = str(e).split("\n")[0]
        raise ResumePointError(f"{path} is corrupted: it cannot be read ({reason})") from e
    try:
        return _restored(as_data(value, os.fspath(path)))
    except TypeError as error:
        raise ResumePointError(f"{path} is not plain data and is refused: {error}") from None


def _restored(value: Any) -> Any:
    """``value`` with its bytes as bytes again."""
    if type(value) is dict:
        if value.keys() == {_BYTES} and isinstance(value[_BYTES], str):
            return value[_BYTES].encode("latin-1")
        return {key: _restored(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_restored(item) for item in value)
    return value


def _is_device_error(error: Exception) -> bool:
    text = str(error)
    return "deserialize object on a" in text or "map_location" in text


def _tensor_dtype(array: np.ndarray) -> np.ndarray:
    # torch before 2.3 knows no unsigned integers beyond uint8; the values fit in int64.
    if array.dtype in (np.uint16, np.uint32):
        return array.astype(np.int64)
    return array


def _memory(value: Any) -> list[tuple[int, int]]:
    """The memory of every CPU tensor in ``value``: unchanged while it is saved."""
    found: dict[int, tuple[int, int]] = {}
    stack = [value]
    while stack:
        item = stack.pop()
        if type(item) is dict:
            stack.extend(item.values())
        elif type(item) in (list, tuple):
            stack.extend(item)
        elif isinstance(item, torch.Tensor) and _is_large(item):
            storage = item.untyped_storage()
            found[storage.data_ptr()] = _range(storage)
    return list(found.values())


def _range(storage: torch.UntypedStorage) -> tuple[int, int]:
    start = storage.data_ptr()
    return start, start + storage.nbytes()


def _is_large(tensor: torch.Tensor) -> bool:
    on_cpu = tensor.device.type == "cpu" and tensor.layout is torch.strided
    return on_cpu and tensor.numel() * tensor.element_size() >= BLOCK
