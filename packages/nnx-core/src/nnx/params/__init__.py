"""Frozen configuration: what a run is, as values that print, compare and hash to its id.

Nothing here imports torch.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
