"""Ways to train: distillation, contrast, mixing, experts, latent prediction, averaged weights.

Every one is an objective for the shared update engine; the step factories of the first
releases compute the same losses in full precision.
"""

from __future__ import annotations

from typing import Any

import lazy_loader

_own, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name == "dpo_train_step_factory":  # nnx-lm provides it; here is where scripts look for it
        import nnx

        return getattr(nnx, name)
    return _own(name)
