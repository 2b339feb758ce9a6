"""Link prediction and edge classification on one static graph, with edges held out.

:func:`split_links` divides the edges, :class:`LinkTask` makes the loaders, the objective
and the evaluator of a split, and :func:`link_predictor_spec` the model.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
