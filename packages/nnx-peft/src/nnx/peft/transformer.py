"""What prefix and prompt tuning ask of a transformer.

nnx-lm's ``TransformerNN`` offers it; another decoder does by having

- ``params`` with ``n_heads``, ``d_model`` and ``max_seq_len``, and ``kv_heads`` where
  several query heads share a key and value head,
- ``tok_embed``, the token embedding,
- ``blocks``, each with ``attn``, whose fused projection is the Linear ``attn.w_qkv``,
- ``attn.kv_prefix``, ``None`` by default: when set, ``attn`` calls it at every
  forward pass for ``(keys, values)``, each (n_prefix, kv_heads, head_dim), and
  lets every query attend to them before all other keys. They get no rotary
  position and never enter the cache,
- ``forward_embeddings(x, past_kvs=None) -> (logits, kvs)``: the forward pass from
  embedded tokens (batch, seq, d_model) on, and
- ``forward_with_cache(tokens, past_kvs=None) -> (logits, kvs)``.
"""

from __future__ import annotations

from typing import Any

import torch
from nnx.peft.base import AdaptedLayer, floating_weight
from torch import nn

_REQUIRED = ("params", "tok_embed", "blocks", "forward_embeddings", "forward_with_cache")


def require_transformer(model: nn.Module, tuner: str) -> Any:
    """``model``, or a ``TypeError`` that says what it lacks."""
    lacks = [name for name in _REQUIRED if not hasattr(model, name)]
    if not lacks:
        for block in model.blocks:  # type: ignore[union-attr]
            attention = getattr(block, "attn", None)
            lacks += [
                f"blocks.*.attn.{name}"
                for name in ("w_qkv", "kv_prefix")
                if not hasattr(attention, name)
            ]
    if lacks:
        raise TypeError(
            f"{tuner} tunes a TransformerNN, not a {type(model).__name__} "
            f"(it has no {', '.join(dict.fromkeys(lacks))})"
        )
    return model


def placement_of(layer: nn.Module) -> torch.Tensor:
    """The weight that new parameters are allocated beside, through any adapter wrapper."""
    while isinstance(layer, AdaptedLayer):
        layer = layer.base
    return floating_weight(layer)
