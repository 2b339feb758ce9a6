"""What was asked of the compiler, and what took effect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from nnx.errors import NNxError
from nnx.params.compilation import COMPILE_FAILURE_POLICIES
from nnx.utils import validation as check

EFFECTS = ("pending", "compiled", "eager", "failed")


@dataclass(frozen=True, slots=True)
class CompileRecord:
    """A compilation request and its effect.

    ``effective`` is ``"pending"`` (no compiled forward has run), ``"compiled"``,
    ``"eager"`` (a failure made the fit go on uncompiled) or ``"failed"``.
    ``graph_breaks`` were counted when the first call compiled; ``None`` when a
    cached graph served it. ``restart`` says where a failure happened: ``stage``
    (forward or backward), ``phase``, ``epoch``, ``batch`` and ``error``.
    """

    backend: str
    options: Mapping[str, Any]
    on_failure: str
    torch_version: str
    effective: str = "pending"
    graph_breaks: int | None = None
    restart: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check.choice("CompileRecord", "on_failure", self.on_failure, COMPILE_FAILURE_POLICIES)
        check.choice("CompileRecord", "effective", self.effective, EFFECTS)
        object.__setattr__(self, "options", MappingProxyType(dict(self.options)))
        if self.restart is not None:
            object.__setattr__(self, "restart", MappingProxyType(dict(self.restart)))

    @property
    def requested(self) -> dict[str, Any]:
        """The request: backend, options, failure policy and torch's version."""
        return {
            "backend": self.backend,
            **self.options,
            "on_failure": self.on_failure,
            "torch_version": self.torch_version,
        }

    @property
    def capture(self) -> str | None:
        """``"full"`` or ``"partial"`` (with graph breaks); ``None`` when it is not known."""
        if self.graph_breaks is None:
            return None
        return "partial" if self.graph_breaks else "full"

    def record(self) -> dict[str, Any]:
        """Plain values for ``metadata.yaml`` and a checkpoint's training state."""
        return {
            "backend": self.backend,
            "options": dict(self.options),
            "on_failure": self.on_failure,
            "torch_version": self.torch_version,
            "effective": self.effective,
            "capture": self.capture,
            "graph_breaks": self.graph_breaks,
            "restart": None if self.restart is None else dict(self.restart),
        }

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> CompileRecord:
        """Rebuild from :meth:`record`."""
        return CompileRecord(
            backend=record["backend"],
            options=record["options"],
            on_failure=record["on_failure"],
            torch_version=record["torch_version"],
            effective=record.get("effective", "pending"),
            graph_breaks=record.get("graph_breaks"),
            restart=record.get("restart"),
        )


class CompileFailed(RuntimeError, NNxError):
    """A compiled forward that failed to compile under ``on_failure="error"``.

    ``record`` is the fit's :class:`CompileRecord` at the failure.
    """

    def __init__(self, message: str, record: CompileRecord) -> None:
        super().__init__(message)
        self.record = record
