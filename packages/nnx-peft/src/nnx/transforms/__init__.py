"""Recorded topology changes: a recipe that every checkpoint of a model carries.

A recipe applies operations (LoRA on named layers, low-rank replacement) to an
:class:`~nnx.nn_model.NNModel` and records them on it, so that checkpoints,
runs and exports can rebuild the changed net from its base.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
