"""One experiment under several seeds, trained where it was not yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from nnx.plans.continuing import newest, train_or_continue
from nnx.plans.experiment import Experiment
from nnx.store import NNRun
from nnx.utils import validation as check

P = TypeVar("P", bound=Experiment)


@dataclass(frozen=True, slots=True)
class Replicates(Generic[P]):
    """The fits of ``plan`` under each of ``seeds``; ``label`` names the attempt of all.

    A replicate is known by its run id: the same plan, seed and label is the same run,
    in every process. One that was interrupted goes on from its last committed epoch.
    """

    plan: P
    seeds: tuple[int, ...]
    label: str = "replicate"

    def __post_init__(self) -> None:
        owner = "Replicates"
        seeds = tuple(
            check.count(owner, "seeds", seed, at_least=0, at_most=2**32 - 1) for seed in self.seeds
        )
        if not seeds or len(set(seeds)) != len(seeds):
            raise ValueError(f"{owner}.seeds must name one seed or more, each once, not {seeds}")
        object.__setattr__(self, "seeds", seeds)
        check.salt(owner, "label", self.label)

    def run_ids(self) -> Mapping[int, str]:
        """The run of each seed that there is, finished or not; its newest continuation."""
        found = {seed: newest(self.plan.with_seed(seed), self.label) for seed in self.seeds}
        return MappingProxyType({s: state.run_id for s, state in found.items() if state.run_id})

    def missing(self) -> tuple[int, ...]:
        """The seeds whose training is not complete."""
        return tuple(
            seed
            for seed in self.seeds
            if not newest(self.plan.with_seed(seed), self.label).complete
        )

    def train(self) -> Mapping[int, NNRun]:
        """Train what is missing, one after the other; the runs of all seeds.

        The plan's data and callbacks should be factories: what is borrowed carries its
        state from one replicate to the next.
        """
        runs: dict[int, Any] = {}
        for seed in self.seeds:
            runs[seed] = train_or_continue(self.plan.with_seed(seed), self.label).run
        return MappingProxyType(runs)
