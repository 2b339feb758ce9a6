"""Processors in an order: the canonical one, or the caller's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from nnx.generation.processors import (
    LogitsProcessor,
    MinPFilter,
    RepetitionPenalty,
    TemperatureScaling,
    TopKFilter,
    TopPFilter,
    apply_chain,
)

_ORDER = (RepetitionPenalty, TopKFilter, TopPFilter, MinPFilter, TemperatureScaling)


@dataclass
class LogitsChain:
    """Processors that are applied in the order of the list."""

    processors: list[LogitsProcessor] = field(default_factory=list)

    def apply(self, logits: torch.Tensor, token_history: list[int]) -> torch.Tensor:
        """``logits`` (..., vocab) after every processor."""
        return apply_chain(logits, token_history=token_history, processors=self.processors)

    @classmethod
    def builder(cls) -> LogitsChainBuilder:
        """A builder that puts the standard processors into their canonical order."""
        return LogitsChainBuilder()


class LogitsChainBuilder:
    """Repetition penalty, top-k, top-p, min-p, temperature; then custom ones as they were added.

    A standard processor named twice is kept once, as it was named last.
    """

    def __init__(self) -> None:
        self._standard: dict[type[Any], LogitsProcessor] = {}
        self._custom: list[LogitsProcessor] = []

    def build(self) -> LogitsChain:
        """The chain; the builder can go on."""
        ordered = [self._standard[kind] for kind in _ORDER if kind in self._standard]
        return LogitsChain(processors=[*ordered, *self._custom])

    def repetition_penalty(self, penalty: float) -> LogitsChainBuilder:
        return self._put(RepetitionPenalty(penalty))

    def top_k(self, k: int) -> LogitsChainBuilder:
        return self._put(TopKFilter(k))

    def top_p(self, p: float) -> LogitsChainBuilder:
        return self._put(TopPFilter(p))

    def min_p(self, p: float) -> LogitsChainBuilder:
        return self._put(MinPFilter(p))

    def temperature(self, t: float) -> LogitsChainBuilder:
        return self._put(TemperatureScaling(t))

    def custom(self, processor: LogitsProcessor) -> LogitsChainBuilder:
        """Append ``processor(logits, token_history)`` after the standard ones."""
        if not callable(processor):
            raise TypeError(
                f"a logits processor is a callable (logits, token_history) -> logits, "
                f"not {type(processor).__name__}"
            )
        self._custom.append(processor)
        return self

    def _put(self, processor: LogitsProcessor) -> LogitsChainBuilder:
        self._standard[type(processor)] = processor
        return self
