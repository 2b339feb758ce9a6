"""The parts of a decoder-only transformer.

Shapes in names: B rows, T new tokens, S tokens attended to, D ``d_model``,
H query heads, K key and value heads, C channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from nnx.utils import validation as check
from torch import nn

if TYPE_CHECKING:
    from nnx.lm.cache import LayerCache
    from nnx.params import NNTransformerParams

LayerKV = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer, each (B, K, S, C)."""


Rotary = LayerKV | torch.Tensor
"""Cosines and sines, or both as complex numbers, (..., T, 1, C/2)."""

_WIDE = (torch.float32, torch.float64)


class RMSNorm(nn.Module):
    """``x / rms(x) * weight`` over the last axis (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.dim = check.count("RMSNorm", "dim", dim)
        self.eps = float(check.real("RMSNorm", "eps", eps, at_least=0))
        self.weight = nn.Parameter(torch.ones(self.dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (self.dim,), self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}"


class RoPE(nn.Module):
    """Rotary positions (Su et al. 2021, arXiv:2104.09864): channels 2i and 2i+1 are a pair.

    The tables are no part of the state dict and stay in float32 (float64 in a
    float64 model) whatever the model is cast to: half-precision angles would
    mix up distant positions.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, dim: int, max_seq_len: int, base: float = 10000.0) -> None:
        super().__init__()
        self.dim = check.count("RoPE", "dim", dim, at_least=2)
        if self.dim % 2:
            check.refuse("RoPE", "dim", dim, "even, since channel pairs are rotated")
        self.max_seq_len = check.count("RoPE", "max_seq_len", max_seq_len)
        self.base = float(check.real("RoPE", "base", base, above=0))
        self._build(None, torch.float32)

    def _build(self, device: torch.device | None, dtype: torch.dtype) -> None:
        pairs = torch.arange(0, self.dim, 2, dtype=torch.float64, device=device)
        positions = torch.arange(self.max_seq_len, dtype=torch.float64, device=device)
        angles = torch.outer(positions, self.base ** (-pairs / self.dim))
        self.register_buffer("cos", angles.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angles.sin().to(dtype), persistent=False)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> RoPE:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        double = self.cos.dtype == torch.float64
        self._build(self.cos.device, torch.float64 if double else torch.float32)
        return self

    def turns(self, positions: torch.Tensor | slice) -> torch.Tensor:
        """:meth:`at` as complex numbers, which :func:`rotate` multiplies in a sixth of the time."""
        return torch.complex(*self.at(positions))

    def best(self, positions: torch.Tensor | slice) -> Rotary:
        """:meth:`turns`, or :meth:`at` where complex numbers are not supported or compiled."""
        recorded = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
        known = self.cos.device.type in ("cpu", "cuda")
        return self.turns(positions) if known and not recorded else self.at(positions)

    def at(self, positions: torch.Tensor | slice) -> LayerKV:
        """Cosines and sines, (..., 1, C/2), of integer ``positions``."""
        return self.cos[positions].unsqueeze(-2), self.sin[positions].unsqueeze(-2)

    def extra_repr(self) -> str:
        return f"{self.dim}, max_seq_len={self.max_seq_len}, base={self.base}"


def rotate(x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """``x`` (..., T, heads, C) with every channel pair turned by its position's angle."""
    if isinstance(rotary, torch.Tensor):
        wide = x if x.dtype in _WIDE else x.float()
        turned = torch.view_as_complex(wide.unflatten(-1, (-1, 2))) * rotary
        return torch.view_as_real(turned).flatten(-2).to(x.dtype)
    cos, sin = rotary
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention; several query heads may share a key and value head.

    ``kv_prefix``, ``None`` by default, is a callable that gives learned keys and
    values, each (n_prefix, K, C). Every query attends to them; they have no
    rotary position and never enter a cache.
    """

    def __init__(self, params: NNTransformerParams) -> None:
        super().__init__()
        assert params.n_heads is not None
        self.n_heads = params.n_heads
        self.n_kv_heads = params.kv_heads
        self.head_dim = params.d_model // params.n_heads
        self.dropout = params.attn_dropout
        width = (self.n_heads + 2 * self.n_kv_heads) * self.head_dim
        self.w_qkv = nn.Linear(params.d_model, width, bias=False)
        self.w_o = nn.Linear(params.d_model, params.d_model, bias=False)
        self.kv_prefix: Callable[[], LayerKV] | None = None

    def forward(
        self,
        x: torch.Tensor,
        rotary: Rotary,
        mask: torch.Tensor | None = None,
        past: LayerKV | LayerCache | None = None,
    ) -> tuple[torch.Tensor, LayerKV]:
        """``x`` (B, T, D) to (B, T, D), and the keys and values to remember.

        ``mask``, broadcast to (B, 1, T, S), says what a query sees (booleans, or what
        is added to the scores); ``None`` is plain causal order over ``past`` and the new
        tokens.
        """
        batch, length = x.shape[:2]
        heads = self.w_qkv(x).view(batch, length, -1, self.head_dim)
        turned, v = heads.split((self.n_heads + self.n_kv_heads, self.n_kv_heads), dim=2)
        q, k = rotate(turned, rotary).split((self.n_heads, self.n_kv_heads), dim=2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if isinstance(past, tuple):
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
        elif past is not None:
            k, v = past.append(k, v)
        mixed = self._attend(q, k, v, mask)
        return self.w_o(mixed.transpose(1, 2).flatten(2)), (k, v)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        length, seen = q.shape[2], k.shape[2]
        causal = mask is None and length > 1 and length == seen and self.kv_prefix is None
        if mask is None and length > 1 and not causal:
            mask = causal_mask(length, seen, q.device)
        if self.kv_prefix is not None:
            k, v, mask = self._prefixed(k, v, mask)
        if self.n_kv_heads != self.n_heads:
            share = self.n_heads // self.n_kv_heads
            k, v = (t.repeat_interleave(share, dim=1) for t in (k, v))
        return F.scaled_dot_product_attention(
            q, k, v, mask, self.dropout if self.training else 0.0, is_causal=causal
        )

    def _prefixed(
        self, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        assert self.kv_prefix is not None
        keys, values = (
            t.transpose(0, 1).to(k.dtype).expand(k.shape[0], -1, -1, -1) for t in self.kv_prefix()
        )
        if mask is not None:
            mask = F.pad(mask, (keys.shape[2], 0), value=mask.dtype == torch.bool)
        return torch.cat((keys, k), dim=2), torch.cat((values, v), dim=2), mask


def causal_mask(length: int, seen: int, device: torch.device) -> torch.Tensor:
    """(T, S): the last ``length`` of ``seen`` tokens each see themselves and what is before."""
    ones = torch.ones(length, seen, dtype=torch.bool, device=device)
    return ones.tril(seen - length)


class SwiGLU(nn.Module):
    """``w2(silu(w1(x)) * w3(x))`` (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, d_model: int, width: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(d_model, width, bias=False)
        self.w2 = nn.Linear(width, d_model, bias=False)
        self.w3 = nn.Linear(d_model, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    """Attention, then the feed-forward layer, each normalized first and added to its input."""

    def __init__(self, params: NNTransformerParams) -> None:
        super().__init__()
        self.norm1 = RMSNorm(params.d_model, params.norm_eps)
        self.attn = Attention(params)
        self.norm2 = RMSNorm(params.d_model, params.norm_eps)
        self.ffn = SwiGLU(params.d_model, params.ffn_width)
        self.dropout = params.resid_dropout

    def forward(
        self,
        x: torch.Tensor,
        rotary: Rotary,
        mask: torch.Tensor | None = None,
        past: LayerKV | LayerCache | None = None,
    ) -> tuple[torch.Tensor, LayerKV]:
        mixed, kv = self.attn(self.norm1(x), rotary, mask, past)
        x = x + self._drop(mixed)
        return x + self._drop(self.ffn(self.norm2(x))), kv

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x
