"""Strings to vectors, with either kind of backbone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from nnx.utils import validation as check
from nnx.utils.modes import eval_mode


def embed_texts(
    backbone: Any,
    texts: list[str],
    *,
    batch_size: int = 64,
    device: str | torch.device | None = None,
    normalize: bool = True,
) -> torch.Tensor:
    """The embeddings (N, D) of ``texts``, without gradients and in eval mode.

    ``normalize`` scales every row to length 1, so that inner products are cosines.
    The result is on ``device``, by default the backbone's; the backbone stays where
    it is and its modes are restored. No texts give a tensor (0, 0).
    """
    size = check.count("embed_texts", "batch_size", batch_size)
    texts = checked_texts("embed_texts", texts)
    where = device_of(backbone)
    parts = []
    with eval_mode(backbone), torch.no_grad():
        for start in range(0, len(texts), size):
            rows = encode(backbone, texts[start : start + size], where)
            parts.append(F.normalize(rows, dim=1) if normalize else rows)
    found = torch.cat(parts) if parts else torch.empty(0, 0, device=where)
    return found.detach().to(where if device is None else device)


def encode(backbone: Any, texts: list[str], device: torch.device) -> torch.Tensor:
    """The embeddings (B, D) of one batch, with gradients where they are on."""
    if callable(getattr(backbone, "tokenize", None)):  # sentence-transformers
        features = backbone.tokenize(texts)
        moved = {k: v.to(device) if torch.is_tensor(v) else v for k, v in features.items()}
        rows = backbone(moved)["sentence_embedding"]
    else:
        rows = backbone(texts)
    if not isinstance(rows, torch.Tensor) or rows.dim() != 2 or len(rows) != len(texts):
        shape = tuple(rows.shape) if isinstance(rows, torch.Tensor) else type(rows).__name__
        raise ValueError(
            f"a text backbone gives one embedding per text, ({len(texts)}, D), not {shape}"
        )
    return rows


def device_of(backbone: Any) -> torch.device:
    """Where a backbone is: its own ``device``, its first parameter's, or the CPU."""
    own = getattr(backbone, "device", None)
    if own is not None:
        return torch.device(own)
    first = next(iter(backbone.parameters()), None)
    return torch.device("cpu") if first is None else first.device


def checked_texts(owner: str, texts: Any) -> list[str]:
    """A list of strings; one string alone is refused."""
    if isinstance(texts, (str, bytes)) or not isinstance(texts, Sequence):
        raise TypeError(f"{owner} takes a list of strings, not {type(texts).__name__}")
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"{owner}: entry {i} is a {type(text).__name__}, not a string")
    return list(texts)
