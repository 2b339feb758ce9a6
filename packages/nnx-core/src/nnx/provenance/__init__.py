"""What an experiment meant, and each of its executions, beside the run id.

A manifest states the intent (task, labels, model, data, splits, objective,
configuration) and has a fingerprint; an attempt is one call of ``train``.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
