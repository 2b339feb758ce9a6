"""A small network that says how much noise is in its input."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from nnx.utils import validation as check
from torch import nn


class DiffusionMLP(nn.Module):
    """``forward(x, t, y=None)``: the noise in ``x`` (B, ...), which has the shape of ``x``.

    The time's sinusoids go through a small layer and join the flattened ``x``; layers
    of ``hidden_dims`` (two of 128 by default) with ReLU and a linear head follow. With
    ``n_classes`` it takes class indices ``y`` (B,), −1 for none. It knows no space:
    :class:`UNet` does.

    Raises ``ValueError`` for widths below 1 and an odd ``time_embed_dim``.
    """

    def __init__(
        self,
        input_dim: int,
        hidden_dims: list[int] | None = None,
        time_embed_dim: int = 32,
        *,
        n_classes: int | None = None,
    ) -> None:
        super().__init__()
        self.input_dim = check.count("DiffusionMLP", "input_dim", input_dim)
        widths = [128, 128] if hidden_dims is None else list(hidden_dims)
        hidden = [check.count("DiffusionMLP", "hidden_dims", width) for width in widths]
        self.time_embed_dim = _even("DiffusionMLP", "time_embed_dim", time_embed_dim)
        self.time_mlp = nn.Sequential(nn.Linear(time_embed_dim, time_embed_dim), nn.GELU())
        dims = [input_dim + time_embed_dim, *hidden, input_dim]
        self.layers = nn.ModuleList(nn.Linear(m, n) for m, n in itertools.pairwise(dims))
        self.classes = None
        if n_classes is not None:
            self.classes = ClassEmbedding("DiffusionMLP", n_classes, time_embed_dim)

    @property
    def n_classes(self) -> int | None:
        """How many classes it can be told, ``None`` for none."""
        return None if self.classes is None else self.classes.n_classes

    def forward(
        self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The noise in ``x`` at the integer timesteps ``t`` (B,)."""
        flat = x.flatten(1)
        if flat.shape[1] != self.input_dim:
            raise ValueError(
                f"DiffusionMLP expects {self.input_dim} values per sample, got {tuple(x.shape)}"
            )
        time = self.time_mlp(sinusoidal_time_embed(t, self.time_embed_dim).to(flat.dtype))
        if self.classes is not None:
            time = time + self.classes(y, len(x))
        elif y is not None:
            raise ValueError("DiffusionMLP was built without n_classes and takes no classes")
        hidden = torch.cat((flat, time), dim=1)
        for layer in self.layers[:-1]:
            hidden = F.relu(layer(hidden))
        return self.layers[-1](hidden).view_as(x)

    def unpack_batch(self, batch: Any) -> tuple[tuple[Any, ...], Any]:
        """``((x,), target)``; the target may be missing."""
        return samples_of(batch)


class ClassEmbedding(nn.Module):
    """Features (B, ``dim``) of class indices, of which −1 (or no indices at all) is no class."""

    def __init__(self, owner: str, n_classes: int, dim: int) -> None:
        super().__init__()
        self.n_classes = check.count(owner, "n_classes", n_classes)
        self.table = nn.Embedding(n_classes + 1, dim)

    def forward(self, y: torch.Tensor | None, count: int) -> torch.Tensor:
        if y is None:
            y = torch.full((count,), -1, device=self.table.weight.device)
        return self.table(torch.where(y < 0, self.n_classes, y))


def samples_of(batch: Any) -> tuple[tuple[Any, ...], Any]:
    """``((x,), target)`` of ``(x, target)``; ``x`` alone has the target ``None``."""
    if isinstance(batch, torch.Tensor):
        return (batch,), None
    x, *targets = batch
    return (x,), targets[0] if targets else None


def sinusoidal_time_embed(t: torch.Tensor, dim: int) -> torch.Tensor:
    """``dim`` features (B, dim) of timesteps ``t`` (B,): sines, then cosines.

    The wave lengths grow geometrically from 2π to 10000 · 2π. ``dim`` must be even.
    """
    half = _even("sinusoidal_time_embed", "dim", dim) // 2
    steps = torch.arange(half, dtype=torch.float32, device=t.device)
    angles = t.float()[:, None] * torch.exp(-math.log(10000.0) * steps / max(half - 1, 1))
    return torch.cat((angles.sin(), angles.cos()), dim=1)


def _even(owner: str, field: str, value: int) -> int:
    value = check.count(owner, field, value, at_least=2)
    if value % 2:
        check.refuse(owner, field, value, "even: half of it are sines, half cosines")
    return value


def build(config: Mapping[str, Any]) -> DiffusionMLP:
    """The factory of the model ``"diffusion.mlp"``: the arguments of :class:`DiffusionMLP`."""
    asked: dict[str, Any] = dict(config)
    if "hidden_dims" in asked:
        asked["hidden_dims"] = list(asked["hidden_dims"])
    return DiffusionMLP(**asked)
