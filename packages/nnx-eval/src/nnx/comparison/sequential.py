"""A rule, declared beforehand, for stopping to add replicates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nnx.comparison.observations import ComparisonError
from nnx.comparison.significance import paired_t
from nnx.utils import validation as check


@dataclass(frozen=True, slots=True)
class SequentialTest:
    """Look after each number of pairs in ``looks``; claim at the first p-value below its share.

    ``alpha`` is spent by a Pocock-like function, ``alpha · log(1 + (e - 1) · n / last)`` (Lan &
    DeMets, 1983): each look gets the share that was not spent before, so that the chance of
    a false claim over all looks is at most ``alpha``. Looking more often than declared is refused.
    """

    looks: tuple[int, ...]
    alpha: float = 0.05

    def __post_init__(self) -> None:
        try:
            looks = tuple(check.count("SequentialTest", "looks", n, at_least=2) for n in self.looks)
            check.real("SequentialTest", "alpha", self.alpha, above=0, below=1)
        except (ValueError, TypeError) as error:
            raise ComparisonError(str(error)) from None
        if not looks or list(looks) != sorted(set(looks)):
            raise ComparisonError(f"SequentialTest.looks must rise, each look once: {looks}")
        object.__setattr__(self, "looks", looks)

    def threshold(self, look: int) -> float:
        """The p-value below which the look after ``look`` pairs claims a difference."""
        if look not in self.looks:
            raise ComparisonError(
                f"no look after {look} pairs was declared (looks: {', '.join(map(str, self.looks))})"
            )
        place = self.looks.index(look)
        before = self._spent(self.looks[place - 1]) if place else 0.0
        return self._spent(look) - before

    def decide(self, deltas: Sequence[float]) -> str:
        """``"difference"`` (stop), ``"continue"``, or ``"no difference found"`` at the last look.

        Earlier looks count too: a difference that was claimed stays claimed.
        """
        if len(deltas) not in self.looks:
            self.threshold(len(deltas))
        for look in self.looks:
            if look > len(deltas):
                return "continue"
            p_value = paired_t(deltas[:look]).p_value
            if p_value is not None and p_value < self.threshold(look):
                return "difference"
        return "no difference found"

    def _spent(self, look: int) -> float:
        return self.alpha * math.log(1 + (math.e - 1) * look / self.looks[-1])
