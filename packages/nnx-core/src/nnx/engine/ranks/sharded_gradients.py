"""How a backward pass over sharded parameters takes all processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from nnx.distributed.group import BACKWARD, Group
from nnx.distributed.sharding import ShardedNet
from nnx.engine.ranks.gradients import GradientSum
from nnx.engine.window import BackwardShare
from nnx.objectives import LossTerm


class ShardedSum(GradientSum):
    """Sums over the processes that the backward pass itself takes.

    The processes divide a term by one reference, the denominators of them all. Of a
    window of several microbatches with one term, only the last one exchanges gradients.
    """

    owner = "FSDP"
    net: ShardedNet

    def __init__(self, group: Group, *, find_unused: bool) -> None:
        super().__init__(group, find_unused=find_unused)
        self._names: list[str] = []  # terms, as all processes know them
        self._outputs: list[torch.Tensor] = []  # of the forwards since the last backward
        self._kept: str | None = None  # the term whose gradients are not exchanged yet

    def note_output(self, output: Any) -> None:
        """Remember what a forward returned, to take part in a backward without a term."""
        self._outputs += [t for t in _tensors(output) if t.requires_grad]

    def shares(self, terms: Sequence[LossTerm], *, closes: bool) -> list[BackwardShare] | None:
        mine = {term.name: term for term in terms}
        references = self._agreed(mine)
        names = list(references)
        if self._kept is not None:
            names = [self._kept, *(name for name in names if name != self._kept)]
        keep = len(names) == 1 and not closes
        self.net.synchronize_gradients(not keep)
        self._kept = names[0] if keep else None
        nothing = self._nothing() if any(name not in mine for name in names) else None
        self._outputs.clear()
        return [
            BackwardShare(name, references.get(name, 1.0), mine.get(name), nothing)
            for name in names
        ]

    def _agreed(self, mine: Mapping[str, LossTerm]) -> dict[str, float]:
        """The terms that some process has, with the sum of their denominators."""
        numbers = [float(any(name not in self._names for name in mine))]
        for name in self._names:
            term = mine.get(name)
            numbers += [0.0, 0.0] if term is None else [1.0, float(term.denominator or 0.0)]
        unknown, *sums = self._group.add(numbers, about=BACKWARD)
        if unknown:
            others = self._group.gather(list(mine))
            new = sorted({name for names in others for name in names} - set(self._names))
            self._names += new
            return self._agreed(mine)
        pairs = zip(self._names, sums[::2], sums[1::2])
        return {name: weight or 1.0 for name, active, weight in pairs if active}

    def _nothing(self) -> torch.Tensor:
        if not self._outputs:
            raise RuntimeError(
                "this process has nothing to back-propagate: it ran no forward of the network that "
                "the other processes did. Under distributed=FSDP() every process runs the network "
                "on each of its batches, by calling the model's net"
            )
        zeros = [torch.where(torch.isfinite(t), t, 0).sum() * 0 for t in self._outputs]
        return torch.stack(zeros).sum()

    def all_finite(self, finite: bool) -> bool:
        return not self._group.any(not finite)

    def gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """They are summed already."""
        trained = [p for p in parameters if p.requires_grad]
        self.check_unused(sum(1 for p in trained if p.grad is None), len(trained))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
