"""Which patches of an image are hidden."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from nnx.components import ComponentSpec
from nnx.utils import validation as check


def random_block_mask(
    *,
    n_patches: int,
    grid_size: int,
    block_scale: tuple[float, float] = (0.15, 0.2),
    block_aspect: tuple[float, float] = (0.75, 1.5),
    generator: torch.Generator | None = None,
    device: torch.device | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One hidden rectangle on a grid of patches, as the masks (context, target).

    Both are booleans (n_patches,), each the complement of the other; the target is the
    rectangle. Its area is uniform in ``block_scale`` of the patches, its width over height
    in ``block_aspect``. Draws come from ``generator``, a CPU generator, or from the global
    stream. Call it several times for several rectangles.

    Raises ``ValueError`` unless ``n_patches == grid_size ** 2``, for intervals that are
    none, and for a rectangle without a patch or larger than the grid.
    """
    owner = "random_block_mask"
    side = check.count(owner, "grid_size", grid_size)
    if check.count(owner, "n_patches", n_patches) != side**2:
        check.refuse(owner, "n_patches", n_patches, f"grid_size squared ({side**2})")
    low, high = _interval(owner, "block_scale", block_scale)
    scale = low + (high - low) * float(torch.rand((), generator=generator))
    low, high = _interval(owner, "block_aspect", block_aspect)
    aspect = low + (high - low) * float(torch.rand((), generator=generator))
    height = round(math.sqrt(scale * n_patches / aspect))
    width = round(math.sqrt(scale * n_patches * aspect))
    if not (1 <= height <= side and 1 <= width <= side):
        raise ValueError(
            f"{owner}: the rectangle is {height} by {width} patches on a grid of {side} by {side}; "
            "choose another block_scale or block_aspect"
        )
    top = int(torch.randint(0, side - height + 1, (), generator=generator))
    left = int(torch.randint(0, side - width + 1, (), generator=generator))
    hidden = torch.zeros(side, side, dtype=torch.bool)
    hidden[top : top + height, left : left + width] = True
    target = hidden.flatten().to(device)
    return ~target, target


class BlockMasks:
    """A ``mask_fn`` of :func:`random_block_mask` with draws of its own.

    Every process of a run draws the same masks. As the mask function of a
    :class:`JEPAObjective` its generator is saved with it; beside a step function, pass it
    as one of ``components``.
    """

    def __init__(self, grid_size: int, *, seed: int = 0, **options: Any) -> None:
        self.grid_size = check.count("BlockMasks", "grid_size", grid_size)
        self.options = options
        self.generator = torch.Generator().manual_seed(check.integer("BlockMasks", "seed", seed))

    def __call__(self, n_patches: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        return random_block_mask(
            n_patches=n_patches,
            grid_size=self.grid_size,
            generator=self.generator,
            device=device,
            **self.options,
        )

    def component_spec(self) -> ComponentSpec:
        return ComponentSpec("jepa.masks", version=1)

    def component_state(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_component_state(self, state: Mapping[str, Any], *, version: int) -> None:
        self.generator.set_state(state["generator"])


def _interval(owner: str, field: str, value: Any) -> tuple[float, float]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        check.refuse(owner, field, value, "a pair (smallest, largest)")
    low = check.real(owner, field, value[0], above=0)
    return float(low), float(check.real(owner, field, value[1], at_least=low))
