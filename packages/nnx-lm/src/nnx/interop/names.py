"""transformers' names for the weights of a transformer, and the order of rotary channels."""

from __future__ import annotations

from typing import Any

import torch
from nnx.lm.transformer import TransformerNN

LAYER = {
    "attn.w_o.weight": "self_attn.o_proj.weight",
    "ffn.w1.weight": "mlp.gate_proj.weight",
    "ffn.w2.weight": "mlp.down_proj.weight",
    "ffn.w3.weight": "mlp.up_proj.weight",
    "norm1.weight": "input_layernorm.weight",
    "norm2.weight": "post_attention_layernorm.weight",
}
QKV = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")
HEAD = {"tok_embed": "model.embed_tokens", "lm_head": "lm_head", "norm_out": "model.norm"}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def hf_state(net: TransformerNN) -> dict[str, torch.Tensor]:
    """The weights by transformers' names.

    transformers rotates channel ``i`` with ``i + C/2`` where this transformer rotates ``2i``
    with ``2i + 1``: the rows of queries and keys are put in that order.
    """
    state = {name: value.detach() for name, value in net.state_dict().items()}
    found = {"model.embed_tokens.weight": state["tok_embed.weight"]}
    for i, block in enumerate(net.blocks):
        attention: Any = block.attn
        heads, shared, width = attention.n_heads, attention.n_kv_heads, attention.head_dim
        fused = state[f"blocks.{i}.attn.w_qkv.weight"]
        q, k, v = fused.split((heads * width, shared * width, shared * width))
        parts = (halves(q, width), halves(k, width), v)
        found |= {f"model.layers.{i}.{name}": part for name, part in zip(QKV, parts)}
        for own, name in LAYER.items():
            found[f"model.layers.{i}.{name}"] = state[f"blocks.{i}.{own}"]
    found["model.norm.weight"] = state["norm_out.weight"]
    if not net.params.tie_embeddings:
        found["lm_head.weight"] = state["lm_head.weight"]
    return found


def halves(rows: torch.Tensor, width: int) -> torch.Tensor:
    """Rows of neighbouring channel pairs as two halves of each head."""
    return rows.unflatten(0, (-1, width // 2, 2)).transpose(1, 2).reshape(rows.shape)


def pairs(rows: torch.Tensor, width: int) -> torch.Tensor:
    """The way back from :func:`halves`."""
    return rows.unflatten(0, (-1, 2, width // 2)).transpose(1, 2).reshape(rows.shape)
