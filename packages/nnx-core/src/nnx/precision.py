"""Reduced-precision training: what was asked, what the device can do, what took effect.

A :class:`PrecisionPolicy` is configuration. :class:`ResolvedPrecision` is the
policy on a device: the autocast region of every forward, the FP16 loss scaler,
and the record that metadata and checkpoints carry. FP16 runs under CUDA
autocast with a gradient scaler; BF16 runs under CPU or CUDA autocast without
one, since its exponent is FP32's. Weights and optimizer state stay FP32
(Micikevicius et al., "Mixed Precision Training", 2018).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from nnx.params.precision import (
    PRECISION_MODES,
    PrecisionFallback,
    PrecisionMode,
    PrecisionPolicy,
    PrecisionUnsupportedError,
)
from nnx.utils.jsonlike import FrozenDict

if TYPE_CHECKING:  # the record of a run is read without torch
    import torch

__all__ = [
    "PRECISION_MODES",
    "REFERENCE_TOLERANCES",
    "PrecisionFallback",
    "PrecisionMode",
    "PrecisionPolicy",
    "PrecisionUnsupportedError",
    "ReferenceTolerance",
    "ResolvedPrecision",
    "full_precision",
    "inference_precision",
    "precision_support",
    "resolve_policy",
    "resolve_precision",
]

TRAINING = "training"
VALIDATION = "validation"
INFERENCE = "inference"
EVERYWHERE = (TRAINING, VALIDATION, INFERENCE)

_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}  # attributes of torch
_SUPPORTED = "supported"


def full_precision(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as float32 if it is float16 or bfloat16 (differentiable), else unchanged."""
    half = tensor.is_floating_point() and tensor.element_size() == 2
    return tensor.float() if half else tensor


@dataclass(frozen=True, slots=True)
class ReferenceTolerance:
    """How far a short reduced run may differ from the same run in FP32 (absolute)."""

    loss: float
    weights: float


REFERENCE_TOLERANCES = {
    "fp16": ReferenceTolerance(loss=0.005, weights=0.0005),
    "bf16": ReferenceTolerance(loss=0.05, weights=0.005),
}


@dataclass(frozen=True, slots=True)
class ResolvedPrecision:
    """A precision on a device.

    ``requested`` and ``effective`` are modes of ``PRECISION_MODES``; they differ
    only when ``fallback_reason`` says why. ``source`` is what asked:
    ``"policy"``, ``"mixed_precision"`` (the legacy flag) or ``"default"``.
    ``tf32`` holds torch's TF32 switches at resolution (``None``: not a CUDA
    device). ``covers`` says where the mode applies, of "training", "validation"
    and "inference"; ``None`` is everywhere.
    """

    requested: str
    effective: str
    device_type: str
    source: str = "default"
    fallback_reason: str | None = None
    tf32: Mapping[str, bool | None] = field(default_factory=dict)
    covers: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("requested", "effective"):
            if getattr(self, name) not in PRECISION_MODES:
                raise ValueError(
                    f"ResolvedPrecision.{name} must be one of {', '.join(PRECISION_MODES)}, "
                    f"not {getattr(self, name)!r}"
                )
        object.__setattr__(self, "tf32", FrozenDict(self.tf32))
        if self.covers is not None:
            object.__setattr__(self, "covers", tuple(self.covers))

    @property
    def reduced(self) -> bool:
        """Whether forwards run in FP16 or BF16."""
        return self.effective != "fp32"

    @property
    def uses_scaler(self) -> bool:
        """Whether gradients need a loss scaler (FP16 only)."""
        return self.effective == "fp16"

    @property
    def applies_to(self) -> tuple[str, ...]:
        """Where the mode applies: ``covers``, or everywhere."""
        return EVERYWHERE if self.covers is None else self.covers

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype of autocast operations; ``None`` in full precision."""
        if not self.reduced:
            return None
        import torch

        dtype = getattr(torch, _DTYPES[self.effective])
        assert isinstance(dtype, torch.dtype)
        return dtype

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The forward's context: autocast to the mode's dtype, or nothing in FP32."""
        if not self.reduced:
            return contextlib.nullcontext()
        import torch

        return torch.autocast(self.device_type, dtype=self.autocast_dtype)

    def build_scaler(self) -> torch.amp.GradScaler | None:
        """A new gradient scaler for FP16, else ``None``."""
        if not self.uses_scaler:
            return None
        import torch

        return torch.amp.GradScaler(self.device_type)

    def output(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` as float32 if it is float16 or bfloat16 (differentiable), else unchanged."""
        return full_precision(tensor)

    def scoped(self, covers: tuple[str, ...]) -> ResolvedPrecision:
        """The same precision, recorded as applying to ``covers`` only."""
        return replace(self, covers=tuple(covers))

    def record(self) -> dict[str, Any]:
        """Plain values for ``metadata.yaml`` and a checkpoint's training state."""
        record: dict[str, Any] = {
            "requested": self.requested,
            "effective": self.effective,
            "device_type": self.device_type,
            "source": self.source,
            "fallback_reason": self.fallback_reason,
            "tf32": dict(self.tf32),
        }
        if self.covers is not None:
            record["covers"] = list(self.covers)
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> ResolvedPrecision:
        """Rebuild from :meth:`record`."""
        covers = record.get("covers")
        return cls(
            requested=record["requested"],
            effective=record["effective"],
            device_type=record.get("device_type") or record["device"],
            source=record.get("source", "default"),
            fallback_reason=record.get("fallback_reason"),
            tf32=record.get("tf32") or {},
            covers=None if covers is None else tuple(covers),
        )


def precision_support(device: str | torch.device | None = None) -> dict[str, dict[str, str]]:
    """What each mode is on this machine: ``{device type: {mode: "supported" or a reason}}``.

    ``device`` restricts the answer to one device. A reason says what is missing.
    """
    import torch

    types = ["cpu", "cuda", "mps"] if device is None else [device]
    return {
        where.type: {mode: _obstacle(mode, where) or _SUPPORTED for mode in PRECISION_MODES}
        for where in map(torch.device, types)
    }


def resolve_precision(params: Any, device: Any) -> ResolvedPrecision:
    """The precision in which a model of ``params`` (NNModelParams) trains on ``device``.

    An explicit ``params.precision`` wins. Otherwise the legacy
    ``params.mixed_precision`` flag means FP16 on CUDA and full precision
    elsewhere. ``device`` is a device, its name or a ``Devices`` member.
    """
    where = _device(device)
    kind = where.type
    if params.precision is not None:
        return resolve_policy(params.precision, where)
    if not params.mixed_precision:
        return _full_precision(kind)
    reason = None
    if kind != "cuda":
        reason = f"mixed_precision=True applies on CUDA only; on {kind} the run is fp32"
    else:
        reason = _obstacle("fp16", where)
    effective = "fp32" if reason else "fp16"
    return ResolvedPrecision(
        "fp16", effective, kind, "mixed_precision", reason, _tf32(kind), covers=(TRAINING,)
    )


def inference_precision(params: Any, device: Any) -> ResolvedPrecision:
    """The precision of ``predict`` and ``evaluate`` outside a fit.

    The explicit policy, else full precision: the legacy flag never governs inference.
    """
    where = _device(device)
    if params.precision is not None:
        return resolve_policy(params.precision, where)
    return _full_precision(where.type)


def _full_precision(kind: str) -> ResolvedPrecision:
    return ResolvedPrecision("fp32", "fp32", kind, tf32=_tf32(kind), covers=EVERYWHERE)


def resolve_policy(policy: PrecisionPolicy, device: Any) -> ResolvedPrecision:
    """``policy`` on ``device``; see :meth:`PrecisionPolicy.resolve`."""
    where = _device(device)
    kind = where.type
    # Full precision needs no support: a device that is absent says so itself when it is used.
    obstacle = None if policy.mode == "fp32" else _obstacle(policy.mode, where)
    if obstacle and policy.fallback == "error":
        raise PrecisionUnsupportedError(
            f"precision {policy.mode!r} is not supported on {where}: {obstacle}. Choose another "
            f'mode, another device, or PrecisionPolicy("{policy.mode}", fallback="fp32").'
        )
    effective = "fp32" if obstacle else policy.mode
    return ResolvedPrecision(
        policy.mode, effective, kind, "policy", obstacle, _tf32(kind), covers=EVERYWHERE
    )


def _obstacle(mode: str, device: torch.device) -> str | None:
    """Why ``mode`` cannot run on ``device``; ``None`` when it can."""
    import torch

    kind, index = device.type, device.index
    if kind == "cuda" and not torch.cuda.is_available():
        return "CUDA is not available"
    count = torch.cuda.device_count() if kind == "cuda" else 0
    if index is not None and 0 < count <= index:
        return f"this machine has {count} CUDA device{'s' * (count != 1)}, and no {device}"
    if kind == "mps" and not torch.backends.mps.is_available():
        return "MPS is not available"
    if mode == "fp32":
        return None
    if mode == "bf16":
        if kind == "cuda":
            with torch.cuda.device(device):  # asks the current one
                supported = torch.cuda.is_bf16_supported(including_emulation=False)
            return None if supported else "this GPU has no bfloat16 arithmetic"
        return None if kind == "cpu" else f"bf16 autocast needs a CPU or CUDA device, not {kind}"
    return (
        None if kind == "cuda" else f"fp16 needs CUDA (autocast with a gradient scaler), not {kind}"
    )


def _device(device: Any) -> torch.device:
    """A device, from its name or a ``Devices`` member too."""
    import torch

    built = device() if callable(device) else device
    return torch.device(built)


def _tf32(kind: str) -> dict[str, bool | None]:
    if kind != "cuda":
        return {"matmul": None, "cudnn": None}
    import torch

    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return {
        "matmul": _allows_tf32(cuda.matmul, getattr(cuda.matmul, "fp32_precision", None)),
        "cudnn": _allows_tf32(cudnn, getattr(getattr(cudnn, "conv", None), "fp32_precision", None)),
    }


def _allows_tf32(switch: Any, precision: str | None) -> bool:
    """Whether TF32 is on, set through either of torch's two interfaces."""
    try:
        return bool(switch.allow_tf32)
    except RuntimeError:  # set through the newer one, and the older does not read that
        import torch

        if precision == "none":  # not set on its own
            precision = getattr(torch.backends, "fp32_precision", None)
        return precision == "tf32"
