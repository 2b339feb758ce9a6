"""How the windows of several processes become one update."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nnx.distributed.group import Group
from nnx.engine.window import BackwardShare, TermTotals, WindowTotals
from nnx.objectives import LossTerm


class GradientSum:
    """Joins the windows of the processes: sums of the totals, then of the gradients."""

    owner = "DDP"

    def __init__(self, group: Group, *, find_unused: bool) -> None:
        self._group = group
        self._find_unused = find_unused
        self._terms: dict[str, str] = {}  # name -> reduction, as all processes know them

    def totals(self, totals: WindowTotals) -> WindowTotals:
        """One message of numbers, as long as the terms have the names of the last window."""
        mine = {name: term.reduction for name, term in totals.terms.items()}
        numbers = [float(mine != self._terms), float(totals.nonfinite), float(totals.microbatches)]
        for name, reduction in self._terms.items():
            term = totals.terms.get(name, TermTotals(reduction))
            numbers += [float(term.live), term.numerator, term.weighted, term.denominator]
        renamed, nonfinite, microbatches, *sums = self._group.add(numbers)
        if renamed:
            states = self._group.gather(totals.state())
            whole = WindowTotals.merged(map(WindowTotals.from_state, states))
            self._terms = {name: term.reduction for name, term in whole.terms.items()}
            return whole
        terms = {}
        for index, (name, reduction) in enumerate(self._terms.items()):
            live, numerator, weighted, denominator = sums[4 * index : 4 * index + 4]
            terms[name] = TermTotals(reduction, numerator, weighted, denominator, live > 0)
        return WindowTotals(terms, nonfinite > 0, int(microbatches))

    def shares(self, terms: Sequence[LossTerm], *, closes: bool) -> list[BackwardShare] | None:
        """Each process back-propagates on its own."""
        return None

    def all_finite(self, finite: bool) -> bool:
        """All processes hold the same gradients."""
        return finite

    def gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Sum them over the processes; one that is there in no process stays missing."""
        trained = [p for p in parameters if p.requires_grad]
        if not trained:
            return
        present = torch.tensor([float(p.grad is not None) for p in trained])
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        first = trained[0].grad
        assert first is not None
        present = present.to(first)  # travels with the first gradients
        self._group.sum([present, *(p.grad for p in trained if p.grad is not None)])
        counts = present.tolist()
        for parameter, count in zip(trained, counts):
            if not count:
                parameter.grad = None
        self.check_unused(sum(1 for count in counts if not count), len(counts))

    def check_unused(self, unused: int, trained: int) -> None:
        """Refuse parameters without a gradient, unless that is meant."""
        if unused and not self._find_unused:
            raise RuntimeError(
                f"{unused} of {trained} parameters got no gradient in any process; pass "
                f"{self.owner}(find_unused_parameters=True) when that is meant"
            )
