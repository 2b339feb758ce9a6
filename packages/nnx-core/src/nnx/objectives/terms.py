"""Loss terms: sums over samples, and what they are means over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from nnx.records import NNEvaluationDataPoint
from nnx.utils import validation as check


@dataclass(frozen=True, slots=True, eq=False)
class LossTerm:
    """One named part of a microbatch's loss.

    ``numerator`` is a differentiable scalar, the sum of the term over samples.
    With ``reduction="mean"`` the term is ``Σ numerator / Σ denominator`` over a
    window; ``denominator`` is the number of samples or their total weight, 0
    when all are masked. With ``reduction="sum"`` it is ``Σ numerator`` and there
    is no denominator. ``weight`` multiplies the term in the loss; a term of
    weight 0 is reported and never back-propagated.
    """

    name: str
    numerator: torch.Tensor
    denominator: int | float | None = None
    reduction: str = "mean"
    weight: float = 1.0

    def __post_init__(self) -> None:
        _check_term(self)

    @property
    def masked(self) -> bool:
        """Whether no sample of the microbatch is valid."""
        return self.denominator is not None and self.denominator == 0

    @property
    def value(self) -> float | None:
        """The detached, unweighted term of this microbatch; ``None`` when masked."""
        return None if self.masked else self.sums(float(self.reading()))[1]

    def reading(self) -> torch.Tensor:
        """The detached tensor from which the term's numbers are read."""
        return self.numerator.detach()

    def sums(self, reading: float) -> tuple[float, float]:
        """The numerator and the value that a read number stands for."""
        return reading, reading / self.denominator if self.denominator is not None else reading

    def scaled(self, reference: float) -> torch.Tensor:
        """The weighted numerator over ``reference``, to back-propagate."""
        factor = self.weight / reference
        return self.numerator if factor == 1.0 else self.numerator * factor


class MeanTerm(LossTerm):
    """A normalized term of which a loss function computed the mean.

    The mean itself is back-propagated where it can be, so that an update is bit
    for bit the one of ``loss.backward()``; the numerator is derived.
    """

    __slots__ = ("mean",)

    mean: torch.Tensor

    def __init__(
        self, name: str, mean: torch.Tensor, denominator: float, weight: float = 1.0
    ) -> None:
        for field, value in (
            ("name", name),
            ("mean", mean),
            ("denominator", denominator),
            ("reduction", "mean"),
            ("weight", weight),
        ):
            object.__setattr__(self, field, value)

    @property
    def numerator(self) -> torch.Tensor:
        """The sum over samples."""
        return self.mean * cast(float, self.denominator)

    def reading(self) -> torch.Tensor:
        return self.mean.detach()

    def sums(self, reading: float) -> tuple[float, float]:
        return reading * cast(float, self.denominator), reading

    def scaled(self, reference: float) -> torch.Tensor:
        factor = self.weight * (cast(float, self.denominator) / reference)
        return self.mean if factor == 1.0 else self.mean * factor


@dataclass(frozen=True, slots=True)
class ObjectiveResult:
    """The terms of one microbatch and, optionally, the record to keep for it.

    No terms at all mean that nothing in the microbatch is valid. Without a
    ``record`` the engine records the loss alone; a record without a loss gets it.
    """

    terms: Sequence[LossTerm]
    record: NNEvaluationDataPoint | None = None

    def __post_init__(self) -> None:
        terms = tuple(self.terms)
        for term in terms:
            if not isinstance(term, LossTerm):
                raise TypeError(
                    f"ObjectiveResult.terms must hold LossTerm objects, not {type(term).__name__}"
                )
        names = [term.name for term in terms]
        if len(set(names)) != len(names):
            raise ValueError(f"ObjectiveResult.terms has two terms of one name: {names}")
        object.__setattr__(self, "terms", terms)

    def loss(self) -> float | None:
        """The combined, weighted loss of the microbatch; ``None`` when every term is masked."""
        values = [(term.weight, term.value) for term in self.terms]
        live = [weight * value if weight else 0.0 for weight, value in values if value is not None]
        return sum(live) if live else None


def _check_term(term: LossTerm) -> None:
    check.text("LossTerm", "name", term.name)
    owner = f"LossTerm({term.name!r})"
    numerator: object = term.numerator
    if not isinstance(numerator, torch.Tensor):
        check.refuse(owner, "numerator", numerator, "a tensor")
    if numerator.numel() != 1 or not numerator.is_floating_point():
        raise ValueError(
            f"{owner}.numerator must be a floating scalar, the term summed over its samples, not "
            f"{numerator.dtype} of shape {tuple(numerator.shape)}"
        )
    check.real(owner, "weight", term.weight)
    check.choice(owner, "reduction", term.reduction, ("mean", "sum"))
    if term.reduction == "sum" and term.denominator is not None:
        raise ValueError(f'{owner}: reduction="sum" takes no denominator')
    if term.reduction == "mean":
        if term.denominator is None:
            raise ValueError(
                f'{owner}: reduction="mean" needs a denominator, the number of samples (or their '
                'total weight) that the numerator sums over; a plain sum is reduction="sum"'
            )
        check.real(owner, "denominator", term.denominator, at_least=0)
