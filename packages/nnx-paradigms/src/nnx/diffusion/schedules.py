"""How much noise is in a sample at each timestep."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any

import torch
from nnx.utils import validation as check


@dataclass(frozen=True, slots=True, eq=False)
class NoiseSchedule:
    """What DDPM reads at each of ``T`` timesteps (Ho et al. 2020, arXiv:2006.11239).

    The tensors are 1-D of length ``T``. ``betas`` are the variances that are added,
    ``alphas`` = 1 − betas, ``alphas_cumprod`` their running product ᾱ;
    ``posterior_variance`` is that of q(x_{t−1} | x_t, x_0), 0 at the first step.
    """

    kind: NoiseSchedulers
    T: int
    betas: torch.Tensor
    alphas: torch.Tensor
    alphas_cumprod: torch.Tensor
    sqrt_alphas_cumprod: torch.Tensor
    sqrt_one_minus_alphas_cumprod: torch.Tensor
    posterior_variance: torch.Tensor

    def to(self, device: Any) -> NoiseSchedule:
        """The same schedule with its tensors on ``device``."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {
            name: v.to(device) for name, v in values.items() if isinstance(v, torch.Tensor)
        }
        return replace(self, **moved)


class NoiseSchedulers(Enum):
    """The kinds of schedules; calling one builds it on the CPU."""

    LINEAR = "linear"
    COSINE = "cosine"

    def __call__(
        self, T: int = 1000, *, beta_min: float = 1e-4, beta_max: float = 2e-2, s: float = 0.008
    ) -> NoiseSchedule:
        """A schedule of ``T`` steps.

        ``LINEAR`` goes from ``beta_min`` to ``beta_max``, both inside (0, 1). ``COSINE``
        follows Nichol and Dhariwal (2021, arXiv:2102.09672) with the offset ``s`` >= 0 and
        betas of at most 0.999. Each ignores the other's arguments.
        """
        owner = f"NoiseSchedulers.{self.name}"
        T = check.count(owner, "T", T)
        if self is NoiseSchedulers.LINEAR:
            low = check.real(owner, "beta_min", beta_min, above=0, below=1)
            high = check.real(owner, "beta_max", beta_max, above=0, below=1)
            if high < low:
                check.refuse(owner, "beta_max", high, f"at least beta_min ({low})")
            return schedule_of(self, torch.linspace(low, high, T, dtype=torch.float32))
        offset = check.real(owner, "s", s, at_least=0)
        time = torch.linspace(0, T, T + 1, dtype=torch.float64) / T
        left = torch.cos((time + offset) / (1 + offset) * math.pi / 2) ** 2
        betas = (1 - left[1:] / left[:-1]).clamp(0, 0.999)
        return schedule_of(self, betas.float())

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


def schedule_of(kind: NoiseSchedulers, betas: torch.Tensor) -> NoiseSchedule:
    """The schedule of ``betas`` (T,)."""
    alphas = 1.0 - betas
    kept = alphas.cumprod(0)
    before = torch.cat((torch.ones_like(kept[:1]), kept[:-1]))
    return NoiseSchedule(
        kind=kind,
        T=len(betas),
        betas=betas,
        alphas=alphas,
        alphas_cumprod=kept,
        sqrt_alphas_cumprod=kept.sqrt(),
        sqrt_one_minus_alphas_cumprod=(1.0 - kept).sqrt(),
        posterior_variance=betas * (1.0 - before) / (1.0 - kept),
    )


def zero_terminal_snr(schedule: NoiseSchedule) -> NoiseSchedule:
    """``schedule`` rescaled so that its last step is all noise (Lin et al. 2023, arXiv:2305.08891).

    Train it with ``prediction="velocity"`` or ``"sample"``.
    """
    roots = schedule.alphas_cumprod.double().sqrt()
    first, last = roots[0], roots[-1]
    kept = ((roots - last) * first / (first - last)).square()
    alphas = torch.cat((kept[:1], kept[1:] / kept[:-1]))
    return schedule_of(schedule.kind, (1 - alphas).float())
