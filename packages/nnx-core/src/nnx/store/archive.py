"""``torch.save`` of plain data with tensors on the CPU, in a third of the time.

``torch.save`` lets its pickler ask about every number and string whether it is
a tensor's storage, and takes a tensor apart through several general calls. For
a small model that costs more than the rest of an epoch's commit. Here the
types decide. The file is an ordinary one of torch: same layout, same loader.
"""

from __future__ import annotations

import functools
import pickle
import struct
import sys
from typing import IO, Any

import torch
from torch import serialization

from nnx.errors import NNxError

_open_writer = getattr(serialization, "_open_zipfile_writer", None)
_STORAGE = {
    torch.float64: "Double", torch.float32: "Float", torch.float16: "Half",
    torch.bfloat16: "BFloat16", torch.int64: "Long", torch.int32: "Int", torch.int16: "Short",
    torch.int8: "Char", torch.uint8: "Byte", torch.bool: "Bool",
    torch.complex64: "ComplexFloat", torch.complex128: "ComplexDouble",
}  # fmt: skip


class Archive:
    """The pickle of a value, and the storages that it names by their position."""

    def __init__(self) -> None:
        self.storages: dict[int, tuple[torch.UntypedStorage, torch.dtype]] = {}
        self._keys: dict[int, int] = {}
        self._parts: list[bytes] = [pickle.PROTO + b"\x02"]

    @staticmethod
    def of(value: Any) -> Archive | None:
        """``value`` ready to be written; ``None`` when it takes ``torch.save`` to do so."""
        if _open_writer is None:
            return None
        archive = Archive()
        try:
            archive._put(value)
        except _NotPlain:
            return None
        return archive

    def write(self, file: IO[bytes]) -> None:
        data = b"".join(self._parts) + pickle.STOP
        assert _open_writer is not None
        with _open_writer(file) as writer:
            writer.write_record("data.pkl", data, len(data))
            writer.write_record("byteorder", sys.byteorder, len(sys.byteorder))
            for key, (storage, _) in enumerate(self.storages.values()):
                writer.write_record(f"data/{key}", storage, storage.nbytes())

    def _put(self, value: Any) -> None:
        """Append the opcodes that leave ``value`` on the unpickler's stack."""
        kind, parts = type(value), self._parts
        if kind is str:
            parts.append(_text(value))
        elif kind in (int, float, bool, type(None)):
            parts.append(_number(value))
        elif kind is dict:
            parts.append(b"}(")
            for key, item in value.items():
                self._put(key)
                self._put(item)
            parts.append(b"u")
        elif kind is list or kind is tuple:
            parts.append(b"](" if kind is list else b"(")
            for item in value:
                self._put(item)
            parts.append(b"e" if kind is list else b"t")
        elif kind is torch.Tensor and _is_plain(value):
            parts.append(self._rebuilding(value))
        else:
            raise _NotPlain

    def _rebuilding(self, tensor: torch.Tensor) -> bytes:
        """``_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks)``."""
        storage, dtype = tensor.untyped_storage(), tensor.dtype
        known = self.storages.setdefault(storage._cdata, (storage, dtype))
        if known[1] is not dtype:
            raise _NotPlain  # torch refuses a storage under two types
        key = self._keys.setdefault(storage._cdata, len(self._keys))
        return _opcodes(
            _STORAGE[dtype], key, storage.nbytes() // dtype.itemsize, tensor.storage_offset(),
            tensor.shape, tensor.stride(),
        )  # fmt: skip


class _NotPlain(NNxError):
    pass


@functools.lru_cache(4096)  # the names in a training state are the same at every epoch
def _text(value: str) -> bytes:
    encoded = value.encode("utf-8", "surrogatepass")
    return pickle.BINUNICODE + struct.pack("<I", len(encoded)) + encoded


def _number(value: float | None) -> bytes:
    return pickle.dumps(value, 2)[2:-1]  # without the protocol in front and the stop


@functools.lru_cache(4096)
def _opcodes(
    storage: str, key: int, size: int, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> bytes:
    return b"".join((
        _REBUILD,
        f"ctorch\n{storage}Storage\n".encode(),
        _text(str(key)),
        _CPU,
        _number(size),
        b"tQ",
        _number(offset),
        b"(", *map(_number, shape), b"t",
        b"(", *map(_number, stride), b"t",
        b"\x89ccollections\nOrderedDict\n)RtR",
    ))  # fmt: skip


_REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n((" + _text("storage")
_CPU = _text("cpu")


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.dtype in _STORAGE
        and not tensor.requires_grad
        and not (tensor.is_nested or tensor.is_conj() or tensor.is_neg())
        and not vars(tensor)
    )
