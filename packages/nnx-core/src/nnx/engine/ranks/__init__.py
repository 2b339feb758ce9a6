"""The processes of a fit: one, several that hold the model, or several that share it out."""

from nnx.engine.ranks.join import join

__all__ = ["join"]
