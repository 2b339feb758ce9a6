"""Graph nets, datasets and samplers on PyTorch Geometric.

Node classification trains the nets of ``Nets`` on a :class:`NNGraphDataset`, whole
graphs are the matter of :mod:`nnx.graph_tasks`, links that of :mod:`nnx.link_tasks`.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
