"""The gradients and sums of one update window.

A normalized term of a window is ``Σ numerators / Σ denominators``, known only
when the window closes. The gradients of each term therefore collect in a buffer
of their own, over a reference denominator (the first one seen, so that gradients
keep the magnitude of a mean). The term that ran last keeps its buffer in
``.grad`` (it is *resident*), which makes the usual single term free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, cast

import torch

from nnx.engine import gradients
from nnx.objectives import LossTerm, UpdateEvent


@dataclass(slots=True)
class TermTotals:
    """The sums of one term over a window or an epoch."""

    reduction: str
    numerator: float = 0.0
    weighted: float = 0.0
    denominator: float = 0.0
    live: bool = False

    def add(self, other: TermTotals) -> None:
        """Add the sums of another window or process."""
        self.numerator += other.numerator
        self.weighted += other.weighted
        self.denominator += other.denominator
        self.live |= other.live

    @property
    def value(self) -> float:
        """The unweighted term."""
        return self.numerator / self.denominator if self.reduction == "mean" else self.numerator

    @property
    def loss(self) -> float:
        """The term's part of the loss."""
        return self.weighted / self.denominator if self.reduction == "mean" else self.weighted


@dataclass(slots=True)
class WindowTotals:
    """The sums of a window's terms, by name."""

    terms: dict[str, TermTotals] = field(default_factory=dict)
    nonfinite: bool = False
    microbatches: int = 0

    @staticmethod
    def merged(parts: Iterable[WindowTotals]) -> WindowTotals:
        """The sums over several windows or processes."""
        total = WindowTotals()
        for part in parts:
            total.nonfinite |= part.nonfinite
            total.microbatches += part.microbatches
            total.add_terms(part)
        return total

    def add_terms(self, other: WindowTotals) -> None:
        """Add the terms of another window."""
        for name, term in other.terms.items():
            self.terms.setdefault(name, TermTotals(term.reduction)).add(term)

    def live(self) -> dict[str, TermTotals]:
        """The terms with at least one valid sample."""
        return {name: term for name, term in self.terms.items() if term.live}

    def loss(self) -> float | None:
        """The combined loss; ``None`` when every term is masked."""
        live = self.live()
        return sum(term.loss for term in live.values()) if live else None

    def state(self) -> dict[str, Any]:
        """The sums as plain numbers."""
        return {
            "microbatches": self.microbatches,
            "nonfinite": self.nonfinite,
            "terms": {name: asdict(term) for name, term in self.terms.items()},
        }

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> WindowTotals:
        """Rebuild from :meth:`state`."""
        return WindowTotals(
            {name: TermTotals(**term) for name, term in state["terms"].items()},
            bool(state["nonfinite"]),
            int(state["microbatches"]),
        )


@dataclass(frozen=True, slots=True)
class BackwardShare:
    """This process's part of a term that all processes back-propagate together.

    ``reference`` is the denominator that all of them divide by. A process in which
    the term is masked has no ``term`` and takes part with ``nothing``, a zero that
    depends on what its network has computed.
    """

    name: str
    reference: float
    term: LossTerm | None
    nothing: torch.Tensor | None

    def loss(self, reference: float) -> torch.Tensor:
        """What is back-propagated, over the window's ``reference``."""
        if self.term is not None:
            return self.term.scaled(reference)
        assert self.nothing is not None
        return self.nothing


class WindowSynchronizer(Protocol):
    """Joins the windows of several processes into one update.

    Called once for every window that closes, on every process, also for a masked
    or a dropped one: ``totals`` first and, unless the window is masked or
    dropped, ``gradients``. Both come before unscaling, the finite check and
    clipping.

    Where a backward pass itself takes all processes, ``shares`` are what this one
    back-propagates of each microbatch; it is called for every one.
    """

    def shares(self, terms: Sequence[LossTerm], *, closes: bool) -> list[BackwardShare] | None:
        """This process's part of the active ``terms``; ``None``: it is on its own here.

        ``closes`` says whether the microbatch is the window's last.
        """
        ...

    def totals(self, totals: WindowTotals) -> WindowTotals:
        """The window's totals over all processes (``WindowTotals.merged``)."""
        ...

    def all_finite(self, finite: bool) -> bool:
        """Whether the gradients that each process holds are finite."""
        ...

    def gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Replace every ``.grad`` by its sum over processes; a missing one counts as zero."""
        ...


@dataclass(slots=True)
class Applied:
    """What became of one microbatch.

    ``value`` is its loss (``None``: everything masked). ``closed``: it ended a
    window. ``committed``: the optimizers took a step. ``events``: one per
    optimizer that did.
    """

    value: float | None = None
    closed: bool = False
    committed: bool = False
    events: tuple[UpdateEvent, ...] = ()


class GradientWindow:
    """One open window over the parameters that its optimizers own when it opens."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter] = ()) -> None:
        self.parameters = list(parameters)
        self.totals = WindowTotals()
        self._references: dict[str, float] = {}
        self._buffers: dict[str, gradients.Gradients] = {}
        self._resident: str | None = None
        self.clear()

    def clear(self) -> None:
        """Leave no gradient behind."""
        for parameter in self.parameters:
            parameter.grad = None

    def held(self) -> list[torch.Tensor]:
        """The gradients that are there."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def totals_of(self, term: LossTerm) -> TermTotals:
        """The sums of ``term``; refuses one that changes its reduction within the window."""
        totals = self.totals.terms.setdefault(term.name, TermTotals(term.reduction))
        if totals.reduction != term.reduction:
            raise ValueError(
                f"loss term {term.name!r} is reduced by {term.reduction!r} after "
                f"{totals.reduction!r} in one update window; a term keeps its reduction"
            )
        return totals

    def backward(
        self,
        terms: Sequence[LossTerm],
        *,
        scaler: torch.amp.GradScaler | None,
        combine: bool,
        restrict: bool = True,
    ) -> None:
        """Collect the gradients of ``terms``; ``combine`` takes one pass through their sum.

        ``restrict`` differentiates only parameters of the window that require
        gradients, and no other leaf of the graph.
        """
        losses: list[tuple[str, torch.Tensor]] = []
        for term in terms:
            reference = 1.0 if term.denominator is None else float(term.denominator)
            loss = term.scaled(self._references.setdefault(term.name, reference))
            if loss.requires_grad:
                losses.append((term.name, loss))
        if not losses:
            raise RuntimeError(
                "no loss term depends on a parameter that requires gradients (terms: "
                f"{', '.join(term.name for term in terms)}). Was a numerator detached, or is "
                "every parameter frozen?"
            )
        inputs = [p for p in self.parameters if p.requires_grad] if restrict else None
        if restrict and not inputs:
            return
        if combine:
            losses = [("", cast(torch.Tensor, sum(loss for _, loss in losses)))]
        elif len(losses) > 1:
            losses.sort(key=lambda pair: pair[0] != self._resident)
        self._run(losses, scaler=scaler, inputs=inputs)

    def backward_shares(
        self, shares: Sequence[BackwardShare], *, scaler: torch.amp.GradScaler | None
    ) -> None:
        """Collect the gradients of this process's shares of terms that all processes run."""
        losses = [
            (share.name, share.loss(self._references.setdefault(share.name, share.reference)))
            for share in shares
        ]
        self._run(losses, scaler=scaler, inputs=None)

    def _run(
        self,
        losses: Sequence[tuple[str, torch.Tensor]],
        *,
        scaler: torch.amp.GradScaler | None,
        inputs: Sequence[torch.nn.Parameter] | None,
    ) -> None:
        for index, (name, loss) in enumerate(losses):
            self._make_resident(name)
            scaled = loss if scaler is None else scaler.scale(loss)
            torch.autograd.backward(scaled, inputs=inputs, retain_graph=index + 1 < len(losses))

    def reduce(self, totals: WindowTotals) -> None:
        """Turn the buffers into the gradient of the window's loss, in ``.grad``.

        ``totals`` holds the denominators to divide by: the window's, or those of
        all processes.
        """
        if self._resident is not None:
            self._buffers[self._resident] = gradients.collect(self.parameters)
        for name, buffer in self._buffers.items():
            term = totals.terms.get(name)
            if term is not None and term.reduction == "mean":
                gradients.divide(buffer, term.denominator / self._references[name])
        for name, buffer in self._buffers.items():
            if name != self._resident:
                gradients.add(self.parameters, buffer)
        self._buffers, self._resident = {}, None

    def state(self) -> dict[str, Any]:
        """Sums, references and copies of the gradients, by position of the parameter."""
        return {
            "totals": self.totals.state(),
            "references": dict(self._references),
            "resident": self._resident,
            "gradients": gradients.collect(self.parameters, clone=True),
            "buffers": {name: list(buffer) for name, buffer in self._buffers.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue the window of :meth:`state`."""
        self.totals = WindowTotals.from_state(state["totals"])
        self._references = dict(state["references"])
        self._resident = state["resident"]
        self._buffers = dict(state["buffers"])
        gradients.restore(self.parameters, state["gradients"])

    def _make_resident(self, name: str) -> None:
        """Put the buffer of ``name`` in place as ``.grad``."""
        if self._resident == name:
            return
        if self._resident is not None:
            self._buffers[self._resident] = gradients.collect(self.parameters)
            empty: gradients.Gradients = [None] * len(self.parameters)
            gradients.restore(self.parameters, self._buffers.pop(name, empty))
        self._resident = name
