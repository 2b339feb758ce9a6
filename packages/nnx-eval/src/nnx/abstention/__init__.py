"""Declining the rows that a classifier is unsure of, and what that costs and buys.

Policies are pure functions over (N, C) probabilities; abstaining is a success,
and malformed input is an error, never a quiet abstention.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
