"""A backbone made of a language model: the mean of its hidden states."""

from __future__ import annotations

from typing import Any

import torch
from nnx.utils import validation as check
from torch import nn


class TokenEncoder(nn.Module):
    """Maps B strings to (B, d_model): the mean of ``net.hidden`` over each text's tokens.

    Args:
        net: a ``TransformerNN``, or anything with ``hidden(ids) -> (B, T, D)``.
        tokenizer: an object with ``encode(text) -> ids``, an ``NNTokenizerParams`` say.
        max_tokens: longer texts are cut.

    Texts are padded on the right, which causal attention never sees. A text
    without tokens raises ``ValueError``.
    """

    def __init__(self, net: nn.Module, tokenizer: Any, *, max_tokens: int = 256) -> None:
        super().__init__()
        self.net = net
        self.tokenizer = tokenizer
        self.max_tokens = check.count("TokenEncoder", "max_tokens", max_tokens)

    def forward(self, texts: list[str]) -> torch.Tensor:
        rows = [self.tokenizer.encode(text)[: self.max_tokens] for text in texts]
        for text, row in zip(texts, rows):
            if not row:
                raise ValueError(f"the text {check.show(text)} has no tokens to embed")
        device = next(self.net.parameters()).device
        lengths = torch.tensor([len(row) for row in rows], device=device)
        width = int(lengths.max())
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
        hidden: torch.Tensor = self.net.hidden(ids)  # type: ignore[operator]
        real = torch.arange(width, device=device) < lengths[:, None]
        return (hidden * real.unsqueeze(-1)).sum(dim=1) / lengths[:, None]
