"""Pictures of models and of runs.

The functions here draw a *model*: its layers, weights, activations,
attributions and gradients. ``nnx.vis_utils`` draws what predictions look like,
:mod:`nnx.viz.report` writes the page of one or more runs, and
:mod:`nnx.viz.watch` follows a run in the terminal.

Everything borrows the model: modes, hooks, gradients and random streams are as
before when a function returns or raises.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
