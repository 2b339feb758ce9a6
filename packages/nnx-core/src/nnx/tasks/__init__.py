"""What a model's outputs mean: checks, loss terms, decoding and scores.

A :class:`TaskSpec` on the model's parameters names the task; its
:class:`TaskAdapter` checks every batch, says how its loss is normalized,
decodes it and builds its record. Scores come from integer counts.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
