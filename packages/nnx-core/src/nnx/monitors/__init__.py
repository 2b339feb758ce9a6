"""Named metrics over the full sample, and the one number a run decides by.

A :class:`MetricSpec` names a registered metric; a :class:`MonitorSpec` says
which of them is watched; a :class:`MonitorTracker` makes each epoch's decision,
which BEST, plateau schedules and early stopping all read.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
