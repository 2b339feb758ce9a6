"""Setting weights to zero: by magnitude, or in the 2:4 pattern that GPUs speed up."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
