"""Batches of equal length from a token file, without crossing documents and without padding."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from nnx.distributed.partition import RankPartition, ShardedLoader
from nnx.distributed.process import rank_and_world
from nnx.lm.corpus import TokenFile
from nnx.utils import validation as check
from torch.utils.data import Dataset

IGNORED = -100


class PackedTokens(Dataset[dict[str, torch.Tensor]]):
    """The windows of ``length`` tokens that a token file is cut into.

    An item, for ``CausalLMTask(alignment="pre_shifted")``, has ``input_ids`` and
    ``targets`` (length,), the targets being the tokens that follow; a target that
    would be another document's first token is ``-100``. ``documents`` (length,)
    numbers the documents of the window, so that attention stays inside each and
    positions start anew; with ``separate=False`` there is none, and text runs on over
    the documents' ends (plain contiguous packing).

    Every token of the file is the input of exactly one window. ``first`` and ``last``
    are the range of windows to use.
    """

    def __init__(
        self,
        tokens: TokenFile,
        length: int,
        *,
        separate: bool = True,
        first: int = 0,
        last: int | None = None,
    ) -> None:
        self.tokens = check.instance("PackedTokens", "tokens", tokens, TokenFile)
        self.length = check.count("PackedTokens", "length", length)
        self.separate = check.flag("PackedTokens", "separate", separate)
        windows = -(-len(tokens) // self.length)
        self.last = windows if last is None else check.count("PackedTokens", "last", last)
        self.first = check.count("PackedTokens", "first", first, at_least=0)
        if not self.first < self.last <= windows:
            raise ValueError(
                f"PackedTokens: windows {self.first} to {self.last} are not among the {windows} "
                f"of {len(tokens)} tokens at length {self.length}"
            )

    def split(self, share: float) -> tuple[PackedTokens, PackedTokens]:
        """The windows before, and the last ``share`` of them (at least one), to validate on."""
        check.real("PackedTokens.split", "share", share, above=0, below=1)
        cut = self.last - max(1, round(len(self) * share))
        if cut <= self.first:
            raise ValueError(
                f"{len(self)} window of {self.length} tokens cannot be split; use a shorter "
                "length or more text"
            )
        options: dict[str, Any] = {"separate": self.separate}
        return (
            PackedTokens(self.tokens, self.length, first=self.first, last=cut, **options),
            PackedTokens(self.tokens, self.length, first=cut, last=self.last, **options),
        )

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: rows[0] for name, rows in self.batch([index]).items()}

    def batch(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """The windows of these indices as one batch (B, length).

        An index at or beyond the number of windows is an empty window, whose targets
        are all ignored.
        """
        ids = np.zeros((len(indices), self.length + 1), dtype=np.int64)
        skipped = np.ones((len(indices), self.length), dtype=bool)
        begins = np.zeros((len(indices), self.length), dtype=np.int64)
        for row, index in enumerate(indices):
            if index < len(self):
                self._fill(self.first + index, ids[row], skipped[row], begins[row])
        targets = np.where(skipped, IGNORED, ids[:, 1:])
        batch = {
            "input_ids": torch.from_numpy(ids[:, :-1].copy()),
            "targets": torch.from_numpy(targets),
        }
        if self.separate:
            batch["documents"] = torch.from_numpy(begins.cumsum(axis=1))
        return batch

    def _fill(self, window: int, ids: np.ndarray, skipped: np.ndarray, begins: np.ndarray) -> None:
        start = window * self.length
        found = self.tokens.tokens[start : start + self.length + 1]
        ids[: len(found)] = found
        skipped[: len(found) - 1] = False  # the last token of the file has no target
        if not self.separate:
            return
        starts = self.tokens.starts
        low, high = np.searchsorted(starts, (start + 1, start + self.length + 1))
        places = (starts[low:high] - np.uint64(start)).astype(np.int64)
        skipped[places - 1] = True
        begins[places[places < self.length]] = 1
        begins[len(found) :] = 0


class PackedLoader(ShardedLoader):
    """Batches of :class:`PackedTokens`: shuffled by epoch, shared among processes, resumable.

    Each process of a group reads other windows; together they read every window
    once. Where the windows do not divide, a process gets empty ones, which count for
    nothing. ``validation`` is the loader of a ``val_loader``: in order, without empty
    windows. ``workers`` threads read ahead; neither their number nor the time they
    take changes a batch. No random stream of the process is read.

    The position inside an epoch is ``state_dict()``; a run with
    ``NNTrainParams(checkpoint_every=...)`` keeps it in its resume points and
    continues bit for bit where it was killed.
    """

    def __init__(
        self,
        dataset: PackedTokens,
        batch_size: int,
        *,
        validation: bool = False,
        shuffle: bool = True,
        seed: int = 0,
        workers: int = 0,
    ) -> None:
        self.packed = check.instance("PackedLoader", "dataset", dataset, PackedTokens)
        self.workers = check.count("PackedLoader", "workers", workers, at_least=0)
        rank, world = rank_and_world()
        rows = len(dataset) if validation else -(-len(dataset) // world) * world
        partition = RankPartition(
            rows, rank=rank, world_size=world, shuffle=shuffle, seed=seed, policy="drop",
            kind="validation" if validation else "train",
        )  # fmt: skip
        super().__init__(_Padded(dataset, rows), batch_size, partition)
        self._position = 0

    def descriptor(self) -> dict[str, Any]:
        """The plan of the batches, with what the windows are cut from."""
        packed = self.packed
        return {
            **super().descriptor(),
            "corpus": packed.tokens.digest,
            "length": packed.length,
            "separate": packed.separate,
            "windows": [packed.first, packed.last],
        }

    def set_epoch(self, epoch: int) -> None:
        """Order the windows for ``epoch`` and begin with the first batch."""
        super().set_epoch(epoch)
        self._position = 0

    def state_dict(self) -> dict[str, Any]:
        """The epoch, the batches that were handed out in it, and the plan they belong to."""
        return {"epoch": self.partition.epoch, "batch": self._position, "plan": self.descriptor()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` stood; ``ValueError`` for one of other windows or batches."""
        held = self.descriptor()
        changed = [key for key, value in held.items() if state["plan"].get(key) != value]
        if changed:
            raise ValueError(
                "the saved position is of other batches: "
                + ", ".join(f"{k} was {state['plan'].get(k)!r} and is {held[k]!r}" for k in changed)
            )
        self.partition.set_epoch(state["epoch"])
        self._position = state["batch"]

    def __iter__(self) -> Iterator[Any]:
        order = self.partition.indices()
        batches = deque(
            order[start : start + self.batch_size]
            for start in range(self._position * self.batch_size, len(order), self.batch_size)
        )
        start, self._position = self._position, self._position
        for done, batch in enumerate(self._read(batches), start + 1):
            self._position = done
            yield batch
        self._position = 0

    def _read(self, batches: deque[list[int]]) -> Iterator[Any]:
        if not self.workers:
            yield from map(self.packed.batch, batches)
            return
        with ThreadPoolExecutor(self.workers, thread_name_prefix="nnx-corpus") as pool:
            ahead: deque[Future[Any]] = deque()
            try:
                while batches or ahead:
                    while batches and len(ahead) < 2 * self.workers:
                        ahead.append(pool.submit(self.packed.batch, batches.popleft()))
                    yield ahead.popleft().result()
            finally:
                for future in ahead:
                    future.cancel()


class _Padded(Dataset[Any]):
    """The windows and some empty ones, so that every process gets as many."""

    def __init__(self, packed: PackedTokens, rows: int) -> None:
        self.packed, self.rows = packed, rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Any:
        return {name: rows[0] for name, rows in self.packed.batch([index]).items()}
