"""The decoder-only transformer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from nnx.lm.cache import KVCache
from nnx.lm.layers import LayerKV, RMSNorm, RoPE, Rotary, TransformerBlock
from nnx.params import NNTransformerParams
from nnx.utils.files import atomic_write
from torch import nn

PastKVs = Sequence[LayerKV | None] | KVCache


class TransformerNN(nn.Module):
    """Next-token logits of token ids: RMSNorm first, rotary positions, SwiGLU, one QKV product.

    Built as ``Nets.TRANSFORMER``. With ``params.tie_embeddings`` the output layer
    ``lm_head`` and the embedding ``tok_embed`` are one tensor, also after loading.
    """

    class_axis = -1  # of the logits; core scores every position as a row

    def __init__(self, params: NNTransformerParams) -> None:
        super().__init__()
        self.params = params
        self.tok_embed = nn.Embedding(params.vocab_size, params.d_model)
        nn.init.normal_(self.tok_embed.weight, std=0.02)
        self.blocks = nn.ModuleList(TransformerBlock(params) for _ in range(params.n_layers))
        self.norm_out = RMSNorm(params.d_model, params.norm_eps)
        self.lm_head = nn.Linear(params.d_model, params.vocab_size, bias=False)
        if params.tie_embeddings:
            self.lm_head.weight = self.tok_embed.weight
        assert params.n_heads is not None
        self.rope = RoPE(params.d_model // params.n_heads, params.max_seq_len, params.rope_base)

    def forward(
        self, tokens: torch.Tensor, *, documents: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits (B, T, vocab) of token ids ``tokens`` (B, T), integers.

        ``documents`` (B, T), of packed rows: the number of the document that each
        token belongs to, in contiguous runs. Attention stays inside a document and
        positions start at 0 in each.

        Raises ``ValueError`` for more tokens than ``params.max_seq_len``.
        """
        return self.lm_head(self.hidden(tokens, documents=documents))

    def hidden(
        self, tokens: torch.Tensor, *, documents: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What :meth:`forward` gives to ``lm_head``: (B, T, d_model), normalized."""
        x = self.tok_embed(tokens)
        if documents is None:
            return self._decode(x, None)[0]
        mask, positions = document_layout(documents)
        self._check_length(tokens.shape[1], 0)
        return self._through(x, self.rope.best(positions), mask, [None] * len(self.blocks))[0]

    def forward_with_cache(
        self, tokens: torch.Tensor, past_kvs: PastKVs | None = None
    ) -> tuple[torch.Tensor, Any]:
        """Logits (B, T, vocab) of new ``tokens`` and the keys and values so far.

        ``past_kvs`` is what the last call returned: one ``(keys, values)`` per
        layer, each (B, kv heads, S, head width), or ``None`` for a layer without a
        past. A :class:`KVCache` is written in place and returned.

        Raises ``ValueError`` when past and new tokens exceed ``params.max_seq_len``.
        """
        return self.forward_embeddings(self.tok_embed(tokens), past_kvs)

    def forward_embeddings(
        self, x: torch.Tensor, past_kvs: PastKVs | None = None
    ) -> tuple[torch.Tensor, Any]:
        """:meth:`forward_with_cache` from embedded tokens (B, T, d_model) on."""
        hidden, kvs = self._decode(x, past_kvs)
        return self.lm_head(hidden), kvs

    def _decode(self, x: torch.Tensor, past_kvs: PastKVs | None) -> tuple[torch.Tensor, Any]:
        length = x.shape[1]
        if isinstance(past_kvs, KVCache):
            self._check_length(length, past_kvs.longest)
            positions, mask = past_kvs.advance(length)
            x, _ = self._through(x, self.rope.best(positions), mask, past_kvs.layers)
            return x, past_kvs
        past = [None] * len(self.blocks) if past_kvs is None else list(past_kvs)
        if len(past) != len(self.blocks):
            raise ValueError(
                f"past_kvs has {len(past)} layers and the model {len(self.blocks)}; pass what "
                "forward_with_cache returned"
            )
        start = 0 if past[0] is None else past[0][0].shape[2]
        self._check_length(length, start)
        return self._through(x, self.rope.best(slice(start, start + length)), None, past)

    def _through(
        self, x: torch.Tensor, rotary: Rotary, mask: torch.Tensor | None, past: Sequence[Any]
    ) -> tuple[torch.Tensor, list[LayerKV]]:
        kvs = []
        for block, layer in zip(self.blocks, past):
            x, kv = block(x, rotary, mask, layer)
            kvs.append(kv)
        return self.norm_out(x), kvs

    def _check_length(self, new: int, past: int) -> None:
        limit = self.params.max_seq_len
        if past + new > limit:
            before = f" after {past} cached ones" if past else ""
            raise ValueError(
                f"{new} tokens{before} exceed the model's max_seq_len of {limit} "
                f"by {past + new - limit}"
            )

    def unpack_batch(self, batch: Any) -> tuple[tuple[Any, ...], Any]:
        """``((tokens,), targets)`` of ``(tokens, targets)``; targets of tokens alone are ``None``.

        Nothing is shifted here: the targets are aligned already.
        """
        if isinstance(batch, torch.Tensor):
            return (batch,), None
        tokens, *targets = batch
        return (tokens,), targets[0] if targets else None

    # Files -------------------------------------------------------------------------------

    def to_file(self, path: str) -> None:
        """Write the weights, a state dict, to ``path``: the old file or the whole new one."""
        with atomic_write(path, "wb") as stream:
            torch.save(self.state_dict(), stream)

    @staticmethod
    def from_file(
        path: str | os.PathLike[str], params: NNTransformerParams, map_location: Any = "cpu"
    ) -> TransformerNN:
        """The transformer of ``params`` with the weights that :meth:`to_file` wrote.

        No code is read from the file. Raises ``RuntimeError`` for weights of other
        names or shapes.
        """
        state = torch.load(path, map_location=map_location, weights_only=True)
        return TransformerNN.from_state(state, params)

    @staticmethod
    def from_state(
        state_dict: Mapping[str, torch.Tensor], params: NNTransformerParams
    ) -> TransformerNN:
        """The transformer of ``params`` with the weights of ``state_dict``."""
        net = TransformerNN(params)
        net.load_state_dict(state_dict)
        return net


def document_layout(documents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The mask (B, 1, T, T) and the positions (B, T) of packed rows."""
    length = documents.shape[1]
    index = torch.arange(length, device=documents.device)
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    first = torch.where(starts, index, 0).cummax(dim=1).values
    mask = (first[:, :, None] <= index) & (index[:, None] >= index)
    return mask[:, None], index - first
