"""The precision a model asks for. What a device makes of it is in ``nnx.precision``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from nnx.errors import NNxError
from nnx.params.base import check_keys
from nnx.plugins.registry import load_reference
from nnx.utils import validation as check

if TYPE_CHECKING:
    import torch

    from nnx.precision import ResolvedPrecision

PrecisionMode = Literal["fp32", "fp16", "bf16"]
PrecisionFallback = Literal["error", "fp32"]

PRECISION_MODES: tuple[str, ...] = get_args(PrecisionMode)
PRECISION_FALLBACKS: tuple[str, ...] = get_args(PrecisionFallback)


class PrecisionUnsupportedError(ValueError, NNxError):
    """A precision that the device cannot run, asked for without a fallback."""


@dataclass(frozen=True, slots=True)
class PrecisionPolicy:
    """The arithmetic of forward passes: ``"fp32"``, ``"fp16"`` or ``"bf16"``.

    ``fallback`` says what happens on a device without the asked mode: ``"error"``
    refuses the run, ``"fp32"`` trains in full precision and records why.
    """

    mode: PrecisionMode = "fp32"
    fallback: PrecisionFallback = "error"

    def __post_init__(self) -> None:
        check.choice("PrecisionPolicy", "mode", self.mode, PRECISION_MODES)
        check.choice("PrecisionPolicy", "fallback", self.fallback, PRECISION_FALLBACKS)

    def resolve(self, device: str | torch.device) -> ResolvedPrecision:
        """What this policy becomes on ``device``.

        Raises :class:`PrecisionUnsupportedError` when the device cannot run the
        mode and ``fallback`` is ``"error"``.
        """
        return cast(
            "ResolvedPrecision", load_reference("nnx.precision:resolve_policy")(self, device)
        )

    def state(self) -> dict[str, str]:
        """The policy as data; a ``fallback`` of ``"error"`` is left out."""
        state: dict[str, str] = {"mode": self.mode}
        if self.fallback != "error":
            state["fallback"] = self.fallback
        return state

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> PrecisionPolicy:
        """Rebuild from :meth:`state`; an unknown key is refused."""
        check_keys("PrecisionPolicy", state, ("mode", "fallback"))
        return cls(**state)
