"""Text embeddings: contrastive training on pairs, and what a search index needs of them.

A *backbone* is a sentence-transformers model, or any ``nn.Module`` that maps a
list of B strings to a tensor (B, D).
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
