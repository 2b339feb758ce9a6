"""What a bundle says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleInfo:
    """A summary of a bundle; nothing of it was built.

    ``capability`` is ``"resume"`` for a bundle with training state, else
    ``"inference"``. ``epoch`` counts from 0. ``components`` tells the version of each
    saved component, ``payloads`` digest and size of each file. ``verified`` says whether
    every byte was compared with its digest, as :func:`nnx.bundles.validate_bundle` does.
    """

    path: str
    version: int
    generation: str
    capability: str
    source_run_id: str
    source_checkpoint: str
    epoch: int
    model: str
    model_params: Mapping[str, Any]
    components: Mapping[str, Any] = field(default_factory=dict)
    calibrators: tuple[Mapping[str, Any], ...] = ()
    payloads: Mapping[str, Any] = field(default_factory=dict)
    verified: bool = False
    net_params: Mapping[str, Any] | None = None
    transforms: tuple[Mapping[str, Any], ...] = ()

    @property
    def size(self) -> int:
        """Bytes of all payloads."""
        return sum(int(entry["size"]) for entry in self.payloads.values())
