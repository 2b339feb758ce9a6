"""Autoregressive decoding of any number of prompts, each of its own length.

Every prompt is decoded as if it were alone: rows share matrix products, never
positions, padding or random draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from nnx.generation.processors import LogitsProcessor, apply_chain, sample_next_token
from nnx.lm.cache import KVCache
from nnx.lm.token_step import TokenStep
from nnx.precision import full_precision

_PREFILL_LOGITS = 1 << 26  # elements of the logits of prompts that are read together


class Writer(Protocol):
    """What is told of the tokens of one sequence as they are chosen."""

    done: bool
    """Whether the sequence is complete with the last token."""

    def accept(self, token: int) -> bool:
        """Whether ``token`` belongs to the text; ``False`` ends the sequence before it."""
        ...


@dataclass
class Draft:
    """One sequence that is being written: its tokens so far and how the next is chosen."""

    ids: list[int]
    processors: Sequence[LogitsProcessor]
    greedy: bool
    generator: torch.Generator | None
    writer: Writer

    def choose(self, logits: torch.Tensor) -> int:
        """The next token from ``logits`` (1, vocab)."""
        logits = apply_chain(logits, token_history=self.ids, processors=self.processors)
        if self.greedy:
            return int(logits.argmax())
        return sample_next_token(logits, generator=self.generator)

    def append(self, token: int) -> bool:
        """Take ``token``; whether the sequence goes on."""
        if not self.writer.accept(token):
            return False
        self.ids.append(token)
        return not self.writer.done


def decode(
    net: Any, sequences: Sequence[Draft], *, max_new_tokens: int, limit: int, use_cache: bool
) -> None:
    """Write up to ``max_new_tokens`` after every sequence.

    ``limit`` is how many tokens the net sees: beyond it the window slides, and the
    last ``limit`` tokens are read anew for each token.
    """
    device = next(net.parameters()).device
    recomputed = _Recomputed(net, device, limit)
    cached = use_cache and hasattr(net, "forward_with_cache")
    source: _Source = _Cached(recomputed, max_new_tokens) if cached else recomputed
    live = list(sequences)
    for _ in range(max_new_tokens):
        if not live:
            return
        tokens = _choose(live, source.logits(live))
        live = [row for row, token in zip(live, tokens) if row.append(token)]


def _choose(rows: Sequence[Draft], logits: torch.Tensor) -> list[int]:
    if all(row.greedy and not row.processors for row in rows):
        return [int(token) for token in logits.argmax(dim=-1).tolist()]
    return [row.choose(logits[i : i + 1]) for i, row in enumerate(rows)]


class _Source:
    """Next-token logits (rows, vocab), float32 or wider, of sequences."""

    def logits(self, rows: Sequence[Draft]) -> torch.Tensor:
        raise NotImplementedError


class _Recomputed(_Source):
    """Reads the whole window for every token."""

    def __init__(self, net: Any, device: torch.device, limit: int) -> None:
        self.net, self.device, self.limit = net, device, limit

    def logits(self, rows: Sequence[Draft]) -> torch.Tensor:
        return torch.cat([self._last(row) for row in rows])

    def _last(self, row: Draft) -> torch.Tensor:
        window = torch.tensor([row.ids[-self.limit :]], device=self.device)
        return full_precision(self.net(window)[:, -1])


class _Cached(_Source):
    """Reads one token per step and remembers keys and values; slides where a row is full."""

    def __init__(self, sliding: _Recomputed, max_new_tokens: int) -> None:
        self.net, self.device, self.limit = sliding.net, sliding.device, sliding.limit
        self.sliding = sliding
        self.max_new_tokens = max_new_tokens
        self.step = TokenStep.of(self.net)
        self.caches: list[tuple[KVCache, list[Draft]]] | None = None

    def logits(self, rows: Sequence[Draft]) -> torch.Tensor:
        if self.caches is None:
            return self._prefill(rows)
        found: dict[int, torch.Tensor] = {}
        for i, (cache, held) in enumerate(self.caches):
            wanted = {id(row) for row in rows if len(row.ids) <= self.limit}
            kept = [k for k, row in enumerate(held) if id(row) in wanted]
            if not kept:
                continue
            if len(kept) < len(held):
                cache.keep(kept)
                held = [held[k] for k in kept]
                self.caches[i] = (cache, held)
            tokens = torch.tensor([row.ids[-1:] for row in held], device=self.device)
            if self.step is not None:
                last = self.step(tokens, cache)
            else:
                last = full_precision(self.net.forward_with_cache(tokens, cache)[0][:, -1])
            if len(held) == len(rows):
                return last
            found.update({id(row): last[k : k + 1] for k, row in enumerate(held)})
        return torch.cat(
            [found[id(row)] if id(row) in found else self.sliding.logits([row]) for row in rows]
        )

    def _prefill(self, rows: Sequence[Draft]) -> torch.Tensor:
        self.caches, last = [], []
        for group in self._groups(rows):
            lengths = [len(row.ids) for row in group]
            padded = torch.zeros(len(group), max(lengths), dtype=torch.long)
            for i, row in enumerate(group):
                padded[i, : lengths[i]] = torch.tensor(row.ids)
            logits, kvs = self.net.forward_with_cache(padded.to(self.device), None)
            index = torch.tensor(lengths, device=self.device) - 1
            last.append(full_precision(logits[torch.arange(len(group), device=self.device), index]))
            soft = kvs[0][0].shape[2] - max(lengths)  # a soft prompt is in the cache too
            room = min(max(lengths) + self.max_new_tokens, self.limit)
            cache = KVCache(kvs, [soft + n for n in lengths], soft + room)
            self.caches.append((cache, list(group)))
        return torch.cat(last)

    def _groups(self, rows: Sequence[Draft]) -> list[list[Draft]]:
        """Runs of rows whose prompts are read at once, within a bound of memory."""
        groups: list[list[Draft]] = [[]]
        width = getattr(getattr(self.net, "params", None), "vocab_size", 1 << 15)
        longest = 0
        for row in rows:
            longest = max(longest, len(row.ids))
            if groups[-1] and (len(groups[-1]) + 1) * longest * width > _PREFILL_LOGITS:
                groups.append([])
                longest = len(row.ids)
            groups[-1].append(row)
        return groups
