"""The safetensors format: headers of strangers, checked, and files written as a stream.

A file is eight bytes of length, a JSON header, and the tensors' bytes. It is
written here because ``safetensors`` wants the whole file in memory, and its header
is read here so that nothing is allocated before every claim in it was checked.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from nnx.errors import NNxError
from nnx.utils.disk import StrPath
from nnx.utils.strict import parse_json, read_exactly

if TYPE_CHECKING:
    import torch

MAX_HEADER_BYTES = 32 << 20
METADATA = "__metadata__"
_BLOCK = 1 << 22

# Name in a header -> attribute of torch, and bytes of one element.
DTYPES: dict[str, tuple[str, int]] = {
    "BOOL": ("bool", 1), "U8": ("uint8", 1), "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1),
    "I16": ("int16", 2), "U16": ("uint16", 2), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "I32": ("int32", 4), "U32": ("uint32", 4), "F32": ("float32", 4),
    "I64": ("int64", 8), "U64": ("uint64", 8), "F64": ("float64", 8), "C64": ("complex64", 8),
}  # fmt: skip


class TensorFileError(ValueError, NNxError):
    """A file that is no safetensors file, or one whose header cannot be true."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: its dtype by the header's name, shape, and bytes from ``start``."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        found: torch.dtype = getattr(torch, DTYPES[self.dtype][0])
        return found

    @property
    def numel(self) -> int:
        return (self.end - self.start) // DTYPES[self.dtype][1]


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself; ``start`` is where the tensors' bytes begin."""

    tensors: Mapping[str, Entry]
    metadata: Mapping[str, str]
    start: int

    @property
    def parameters(self) -> int:
        """How many numbers the file holds."""
        return sum(entry.numel for entry in self.tensors.values())


def read_header(
    stream: IO[bytes],
    path: StrPath,
    *,
    size: int | None = None,
    error: type[ValueError] = TensorFileError,
) -> Header:
    """Read and check the header of an open file (or stream of ``size`` bytes), and no more.

    The tensors must fill the file exactly, without holes and without overlaps.
    """
    shown = os.fspath(path)
    size = os.fstat(stream.fileno()).st_size if size is None else size
    stream.seek(0)
    if size < 8:
        raise error(f"{shown} is no safetensors file: it has {size} bytes")
    length = int.from_bytes(read_exactly(stream, 8, path, error=error), "little")
    if length > min(size - 8, MAX_HEADER_BYTES):
        raise error(
            f"{shown} is no safetensors file: it states a header of {length} bytes "
            f"(the file has {size}; at most {MAX_HEADER_BYTES} are read)"
        )
    document = parse_json(
        read_exactly(stream, length, path, error=error), f"the header of {shown}", error=error
    )
    if not isinstance(document, dict):
        raise error(f"the header of {shown} is not an object")
    metadata = document.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise error(f"the metadata of {shown} must be strings")
    tensors = {name: _entry(name, value, shown, error) for name, value in document.items()}
    _check_cover(tensors, size - 8 - length, shown, error)
    return Header(tensors, metadata, 8 + length)


def _entry(name: str, value: Any, shown: str, error: type[ValueError]) -> Entry:
    where = f"{shown}: the tensor {name[:80]!r}"
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise error(f"{where} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise error(f"{where} has the dtype {str(dtype)[:40]!r}, which is not known")
    if not _counts(shape) or len(shape) > 64:
        raise error(f"{where} has no valid shape")
    if not _counts(offsets) or len(offsets) != 2:
        raise error(f"{where} has no valid data_offsets")
    numel = 1
    for extent in shape:
        numel *= extent
        if numel > 1 << 62:
            raise error(f"{where} has more elements than any file")
    if offsets[1] - offsets[0] != numel * DTYPES[dtype][1]:
        raise error(f"{where} states {offsets[1] - offsets[0]} bytes for {shape} of {dtype}")
    return Entry(dtype, tuple(shape), offsets[0], offsets[1])


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 1 << 62 for v in value)


def _check_cover(
    tensors: Mapping[str, Entry], size: int, shown: str, error: type[ValueError]
) -> None:
    end = 0
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != end:
            what = "overlaps another" if entry.start < end else "leaves a hole before it"
            raise error(f"{shown}: the tensor {name[:80]!r} {what}")
        end = entry.end
    if end != size:
        raise error(f"{shown} holds {size} bytes of tensors, its header lists {end}")


def dtype_name(dtype: torch.dtype) -> str | None:
    """The header's name of a dtype; ``None`` where the format has none."""
    plain = str(dtype).removeprefix("torch.")
    return next((name for name, (torch_name, _) in DTYPES.items() if torch_name == plain), None)


def as_stored(name: str, value: Any) -> torch.Tensor:
    """``value`` as the dense CPU tensor that a file holds; ``TypeError`` says why it cannot."""
    import torch

    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}, not a tensor")
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
        kind = type(value).__name__ if type(value) is not torch.Tensor else str(value.layout)
        raise TypeError(f"{name} is a {kind}, which safetensors cannot hold; only dense tensors")
    if value.is_meta or dtype_name(value.dtype) is None:
        raise TypeError(f"{name} is of {value.dtype} on {value.device}, which has no stored form")
    plain = value.detach().cpu()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    return plain.contiguous()


def header_bytes(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> tuple[bytes, list[str]]:
    """The beginning of a file, and the order of its tensors: larger elements first, by name.

    So every tensor is aligned to its own element, and can be mapped as it lies.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    document: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    offset = 0
    for name in order:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        document[name] = {
            "dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }  # fmt: skip
        offset = end
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order


def chunks(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """The bytes of a file of stored tensors, one after another; none is copied."""
    import torch

    start, order = header_bytes(tensors, metadata)
    yield start
    for name in order:
        flat = tensors[name].reshape(-1)
        if flat.numel():
            yield flat.view(torch.uint8).numpy().data


def tensors_in(header: Header, data: bytearray | memoryview) -> dict[str, torch.Tensor]:
    """The tensors of a file whose bytes after the header are ``data``, which they share."""
    import torch

    found = {}
    for name, entry in header.tensors.items():
        if entry.end == entry.start:
            found[name] = torch.empty(entry.shape, dtype=entry.torch_dtype)
            continue
        size = DTYPES[entry.dtype][1]
        count = (entry.end - entry.start) // size
        aligned = entry.start % size == 0
        source = data if aligned else bytearray(memoryview(data)[entry.start : entry.end])
        offset = entry.start if aligned else 0
        flat = torch.frombuffer(source, dtype=entry.torch_dtype, count=count, offset=offset)
        found[name] = flat.reshape(entry.shape)
    return found
