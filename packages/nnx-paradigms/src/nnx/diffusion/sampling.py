"""Samples from noise."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from nnx.diffusion.schedules import NoiseSchedule
from nnx.diffusion.training import check_denoiser
from nnx.precision import inference_precision
from nnx.utils.modes import eval_mode

if TYPE_CHECKING:
    from nnx.models import Model


@torch.no_grad()
def sample(
    model: Model,
    schedule: NoiseSchedule,
    shape: tuple[int, ...],
    *,
    device: torch.device | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """``shape`` samples by DDPM's ``schedule.T`` reverse steps (Ho et al. 2020, algorithm 2).

    The noise has the posterior variance; the last step adds none. Draws come from
    ``generator``, on its device, or from the global stream. The net runs in eval mode and
    gets its modes back. ``device`` is the model's by default.
    """
    check_denoiser(model.net)
    where = torch.device(model.device if device is None else device)
    precision = inference_precision(model.params, where)
    schedule = schedule.to(where)

    def noise() -> torch.Tensor:
        at = where if generator is None else generator.device
        return torch.randn(shape, generator=generator, device=at).to(where)

    x = noise()
    with eval_mode(model.net), precision.autocast():
        for step in reversed(range(schedule.T)):
            t = torch.full((shape[0],), step, device=where)
            predicted = model.net(x, t).to(x.dtype)
            strength = schedule.betas[step] / schedule.sqrt_one_minus_alphas_cumprod[step]
            x = (x - strength * predicted) / schedule.alphas[step].sqrt()
            if step:
                x = x + schedule.posterior_variance[step].sqrt() * noise()
    return x
