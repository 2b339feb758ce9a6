"""One token after a cache, as bare tensor operations.

For a single token the calls cost more than the arithmetic: a plain transformer on
the CPU decodes about twice as fast without its modules between the products.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from nnx.lm.cache import KVCache
from nnx.lm.layers import Attention, RMSNorm, RoPE, SwiGLU, TransformerBlock
from nnx.lm.transformer import TransformerNN
from torch import nn

_PLAIN = (
    TransformerNN, nn.ModuleList, TransformerBlock, Attention, SwiGLU, RMSNorm, RoPE, nn.Linear,
    nn.Embedding,
)  # fmt: skip
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class _Block(NamedTuple):
    """The weights of one block; products take them transposed."""

    norm1: RMSNorm
    qkv: torch.Tensor
    out: torch.Tensor
    norm2: RMSNorm
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


class TokenStep:
    """``step(tokens, cache)``: what ``net.forward_with_cache`` gives for one token per row."""

    def __init__(self, net: TransformerNN) -> None:
        self.net = net
        attention: Any = net.blocks[0].attn
        self.heads, self.kv_heads = attention.n_heads, attention.n_kv_heads
        self.width = attention.head_dim
        self.blocks = [_weights(block) for block in net.blocks]

    @staticmethod
    def of(net: Any) -> TokenStep | None:
        """The step of a plain transformer; ``None`` where a module has a say of its own.

        That is an adapter, a hook, a learned prefix, a reduced precision or a device
        other than the CPU.
        """
        if type(net) is not TransformerNN or torch.is_autocast_enabled("cpu"):
            return None
        for module in net.modules():
            if type(module) not in _PLAIN or any(getattr(module, name) for name in _HOOKS):
                return None
            if isinstance(module, Attention) and module.kv_prefix is not None:
                return None
        weights = list(net.parameters())
        plain = all(w.is_cpu and w.dtype in (torch.float32, torch.float64) for w in weights)
        return TokenStep(net) if plain and len({w.dtype for w in weights}) == 1 else None

    def __call__(self, tokens: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Logits (B, vocab) of the tokens (B, 1) that follow; the cache holds them too."""
        net, rows = self.net, len(tokens)
        net._check_length(1, cache.longest)
        positions, mask = cache.advance(1)
        turns = net.rope.turns(positions).view(-1, 1, self.width // 2)
        turning, half = self.heads + self.kv_heads, self.width // 2
        x = F.embedding(tokens.view(rows), net.tok_embed.weight)
        for block, layer in zip(self.blocks, cache.layers):
            heads = torch.mm(_normed(x, block.norm1), block.qkv).view(rows, -1, self.width)
            pairs = torch.view_as_complex(heads.narrow(1, 0, turning).view(rows, turning, half, 2))
            qk = torch.view_as_real(pairs * turns).view(rows, turning, 1, self.width)
            k, v = layer.append(
                qk.narrow(1, self.heads, self.kv_heads),
                heads.narrow(1, turning, self.kv_heads).unsqueeze(2),
            )
            if self.heads != self.kv_heads:
                share = self.heads // self.kv_heads
                k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
            mixed = F.scaled_dot_product_attention(qk.narrow(1, 0, self.heads), k, v, mask)
            x = torch.addmm(x, mixed.reshape(rows, -1), block.out)
            h = _normed(x, block.norm2)
            gated = F.silu(torch.mm(h, block.gate)).mul_(torch.mm(h, block.up))
            x = torch.addmm(x, gated, block.down)
        return torch.mm(_normed(x, net.norm_out), net.lm_head.weight.t())


def _weights(block: Any) -> _Block:
    attn, ffn = block.attn, block.ffn
    products = (w.weight.t() for w in (attn.w_qkv, attn.w_o, ffn.w1, ffn.w3, ffn.w2))
    qkv, out, gate, up, down = products
    return _Block(block.norm1, qkv, out, block.norm2, gate, up, down)


def _normed(x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    """``norm(x)`` in a third of the calls."""
    if len(x) > 1:
        size = torch.linalg.vector_norm(x, dim=1, keepdim=True)
        return x * size.square_().div_(norm.dim).add_(norm.eps).rsqrt_() * norm.weight
    row = x.view(-1)
    square = float(torch.dot(row, row))
    return x * (square / norm.dim + norm.eps) ** -0.5 * norm.weight
