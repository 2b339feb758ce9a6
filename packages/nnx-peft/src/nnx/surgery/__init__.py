"""Changing a trained model's shape: wider, deeper, thinner, or with a larger vocabulary.

Every function returns a fresh module and leaves its argument as it was.
"""

from __future__ import annotations

# Not lazy: some functions share the name of their file, and importing the file
# later would put the module where the function is expected.
from nnx.surgery.deepen import deepen as deepen
from nnx.surgery.drop_layer import drop_layer as drop_layer
from nnx.surgery.embedding import expand_embedding as expand_embedding
from nnx.surgery.low_rank import low_rank_factorize as low_rank_factorize
from nnx.surgery.widen import widen as widen

__all__ = ["deepen", "drop_layer", "expand_embedding", "low_rank_factorize", "widen"]
