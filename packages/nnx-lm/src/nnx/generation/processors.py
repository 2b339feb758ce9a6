"""What changes next-token logits, one call each.

A processor takes logits (..., vocab) and the token ids so far, prompt included,
and returns logits of the same shape. It never changes its input. ``-inf`` marks
a token that cannot be drawn; none of the filters here ever marks all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from nnx.utils import validation as check

_NEVER = float("-inf")
_ALWAYS = float("inf")


class LogitsProcessor(Protocol):
    """``processor(logits, token_history) -> logits``."""

    def __call__(self, logits: torch.Tensor, token_history: list[int]) -> torch.Tensor: ...


class TemperatureScaling:
    """``logits / temperature``; 0 leaves the (first) greatest logit alone, as ``+inf``."""

    def __init__(self, temperature: float) -> None:
        self.temperature = check.real("TemperatureScaling", "temperature", temperature, at_least=0)

    def __call__(self, logits: torch.Tensor, token_history: list[int]) -> torch.Tensor:
        if self.temperature:
            return logits / self.temperature
        only = torch.full_like(logits, _NEVER)
        return only.scatter(-1, logits.argmax(dim=-1, keepdim=True), _ALWAYS)


class TopKFilter:
    """Keeps the ``top_k`` greatest logits and whatever ties with the last of them."""

    def __init__(self, top_k: int) -> None:
        self.top_k = check.count("TopKFilter", "top_k", top_k)

    def __call__(self, logits: torch.Tensor, token_history: list[int]) -> torch.Tensor:
        if self.top_k >= logits.shape[-1]:
            return logits
        threshold = logits.topk(self.top_k, dim=-1).values[..., -1:]
        return logits.masked_fill(logits < threshold, _NEVER)


class TopPFilter:
    """Keeps the fewest most probable tokens that together reach ``top_p``, at least one.

    Nucleus sampling (Holtzman et al. 2019, arXiv:1904.09751). Probabilities are
    summed in float32 or wider; equal ones count in the order of their ids.
    """

    def __init__(self, top_p: float) -> None:
        self.top_p = check.real("TopPFilter", "top_p", top_p, at_least=0, at_most=1)

    def __call__(self, logits: torch.Tensor, token_history: list[int]) -> torch.Tensor:
        if self.top_p >= 1:
            return logits
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        probabilities = _probabilities(ordered)
        before = probabilities.cumsum(dim=-1) - probabilities
        drop = before >= self.top_p
        drop[..., 0] = False
        return logits.masked_fill(drop.scatter(-1, order, drop), _NEVER)


class MinPFilter:
    """Keeps tokens at least ``min_p`` times as probable as the most probable one.

    Nguyen et al. 2024, arXiv:2407.01082.
    """

    def __init__(self, min_p: float) -> None:
        self.min_p = check.real("MinPFilter", "min_p", min_p, at_least=0, at_most=1)

    def __call__(self, logits: torch.Tensor, token_history: list[int]) -> torch.Tensor:
        probabilities = _probabilities(logits)
        limit = probabilities.amax(dim=-1, keepdim=True) * self.min_p
        return logits.masked_fill(probabilities < limit, _NEVER)


class RepetitionPenalty:
    """Makes tokens that were seen less likely: positive logits ``/ penalty``, others ``* penalty``.

    Keskar et al. 2019, arXiv:1909.05858. 1 changes nothing.
    """

    def __init__(self, penalty: float) -> None:
        self.penalty = check.real("RepetitionPenalty", "penalty", penalty, above=0)

    def __call__(self, logits: torch.Tensor, token_history: list[int]) -> torch.Tensor:
        if self.penalty == 1 or not token_history:
            return logits
        seen = torch.tensor(sorted(set(token_history)), device=logits.device)
        values = logits[..., seen]
        values = torch.where(values > 0, values / self.penalty, values * self.penalty)
        return logits.index_copy(-1, seen, values)


def _probabilities(logits: torch.Tensor) -> torch.Tensor:
    """The softmax, in float32 or wider; a logit of ``+inf`` has all of it."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    certain = torch.isposinf(wide)
    if bool(certain.any()):
        wide = torch.where(certain.any(dim=-1, keepdim=True), certain.log().to(wide.dtype), wide)
    return wide.softmax(dim=-1)


def apply_chain(
    logits: torch.Tensor, *, token_history: list[int], processors: Sequence[LogitsProcessor]
) -> torch.Tensor:
    """``logits`` after every processor in order."""
    for processor in processors:
        logits = processor(logits, token_history)
    return logits


def sample_next_token(logits: torch.Tensor, *, generator: torch.Generator | None = None) -> int:
    """One token id drawn from the softmax of ``logits``, (1, vocab) or (vocab,).

    Without ``generator`` the draw is of the global torch stream. Raises
    ``ValueError`` when every token is ruled out or a logit is NaN.
    """
    row = logits.reshape(-1)
    best = float(row.max())
    if best == _ALWAYS:  # greedy, or forced
        return int(row.argmax())
    if best == _NEVER or best != best:
        raise ValueError(
            "no token can be drawn: the processors left "
            + ("no logit above -inf" if best == _NEVER else "a NaN among the logits")
        )
    return int(torch.multinomial(row.softmax(dim=-1), 1, generator=generator))
