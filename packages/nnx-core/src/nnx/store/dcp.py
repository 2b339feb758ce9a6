"""Storage of ``torch.distributed.checkpoint`` that holds data only.

DCP's planners decide who writes and who reads which piece, and reshard. Its own
storage keeps the metadata as a pickle, which would run code when it is read; here
it is JSON beside one safetensors file per process.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from nnx.store.errors import ResumePointError
from nnx.store.shards import INDEX, SHARD_FILE, put_back, references
from nnx.utils import files as fs
from nnx.utils.flushing import Flushes, HashingFile, write_new

FORMAT = "nnx.shards"
VERSION = 1
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


# Writing -------------------------------------------------------------------------------------


class ShardWriter(StorageWriter):
    """Each process's part as ``<rank>.safetensors``, and one index of all of them."""

    def __init__(self, folder: str, rank: int) -> None:
        self.folder = folder
        self.rank = rank
        self.digests: dict[str, dict[str, Any]] = {}  # of all files, in the coordinator

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Stream the tensors into one file: a safetensors header, then their bytes."""
        header: dict[str, Any] = {}
        end = 0
        for item in plan.items:
            data = item.tensor_data
            assert data is not None
            dtype = data.properties.dtype
            if dtype not in _NAMES:
                raise TypeError(f"{item.index.fqn} is {dtype}, which a sharded point cannot hold")
            size = data.chunk.sizes.numel() * dtype.itemsize
            header[item.index.fqn] = {
                "dtype": _NAMES[dtype],
                "shape": list(data.chunk.sizes),
                "data_offsets": [end, end + size],
            }
            end += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        name = f"{self.rank}.safetensors"
        flushes = Flushes()
        file = HashingFile(os.path.join(self.folder, name))
        try:
            file.write(struct.pack("<Q", len(text)))
            file.write(text)
            for item in plan.items:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, torch.Tensor)
                flat = tensor.detach().cpu().contiguous().reshape(-1)
                file.write(flat.view(torch.uint8).numpy().data)
            digest = {"sha256": file.finish(flushes), "size": file.size}
        except BaseException:
            file.abandon()
            raise
        flushes.wait()
        fs.disk.flush_directory(self.folder)
        done: Future[list[WriteResult]] = Future()
        stored = {"file": name, **digest}
        sizes = [header[item.index.fqn]["data_offsets"] for item in plan.items]
        done.set_result(
            [
                WriteResult(index=item.index, size_in_bytes=b - a, storage_data=stored)
                for item, (a, b) in zip(plan.items, sizes)
            ]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index, in the coordinator alone."""
        tensors: dict[str, Any] = {}
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise TypeError(f"{name} is not a tensor")
            tensors[name] = {
                "dtype": _NAMES[entry.properties.dtype],
                "shape": list(entry.size),
                "chunks": [],
            }
        sizes = {
            (name, tuple(chunk.offsets)): list(chunk.sizes)
            for name, entry in metadata.state_dict_metadata.items()
            for chunk in entry.chunks  # type: ignore[union-attr]
        }
        for result in (r for part in results for r in part):
            offsets = tuple(result.index.offset or ())
            tensors[result.index.fqn]["chunks"].append(
                {
                    "offsets": list(offsets),
                    "sizes": sizes[result.index.fqn, offsets],
                    "file": result.storage_data["file"],
                }
            )
            stored = dict(result.storage_data)
            self.digests[stored.pop("file")] = stored
        document = {"format": FORMAT, "version": VERSION, "tensors": tensors}
        data = json.dumps(document).encode()
        flushes = Flushes()
        write_new(os.path.join(self.folder, INDEX), data, flushes)
        flushes.wait()
        fs.disk.flush_directory(self.folder)
        self.digests[INDEX] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}


def save_planner() -> DefaultSavePlanner:
    """The planner of a flat mapping of names to sharded tensors."""
    return DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


# Reading -------------------------------------------------------------------------------------


class ShardReader(StorageReader):
    """Reads what :class:`ShardWriter` wrote; only the rows that were asked for."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.index = read_index(folder)

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata: dict[str, Any] = {}
        for name, entry in self.index.items():
            metadata[name] = TensorStorageMetadata(
                properties=TensorProperties(dtype=_DTYPES[entry["dtype"]]),
                size=torch.Size(entry["shape"]),
                chunks=[
                    ChunkStorageMetadata(torch.Size(c["offsets"]), torch.Size(c["sizes"]))
                    for c in entry["chunks"]
                ],
            )
        return Metadata(state_dict_metadata=metadata)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        from safetensors import SafetensorError, safe_open

        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            by_file.setdefault(self._file_of(item.storage_index), []).append(item)
        for name, items in by_file.items():
            path = os.path.join(self.folder, name)
            try:
                with safe_open(path, framework="pt") as file:
                    for item in items:
                        piece = file.get_slice(item.storage_index.fqn)
                        starts, lengths = item.storage_offsets, item.lengths
                        where = tuple(slice(a, a + n) for a, n in zip(starts, lengths))
                        target = planner.resolve_tensor(item)
                        target.detach().copy_(piece[where])
                        planner.commit_tensor(item, target)
            except SafetensorError as error:
                raise ResumePointError(f"{path} is corrupted: {error}") from error
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _file_of(self, index: MetadataIndex) -> str:
        offsets = list(index.offset or ())
        for chunk in self.index[index.fqn]["chunks"]:
            if chunk["offsets"] == offsets:
                return str(chunk["file"])
        raise ResumePointError(f"{self.folder} has no piece of {index.fqn} at {offsets}")

    def empty(
        self, name: str, make: Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
    ) -> torch.Tensor:
        """A tensor from ``make(shape, dtype)`` for what is stored under ``name``."""
        if name not in self.index:
            raise ResumePointError(f"{self.folder} does not hold {name}, which its point names")
        entry = self.index[name]
        return make(tuple(entry["shape"]), _DTYPES[entry["dtype"]])


def read_index(folder: str) -> dict[str, Any]:
    """The tensors of a sharded point; ``ResumePointError`` when that cannot be read."""
    path = os.path.join(folder, INDEX)
    try:
        with open(path, "rb") as stream:
            document = json.loads(stream.read())
        if document["format"] != FORMAT or document["version"] != VERSION:
            raise ValueError(f"it is {document['format']} {document['version']}")
        tensors: dict[str, Any] = document["tensors"]
        for entry in tensors.values():
            _check_entry(entry)
    except FileNotFoundError:
        raise ResumePointError(f"the sharded point is torn: {path} is missing") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ResumePointError(f"{path} is corrupted: it cannot be read ({error})") from error
    _check_files(folder, tensors)
    return tensors


def _check_entry(entry: Mapping[str, Any]) -> None:
    """The pieces are the tensor's rows, each once: a gap would be read as whatever is there."""
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"unknown dtype {entry['dtype']!r}")
    shape, end = entry["shape"], 0
    for numbers in (shape, *(c[key] for c in entry["chunks"] for key in ("offsets", "sizes"))):
        if not all(type(n) is int and n >= 0 for n in numbers) or len(numbers) != len(shape):
            raise ValueError(f"{numbers!r} is no place in a tensor of shape {shape!r}")
    for chunk in sorted(entry["chunks"], key=lambda c: (c["offsets"], c["sizes"])):
        if not SHARD_FILE.fullmatch(chunk["file"]):
            raise ValueError(f"{chunk['file']!r} is no file of a sharded point")
        if chunk["offsets"] != [end, *[0] * (len(shape) - 1)] or chunk["sizes"][1:] != shape[1:]:
            raise ValueError("the pieces of a tensor are not its rows, one after the other")
        end += chunk["sizes"][0]
    if end != shape[0]:
        raise ValueError(f"the pieces of a tensor have {end} rows, and it has {shape[0]}")


def _check_files(folder: str, tensors: Mapping[str, Any]) -> None:
    """The files are there, and large enough for what they are said to hold."""
    needed: dict[str, int] = {}
    for entry in tensors.values():
        for chunk in entry["chunks"]:
            size = math.prod(chunk["sizes"]) * _DTYPES[entry["dtype"]].itemsize
            needed[chunk["file"]] = needed.get(chunk["file"], 0) + size
    for name, size in needed.items():
        path = os.path.join(folder, name)
        if not os.path.isfile(path):
            raise ResumePointError(f"the sharded point is torn: {path} is missing")
        if os.path.getsize(path) < size:
            raise ResumePointError(f"{path} is corrupted: it is shorter than its tensors")


def load_planner() -> DefaultLoadPlanner:
    """The planner of a flat mapping of names to tensors to fill."""
    return DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


def resolve(value: Any, folder: str, map_location: Any = "cpu") -> Any:
    """``value`` with whole tensors in place of its references, read in this process alone."""
    reader = ShardReader(folder)
    device = map_location if isinstance(map_location, (str, torch.device)) else "cpu"
    tensors = {
        name: reader.empty(
            name, lambda shape, dtype: torch.empty(shape, dtype=dtype, device=device)
        )
        for name in dict.fromkeys(references(value))
    }
    planner, metadata = load_planner(), reader.read_metadata()
    planner.set_up_planner(tensors, metadata, is_coordinator=True)
    plan = planner.create_global_plan([planner.create_local_plan()])[0]
    reader.read_data(planner.finish_plan(plan), planner).wait()
    return put_back(value, tensors)
