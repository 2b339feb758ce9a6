"""Probabilities that can be trusted: fitted calibrators, bound to a model and its labels.

A calibrator is fitted on the logits of held-out rows, stored as data, and
refuses another model or label order. Importing this loads neither torch nor
whatever uses calibrated probabilities.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
