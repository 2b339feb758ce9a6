"""Keys and values of generated text, in memory that is reserved once.

Every row has a length of its own, so prompts of different lengths are decoded
together: a row's next token is written at that row's position, and what lies
beyond a row's length is never seen.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class LayerCache:
    """The keys and values of one layer, each (B, K, capacity, C)."""

    __slots__ = ("cache", "keys", "values")

    def __init__(self, cache: KVCache, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.cache, self.keys, self.values = cache, keys, values

    def append(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new tokens where :meth:`KVCache.advance` said; what is attended to."""
        where, end = self.cache.slots, self.cache.longest
        if isinstance(where, slice):
            start, new = where.start, where.stop - where.start
            self.keys.narrow(2, start, new).copy_(k)
            self.values.narrow(2, start, new).copy_(v)
        else:
            rows, positions = where  # (B, 1) and (B, T) index to (B, T, K, C)
            self.keys[rows, :, positions] = k.transpose(1, 2)
            self.values[rows, :, positions] = v.transpose(1, 2)
        return self.keys.narrow(2, 0, end), self.values.narrow(2, 0, end)


class KVCache:
    """One :class:`LayerCache` per layer and the length of every row.

    Args:
        kvs: ``(keys, values)`` of each layer after the prompts, each
            (B, K, S, C): what ``forward_with_cache`` returned for prompts that were
            padded on the right.
        lengths: how many of the S positions are real, per row.
        capacity: how many tokens a row can hold in the end.
    """

    def __init__(
        self,
        kvs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        lengths: Sequence[int],
        capacity: int,
    ) -> None:
        self.lengths = list(lengths)
        self.capacity = capacity
        self.layers = [LayerCache(self, *(self._reserve(t) for t in kv)) for kv in kvs]
        self.slots: slice | tuple[torch.Tensor, torch.Tensor] = slice(0, 0)

    def _reserve(self, filled: torch.Tensor) -> torch.Tensor:
        batch, heads, seen, width = filled.shape
        kept = filled.new_zeros(batch, heads, self.capacity, width)
        kept[:, :, :seen] = filled
        return kept

    @property
    def longest(self) -> int:
        """The length of the longest row."""
        return max(self.lengths, default=0)

    def advance(self, length: int) -> tuple[slice | torch.Tensor, torch.Tensor | None]:
        """Make room for ``length`` more tokens per row: their positions and their mask."""
        keys = self.layers[0].keys
        before, device = self.lengths, keys.device
        self.lengths = [n + length for n in before]
        if len(set(before)) == 1:
            self.slots = slice(before[0], before[0] + length)
            return self.slots, None
        start = torch.tensor(before, device=device)
        positions = start[:, None] + torch.arange(length, device=device)
        self.slots = (torch.arange(len(before), device=device)[:, None], positions)
        seen = torch.arange(self.longest, device=device)
        hidden = (seen > positions[:, :, None])[:, None]
        # Added to the scores: every layer would make that of a boolean mask anew.
        return positions, keys.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows alone."""
        index = torch.tensor(rows, device=self.layers[0].keys.device)
        for layer in self.layers:
            layer.keys = layer.keys.index_select(0, index)
            layer.values = layer.values.index_select(0, index)
        self.lengths = [self.lengths[row] for row in rows]
