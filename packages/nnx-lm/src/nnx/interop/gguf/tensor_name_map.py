"""llama.cpp's names for the weights of a transformer, and the way back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from nnx.interop.plain import plain_transformer
from nnx.lm.transformer import TransformerNN

_BLOCK = {
    "attn.w_o.weight": "attn_output.weight",
    "ffn.w1.weight": "ffn_gate.weight",
    "ffn.w2.weight": "ffn_down.weight",
    "ffn.w3.weight": "ffn_up.weight",
    "norm1.weight": "attn_norm.weight",
    "norm2.weight": "ffn_norm.weight",
}
_QKV = ("attn_q.weight", "attn_k.weight", "attn_v.weight")


def map_tensors(net: TransformerNN) -> dict[str, np.ndarray]:
    """The weights of ``net`` by llama.cpp's names, float32 (out, in).

    Queries, keys and values are three tensors, and ``output.weight`` is left out where the
    embedding is tied. Rotary pairs are neighbouring channels here as in llama.cpp's "llama",
    so that nothing is permuted. float32 weights are views, not copies.
    """
    plain = plain_transformer(net, "map_tensors")
    state = {name: as_float32(value) for name, value in plain.state_dict().items()}
    tensors = {"token_embd.weight": state["tok_embed.weight"]}
    for i, block in enumerate(plain.blocks):
        attention: Any = block.attn
        sizes = np.array([attention.n_heads, attention.n_kv_heads]) * attention.head_dim
        ends = [int(sizes[0]), int(sizes.sum())]
        parts = np.split(state[f"blocks.{i}.attn.w_qkv.weight"], ends)
        tensors |= {f"blk.{i}.{name}": part for name, part in zip(_QKV, parts)}
        for own, name in _BLOCK.items():
            tensors[f"blk.{i}.{name}"] = state[f"blocks.{i}.{own}"]
    tensors["output_norm.weight"] = state["norm_out.weight"]
    if not plain.params.tie_embeddings:
        tensors["output.weight"] = state["lm_head.weight"]
    return tensors


def net_state(tensors: Mapping[str, np.ndarray], n_layers: int) -> dict[str, torch.Tensor]:
    """The state dict whose weights :func:`map_tensors` gave."""
    state = {
        "tok_embed.weight": tensors["token_embd.weight"],
        "norm_out.weight": tensors["output_norm.weight"],
        "lm_head.weight": tensors.get("output.weight", tensors["token_embd.weight"]),
    }
    for i in range(n_layers):
        state[f"blocks.{i}.attn.w_qkv.weight"] = np.concatenate(
            [tensors[f"blk.{i}.{name}"] for name in _QKV]
        )
        for own, name in _BLOCK.items():
            state[f"blocks.{i}.{own}"] = tensors[f"blk.{i}.{name}"]
    return {name: torch.from_numpy(np.array(value, copy=None)) for name, value in state.items()}


def as_float32(value: torch.Tensor) -> np.ndarray:
    """A weight as float32 on the CPU."""
    array: np.ndarray = value.detach().to("cpu", torch.float32).contiguous().numpy()
    return array
