"""Batches of in-memory tensors fetched by index instead of sample by sample."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from nnx.errors import NNxError
from nnx.preprocessing import SplitView, Standardizer

# Takes the indices of a batch and returns the batch.
Gather = Callable[[Sequence[int]], Any]

# dtypes whose `index_select` gives what stacking single samples gives.
_DTYPES = frozenset(
    {
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.uint8,
        torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128,
    }
)  # fmt: skip


def fast_batches(loader: Iterable[Any]) -> Iterator[Any]:
    """``iter(loader)``, quicker where the data are tensors in memory.

    The batches, their order and every random draw are those of
    ``iter(loader)``; the loader itself is not changed. It is quicker for a
    ``DataLoader`` without workers and with the default collation over a
    ``TensorDataset``, a ``StackDataset`` of tensors, or ``Subset`` views of
    these (a ``SplitView`` too), with any sampler or batch sampler. Anything else is iterated as is.
    """
    iterator = iter(loader)
    gather = _gather_of(loader)
    fetcher = getattr(iterator, "_dataset_fetcher", None)
    if (
        gather is not None
        and type(fetcher).__name__ == "_MapDatasetFetcher"
        and hasattr(iterator, "_next_data")
    ):
        # torch's own iterator goes on drawing seeds and indices; only the fetch differs.
        iterator._dataset_fetcher = _IndexFetcher(gather, fetcher)  # type: ignore[attr-defined]
        return _batches_of(iterator)
    return iterator


def _batches_of(iterator: Any) -> Iterator[Any]:
    """What ``next(iterator)`` gives, without a profiler range around each fetch."""
    next_batch = iterator._next_data
    while True:
        try:
            batch = next_batch()
        except StopIteration:
            return
        yield batch


class _Unusual(NNxError):
    """A negative index or one out of range: the dataset itself must answer."""


class _IndexFetcher:
    """Fetches a batch by its indices; asks torch's fetcher where they are unusual."""

    def __init__(self, gather: Gather, fallback: Any) -> None:
        self._gather = gather
        self._fallback = fallback

    def fetch(self, indices: Any) -> Any:
        if type(indices) is list and set(map(type, indices)) == {int}:
            with contextlib.suppress(_Unusual):
                return self._gather(indices)
        return self._fallback.fetch(indices)


def _gather_of(loader: Any) -> Gather | None:
    if not (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and getattr(type(loader), "_get_iterator", None) is getattr(DataLoader, "_get_iterator", 0)
        and loader.num_workers == 0
        and loader.batch_sampler is not None
        and loader.collate_fn is default_collate
    ):
        return None
    return gather_from(loader.dataset)


def gather_from(dataset: Dataset[Any]) -> Gather | None:
    """What fetches a batch of ``dataset`` by indices; ``None`` when it must go by sample."""
    if type(dataset) is Subset or type(dataset) is SplitView:
        inner, rows = gather_from(dataset.dataset), dataset.indices
        if inner is None:
            return None
        of_rows: Gather = lambda indices: inner([rows[i] for i in indices])  # noqa: E731
        return _gather_view(dataset, of_rows) if isinstance(dataset, SplitView) else of_rows
    if type(dataset) is TensorDataset:
        return _gather_tensors(dataset.tensors)
    if type(dataset) is StackDataset:
        parts = dataset.datasets
        if isinstance(parts, dict):
            names, gather = tuple(parts), _gather_tensors(tuple(parts.values()))
            return gather and (lambda indices: dict(zip(names, gather(indices))))
        return _gather_tensors(tuple(parts))
    return None


def _gather_view(view: SplitView, gather: Gather) -> Gather | None:
    if view.transform is None:
        return gather
    if type(view.transform) is not Standardizer:
        return None  # may draw, or depend on the row
    standardizer = view.transform

    def transformed(indices: Sequence[int]) -> Any:
        batch = gather(indices)
        if not isinstance(batch, list) or batch[0].dim() != 2:
            raise _Unusual
        return [standardizer.transform(batch[0]), *batch[1:]]

    return transformed


def _gather_tensors(tensors: Sequence[Any]) -> Gather | None:
    if not tensors or not all(_is_plain(tensor) for tensor in tensors):
        return None

    devices = {tensor.device for tensor in tensors}
    rows = min(len(tensor) for tensor in tensors)

    def gather(indices: Sequence[int]) -> list[torch.Tensor]:
        if min(indices) < 0 or max(indices) >= rows:
            raise _Unusual
        index = torch.from_numpy(numpy.array(indices, dtype=numpy.int64))  # 4x torch.tensor
        return [tensor.index_select(0, index.to(tensor.device)) for tensor in tensors]

    def gather_on_cpu(indices: Sequence[int]) -> list[torch.Tensor]:
        try:
            index = torch.from_numpy(numpy.array(indices, dtype=numpy.int64))
            return [tensor.index_select(0, index) for tensor in tensors]
        except (IndexError, RuntimeError, OverflowError) as error:  # negative, or out of range
            raise _Unusual from error

    return gather_on_cpu if devices == {torch.device("cpu")} else gather


def _is_plain(tensor: Any) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.dim() > 0
        and tensor.layout is torch.strided
        and tensor.dtype in _DTYPES
        and tensor.is_contiguous()
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )
