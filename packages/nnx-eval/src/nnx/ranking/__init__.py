"""Ranking the candidates of queries: objectives, and metrics that are means over queries.

:class:`RankingTask` declares what is ranked; its ``objective()`` trains and its
``eval_step()`` validates. The functions compute one figure or one loss.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
