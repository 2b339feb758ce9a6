"""One experiment as a value: branched without copying, checked without running, fitted anew.

:class:`ExperimentPlan` holds configuration, data and what trains it. ``validate()``
lists what is wrong with it, ``probe()`` tries one batch, ``fit()`` trains.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
