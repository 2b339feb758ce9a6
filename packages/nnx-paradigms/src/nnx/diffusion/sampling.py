"""Samples from noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from nnx.diffusion.schedules import NoiseSchedule
from nnx.diffusion.training import PREDICTIONS, check_denoiser, check_trained, stored_diffusion
from nnx.precision import inference_precision
from nnx.utils import validation as check
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

    Raises ``ValueError`` for another schedule than a net was trained with in this process.
    """
    check_denoiser(model.net)
    check_trained(model.net, schedule, "noise", owner="sample")
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


@torch.no_grad()
def sample_in_steps(
    model: Model,
    schedule: NoiseSchedule,
    shape: tuple[int, ...],
    *,
    steps: int = 50,
    method: str = "ddim",
    eta: float = 0.0,
    prediction: str = "noise",
    classes: torch.Tensor | int | None = None,
    guidance: float = 1.0,
    device: torch.device | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """``shape`` samples in any number of ``steps`` from 1 to ``schedule.T``.

    ``method`` is ``"ddim"`` (Song et al. 2020, arXiv:2010.02502; ``eta`` 0 draws no noise
    after the start, 1 as much as DDPM) or ``"dpm++"``, the multistep DPM-Solver++ of
    second order (Lu et al. 2022, arXiv:2211.01095). The timesteps are spread evenly, the
    last of training among them. ``prediction`` is what the net was trained to give. Draws and
    modes are as in :func:`sample`.

    ``classes``, one index or one for each sample, is what the net is told. ``guidance`` w
    other than 1 moves its answer to ``without + w · (with − without)`` the class, in one
    forward of twice the batch (Ho and Salimans 2022, arXiv:2207.12598).

    Raises ``ValueError`` for values out of their domain, ``eta`` with ``"dpm++"``, guidance
    without classes, the noise prediction of a schedule whose last step is all noise, and
    another schedule or prediction than a net was trained with in this process.
    """
    owner = "sample_in_steps"
    steps = check.count(owner, "steps", steps, at_most=schedule.T)
    check.choice(owner, "method", method, ("ddim", "dpm++"))
    check.choice(owner, "prediction", prediction, PREDICTIONS)
    eta = check.real(owner, "eta", eta, at_least=0, at_most=1)
    if eta and method != "ddim":
        raise ValueError("sample_in_steps: eta is for method='ddim'; dpm++ draws no noise")
    if prediction == "noise" and float(schedule.alphas_cumprod[-1]) == 0.0:
        raise ValueError(
            "sample_in_steps: the schedule's last step is all noise, from which predicted noise "
            "does not lead back; use a net of another prediction"
        )
    guidance = float(check.real(owner, "guidance", guidance))
    if guidance != 1.0 and classes is None:
        raise ValueError("sample_in_steps: guidance moves towards classes=, which are not given")
    check_denoiser(model.net, classes=classes is not None)
    check_trained(model.net, schedule, prediction, owner=owner)
    where = torch.device(model.device if device is None else device)
    answer = _guided(model.net, _indices(classes, shape[0], where), guidance)
    precision = inference_precision(model.params, where)
    times = [round(schedule.T - i * schedule.T / steps) - 1 for i in range(steps)]
    kept = [*schedule.alphas_cumprod.double()[times].tolist(), 1.0]

    def noise() -> torch.Tensor:
        at = where if generator is None else generator.device
        return torch.randn(shape, generator=generator, device=at).to(where)

    x, before = noise(), None
    with eval_mode(model.net), precision.autocast():
        for i, t in enumerate(times):
            given = answer(x, torch.full((shape[0],), t, device=where)).to(x.dtype)
            clean, dirt = _parts(x, given, kept[i], prediction)
            if method == "ddim":
                x = _ddim(clean, dirt, kept[i], kept[i + 1], eta, noise)
            else:
                x = _multistep(x, clean, before, kept, i)
                before = clean
    return x


def sample_run(
    run: str,
    shape: tuple[int, ...],
    *,
    tag: Any = "last",
    root: str | None = None,
    model: Model | None = None,
    **options: Any,
) -> torch.Tensor:
    """``shape`` samples of a run by its own weights, schedule and prediction.

    ``options`` are those of :func:`sample_in_steps` but the last two. ``model`` is needed
    where the run's net was a module that no factory rebuilds; its weights are then used as
    they are.
    """
    from nnx.nn_model import NNModel
    from nnx.store import NNCheckpoint

    schedule, prediction = stored_diffusion(run, root=root)  # averages have weights alone
    if "prediction" in options:
        raise TypeError("sample_run takes no prediction: the run knows what its net predicts")
    if model is None:
        checkpoint = NNCheckpoint.load(run, tag, root)
        if checkpoint is None:
            raise FileNotFoundError(f"the run {run} has no checkpoint {tag}")
        model = NNModel.from_checkpoint(checkpoint)
    return sample_in_steps(model, schedule, shape, prediction=prediction, **options)


def _indices(
    classes: torch.Tensor | int | None, count: int, device: torch.device
) -> torch.Tensor | None:
    if classes is None:
        return None
    if not isinstance(classes, torch.Tensor):
        return torch.full((count,), check.integer("sample_in_steps", "classes", classes)).to(device)
    if classes.shape != (count,) or classes.is_floating_point():
        raise ValueError(
            f"sample_in_steps: classes must be one index or {count} of them, not {classes.dtype} of "
            f"{tuple(classes.shape)}"
        )
    return classes.to(device)


def _guided(
    net: torch.nn.Module, classes: torch.Tensor | None, guidance: float
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The net's answer for ``(x, t)``."""
    if classes is None:
        return net
    if guidance == 1.0:
        return lambda x, t: net(x, t, classes)

    def answer(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        told = torch.cat((classes, torch.full_like(classes, -1)))
        with_class, without = net(torch.cat((x, x)), torch.cat((t, t)), told).chunk(2)
        moved: torch.Tensor = without + guidance * (with_class - without)
        return moved

    return answer


def _parts(
    x: torch.Tensor, given: torch.Tensor, kept: float, prediction: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sample and the noise that ``x`` is made of, by the net's prediction."""
    signal, spread = math.sqrt(kept), math.sqrt(1 - kept)
    if prediction == "noise":
        return (x - spread * given) / signal, given
    if prediction == "sample":
        return given, (x - signal * given) / spread
    return signal * x - spread * given, spread * x + signal * given


def _ddim(
    clean: torch.Tensor,
    dirt: torch.Tensor,
    now: float,
    then: float,
    eta: float,
    noise: Callable[[], torch.Tensor],
) -> torch.Tensor:
    spread = eta * math.sqrt((1 - then) / (1 - now) * (1 - now / then))
    x = math.sqrt(then) * clean + math.sqrt(max(1 - then - spread**2, 0.0)) * dirt
    return x + spread * noise() if spread else x


def _multistep(
    x: torch.Tensor,
    clean: torch.Tensor,
    before: torch.Tensor | None,
    kept: Sequence[float],
    i: int,
) -> torch.Tensor:
    now, then = kept[i], kept[i + 1]
    if then == 1.0:  # all noise is gone
        return clean
    width = _log_ratio(then) - _log_ratio(now)
    if before is not None:
        last = _log_ratio(now) - _log_ratio(kept[i - 1])
        share = width / (2 * last)
        clean = (1 + share) * clean - share * before
    shrunk = math.sqrt((1 - then) / (1 - now))
    return shrunk * x - math.sqrt(then) * math.expm1(-width) * clean


def _log_ratio(kept: float) -> float:
    """log(√ᾱ / √(1 − ᾱ)), the time of DPM-Solver."""
    return (math.log(kept) - math.log1p(-kept)) / 2 if kept else -math.inf
