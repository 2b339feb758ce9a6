"""Parameter-efficient fine-tuning: small trainable parts on a frozen model.

Every adapter is exact when it is inserted (the adapted model computes what the
base computed), takes dtype, device and mode from the layer it adapts, and
leaves the base's tensors alone while it trains.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
