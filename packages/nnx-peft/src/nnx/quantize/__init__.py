"""Smaller weights through torchao: INT8 after training, int4 weights learned in training."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
