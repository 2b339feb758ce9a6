"""Repeated runs as a population: summaries, paired differences, tests and corrections.

Nothing here trains, loads a checkpoint or writes into a run.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
