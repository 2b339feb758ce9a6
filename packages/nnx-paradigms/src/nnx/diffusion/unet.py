"""A small U-Net that says what is in a noisy image (Ho et al. 2020, arXiv:2006.11239).

Shapes in names: B images, C channels, H and W their size, D features of the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from nnx.diffusion.nets import ClassEmbedding, samples_of, sinusoidal_time_embed
from nnx.utils import validation as check
from torch import nn


class UNet(nn.Module):
    """``forward(x, t, y=None)``: the noise (or another prediction) in images ``x`` (B, C, H, W).

    Level i of ``multipliers`` has ``width · multipliers[i]`` channels and ``blocks``
    residual blocks, and halves the image but for the last, where every pixel attends to
    every other. The way up reads what the way down computed. With ``n_classes`` the net
    takes class indices ``y`` (B,), −1 for none. The last convolution starts at zero.

    Raises ``ValueError`` for numbers below 1, a ``width`` that is no multiple of 8 and a
    ``dropout`` outside of [0, 1]; when it runs, for images that cannot be halved so often.
    """

    def __init__(
        self,
        *,
        in_channels: int = 1,
        width: int = 32,
        multipliers: Sequence[int] = (1, 2),
        blocks: int = 1,
        n_classes: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.in_channels = check.count("UNet", "in_channels", in_channels)
        self.width = check.count("UNet", "width", width)
        if width % GROUPS:
            check.refuse("UNet", "width", width, f"a multiple of {GROUPS}")
        if not multipliers:
            check.refuse("UNet", "multipliers", multipliers, "at least one number")
        widths = [width * check.count("UNet", "multipliers", m) for m in multipliers]
        blocks = check.count("UNet", "blocks", blocks)
        dropout = float(check.real("UNet", "dropout", dropout, at_least=0, at_most=1))
        features = 4 * width
        self.time_mlp = nn.Sequential(
            nn.Linear(width, features), nn.SiLU(), nn.Linear(features, features)
        )
        self.classes = None if n_classes is None else ClassEmbedding("UNet", n_classes, features)
        self.conv_in = nn.Conv2d(in_channels, width, 3, padding=1)
        self.down, self.shrink = nn.ModuleList(), nn.ModuleList()
        skips, now = [width], width
        for level, channels in enumerate(widths):
            for _ in range(blocks):
                self.down.append(ResBlock(now, channels, features, dropout))
                skips.append(now := channels)
            if level + 1 < len(widths):
                self.shrink.append(nn.Conv2d(now, now, 3, stride=2, padding=1))
                skips.append(now)
        self.middle = nn.ModuleList(
            (
                ResBlock(now, now, features, dropout),
                PixelAttention(now),
                ResBlock(now, now, features, dropout),
            )
        )
        self.up, self.grow = nn.ModuleList(), nn.ModuleList()
        for level, channels in reversed(list(enumerate(widths))):
            for _ in range(blocks + 1):
                self.up.append(ResBlock(now + skips.pop(), channels, features, dropout))
                now = channels
            if level:
                self.grow.append(nn.Conv2d(now, now, 3, padding=1))
        self.norm_out = nn.GroupNorm(GROUPS, now)
        self.conv_out = nn.Conv2d(now, in_channels, 3, padding=1)
        for parameter in self.conv_out.parameters():
            nn.init.zeros_(parameter)
        self.blocks, self.levels = blocks, len(widths)

    @property
    def n_classes(self) -> int | None:
        """How many classes it can be told, ``None`` for none."""
        return None if self.classes is None else self.classes.n_classes

    def forward(
        self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The prediction for ``x`` (B, C, H, W) at the integer timesteps ``t`` (B,)."""
        self._check_images(x)
        time_BD = self.time_mlp(sinusoidal_time_embed(t, self.width).to(x.dtype))
        if self.classes is not None:
            time_BD = time_BD + self.classes(y, len(x))
        elif y is not None:
            raise ValueError("UNet was built without n_classes and takes no classes")
        hidden = self.conv_in(x)
        skips = [hidden]
        for i, block in enumerate(self.down):
            hidden = block(hidden, time_BD)
            skips.append(hidden)
            level, last = divmod(i + 1, self.blocks)
            if last == 0 and level < self.levels:
                hidden = self.shrink[level - 1](hidden)
                skips.append(hidden)
        for block in self.middle:
            hidden = block(hidden, time_BD)
        for i, block in enumerate(self.up):
            hidden = block(torch.cat((hidden, skips.pop()), dim=1), time_BD)
            level, last = divmod(i + 1, self.blocks + 1)
            if last == 0 and level < self.levels:
                hidden = self.grow[level - 1](F.interpolate(hidden, scale_factor=2.0))
        return self.conv_out(F.silu(self.norm_out(hidden)))

    def unpack_batch(self, batch: Any) -> tuple[tuple[Any, ...], Any]:
        """``((x,), target)``; the target may be missing."""
        return samples_of(batch)

    def _check_images(self, x: torch.Tensor) -> None:
        step = 2 ** (self.levels - 1)
        if x.dim() != 4 or x.shape[1] != self.in_channels or any(n % step for n in x.shape[2:]):
            raise ValueError(
                f"UNet expects images (B, {self.in_channels}, H, W) of sizes that are multiples of "
                f"{step}, got {tuple(x.shape)}"
            )


GROUPS = 8


class ResBlock(nn.Module):
    """Two convolutions, normalized first, with the time between them, added to the input."""

    def __init__(self, channels: int, out: int, features: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(GROUPS, channels)
        self.conv1 = nn.Conv2d(channels, out, 3, padding=1)
        self.time = nn.Linear(features, out)
        self.norm2 = nn.GroupNorm(GROUPS, out)
        self.drop = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.skip = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: torch.Tensor, time_BD: torch.Tensor) -> torch.Tensor:
        hidden = self.conv1(F.silu(self.norm1(x)))
        hidden = hidden + self.time(F.silu(time_BD))[:, :, None, None]
        return self.skip(x) + self.conv2(self.drop(F.silu(self.norm2(hidden))))


class PixelAttention(nn.Module):
    """Every pixel attends to every pixel, in one head; added to the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor, time_BD: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).flatten(2).transpose(1, 2).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))


def build(config: Mapping[str, Any]) -> UNet:
    """The factory of the model ``"diffusion.unet"``: the arguments of :class:`UNet`."""
    return UNet(**config)
