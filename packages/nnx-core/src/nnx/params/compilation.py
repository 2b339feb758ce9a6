"""How a run asks for ``torch.compile``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nnx.params.base import check_keys, put
from nnx.utils import validation as check

COMPILE_FAILURE_POLICIES = ("error", "eager")
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_KEYS = ("backend", "mode", "fullgraph", "dynamic", "on_failure")


@dataclass(frozen=True, slots=True)
class CompileSpec:
    """The options of ``torch.compile``, and what a failure does."""

    backend: str = "inductor"
    mode: str | None = None
    fullgraph: bool = False
    dynamic: bool | None = None
    on_failure: str = "error"

    def __post_init__(self) -> None:
        owner = "CompileSpec"
        put(
            self,
            backend=check.text(owner, "backend", self.backend),
            fullgraph=check.flag(owner, "fullgraph", self.fullgraph),
            on_failure=check.choice(owner, "on_failure", self.on_failure, COMPILE_FAILURE_POLICIES),
        )
        if self.mode is not None:
            put(self, mode=check.choice(owner, "mode", self.mode, COMPILE_MODES))
        if self.dynamic is not None:
            put(self, dynamic=check.flag(owner, "dynamic", self.dynamic))

    def options(self) -> dict[str, Any]:
        """The keyword arguments of ``torch.compile``."""
        return {
            "backend": self.backend,
            "mode": self.mode,
            "fullgraph": self.fullgraph,
            "dynamic": self.dynamic,
        }

    def state(self) -> dict[str, Any]:
        """The spec as data; options at their default are left out."""
        state = {**self.options(), "on_failure": self.on_failure}
        return {key: value for key, value in state.items() if value != _DEFAULTS[key]}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> CompileSpec:
        check_keys("CompileSpec", state, _KEYS)
        return CompileSpec(**state)


_DEFAULTS = {**CompileSpec().options(), "on_failure": "error"}
