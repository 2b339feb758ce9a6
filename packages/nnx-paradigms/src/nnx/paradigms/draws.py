"""An objective's own random numbers, which a resume continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from nnx.components import ComponentSpec
from nnx.distributed.process import rank_and_world
from nnx.objectives import Objective
from nnx.utils import validation as check
from nnx.utils.draws import mixed

if TYPE_CHECKING:
    from nnx.models import Model


class DrawingObjective(Objective):
    """An objective whose draws come from a CPU generator of its own: component state.

    ``seed`` starts it; ``None`` takes one draw of the global stream at first use, and is
    refused in a run of several processes, whose streams differ. There, every process
    advances the generator equally and draws from a fork of it by its rank.
    """

    component_name: str

    def __init__(self, *, seed: int | None = None, nonfinite: str = "fail") -> None:
        super().__init__(nonfinite=nonfinite)
        if seed is not None:
            seed = check.count(type(self).__name__, "seed", seed, at_least=0, at_most=2**63 - 1)
        self.seed = seed
        self._generator: torch.Generator | None = None

    @property
    def generator(self) -> torch.Generator:
        """The generator, made when it is first needed."""
        if self._generator is None:
            seed = self.seed
            if seed is None:
                seed = int(torch.randint(0, 2**63 - 1, ()))
            self._generator = torch.Generator().manual_seed(seed)
        return self._generator

    def fork(self) -> torch.Generator:
        """The generator for the draws of one microbatch."""
        rank, world = rank_and_world()
        if world == 1:
            return self.generator
        seed = int(torch.randint(0, 2**63 - 1, (), generator=self.generator))
        return torch.Generator().manual_seed(mixed(seed, rank) >> 1)

    def spec(self) -> dict[str, Any]:
        """What a resume must agree with: plain values."""
        return {}

    def check_run(
        self,
        model: Model,
        *,
        optimizers: Mapping[str, torch.optim.Optimizer],
        callbacks: Sequence[Any],
    ) -> None:
        """Refuse several processes without a seed in common."""
        if self.seed is None and self._generator is None and rank_and_world()[1] > 1:
            raise ValueError(
                f"{type(self).__name__}: a run of several processes needs seed=, since all of "
                "them must start from one"
            )

    def component_spec(self) -> ComponentSpec:
        return ComponentSpec(self.component_name, version=1)

    def component_state(self) -> dict[str, Any]:
        return {"spec": self.spec(), "generator": self.generator.get_state()}

    def check_component_state(self, state: Mapping[str, Any], *, version: int) -> list[str]:
        """Every setting that differs from the saved one."""
        saved = state.get("spec")
        if not isinstance(saved, Mapping):
            return ["the saved state has no spec"]
        return [
            f"{name} is {value!r}, but the checkpoint was trained with {saved.get(name)!r}"
            for name, value in self.spec().items()
            if saved.get(name) != value
        ]

    def load_component_state(self, state: Mapping[str, Any], *, version: int) -> None:
        self.generator.set_state(state["generator"])
