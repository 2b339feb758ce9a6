"""Runs on disk: configuration, history, checkpoints, resume points, the best run.

Listing and reading a run loads no torch; only checkpoints need it.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
