"""Training a network to see the noise in a sample."""

from __future__ import annotations

import hashlib
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from nnx.diffusion.schedules import NoiseSchedule, NoiseSchedulers, schedule_of
from nnx.objectives import LossTerm, ObjectiveContext, ObjectiveResult
from nnx.objectives.supervised import single_input
from nnx.paradigms.draws import DrawingObjective
from nnx.paradigms.imperative import ImperativeStep
from nnx.records import NNEvaluationDataPoint
from nnx.utils import validation as check

if TYPE_CHECKING:
    from nnx.engine.contexts import TrainStepFn
    from nnx.models import Model

NoiseFn = Callable[[torch.Tensor, torch.Generator], tuple[torch.Tensor, torch.Tensor]]
"""``(x_0, generator)`` to timesteps (B,), integers in [0, T), and noise of the shape of x_0."""

PREDICTIONS = ("noise", "sample", "velocity")


def diffusion_train_step_factory(schedule: NoiseSchedule) -> TrainStepFn:
    """DDPM's noise prediction as a ``train_step_fn``, with draws of the global stream.

    For each sample a timestep is uniform in [0, T), and the loss is the mean squared
    difference between the noise that was added and ``model.net(x_t, t)``. It is the
    record's ``loss`` and ``error``.
    """
    return ImperativeStep(_GlobalDiffusion(schedule), error_is_loss=True)


def diffusion_objective(
    schedule: NoiseSchedule,
    *,
    seed: int | None = None,
    noise_fn: NoiseFn | None = None,
    nonfinite: str = "fail",
    prediction: str = "noise",
    min_snr: float | None = None,
    class_dropout: float | None = None,
) -> DiffusionObjective:
    """DDPM's noise prediction for the update engine; see :class:`DiffusionObjective`."""
    return DiffusionObjective(
        schedule,
        seed=seed,
        noise_fn=noise_fn,
        nonfinite=nonfinite,
        prediction=prediction,
        min_snr=min_snr,
        class_dropout=class_dropout,
    )


class DiffusionObjective(DrawingObjective):
    """Noise prediction (Ho et al. 2020, arXiv:2006.11239) as the term ``"noise_mse"``.

    Timesteps and noise come from the objective's own CPU generator, which is component
    state (``diffusion.objective``) together with a fingerprint of the schedule: a resume
    with another one is refused, and :func:`stored_schedule` reads it from a run.
    ``noise_fn(x_0, generator)`` may supply both.

    ``prediction`` is what the net gives: the ``"noise"``, the ``"sample"`` x_0, or the
    ``"velocity"`` √ᾱ · noise − √(1 − ᾱ) · x_0 (Salimans and Ho 2022, arXiv:2202.00512); the
    term is named after it. ``min_snr`` caps the weight of easy timesteps at that
    signal-to-noise ratio (Hang et al. 2023, arXiv:2303.09556; 5 is usual).

    With ``class_dropout`` the net is also told the batch's target, class indices (B,), as
    ``net(x, t, y)``. That share of them is replaced by −1, no class, so that sampling can be
    guided (Ho and Salimans 2022, arXiv:2207.12598; 0.1 is usual).
    """

    component_name = "diffusion.objective"

    def __init__(
        self,
        schedule: NoiseSchedule,
        *,
        seed: int | None = None,
        noise_fn: NoiseFn | None = None,
        nonfinite: str = "fail",
        prediction: str = "noise",
        min_snr: float | None = None,
        class_dropout: float | None = None,
    ) -> None:
        super().__init__(seed=seed, nonfinite=nonfinite)
        check.instance("diffusion_objective", "schedule", schedule, NoiseSchedule)
        if noise_fn is not None and not callable(noise_fn):
            check.refuse_type("diffusion_objective", "noise_fn", noise_fn, "callable")
        self.schedule, self.noise_fn = schedule, noise_fn
        self.prediction = check.choice("diffusion_objective", "prediction", prediction, PREDICTIONS)
        if min_snr is not None:
            min_snr = float(check.real("diffusion_objective", "min_snr", min_snr, above=0))
        self.min_snr = min_snr
        if class_dropout is not None:
            class_dropout = float(
                check.real(
                    "diffusion_objective", "class_dropout", class_dropout, at_least=0, below=1
                )
            )
        self.class_dropout = class_dropout
        self._digest = fingerprint(schedule)
        if prediction == "noise" and float(schedule.alphas_cumprod[-1]) == 0.0:
            raise ValueError(
                "diffusion_objective: the schedule's last step is all noise, whose prediction says "
                'nothing of the sample; use prediction="velocity" or "sample"'
            )

    def __call__(self, ctx: ObjectiveContext) -> ObjectiveResult:
        model = ctx.model
        x_0 = single_input(model, ctx.batch, owner="diffusion").to(model.device)
        t, noise = self.draw(x_0)
        self._check_draw(x_0, t, noise)
        told = () if self.class_dropout is None else (self._classes(model, ctx.batch),)
        TRAINED[model.net] = Trained(self._digest, self.prediction)
        t, noise = t.to(x_0.device), noise.to(x_0)
        self.schedule = self.schedule.to(x_0.device)
        wanted = self._wanted(x_0, t, noise)
        error = ctx.full_precision(model.net(self._noised(x_0, t, noise), t, *told)) - wanted
        squares = error.square()
        if self.min_snr is not None:
            squares = squares * self._weights(t).view(-1, *[1] * (x_0.dim() - 1))
        term = LossTerm(f"{self.prediction}_mse", squares.sum(), error.numel())
        return ObjectiveResult((term,), self._record(term))

    def draw(self, x_0: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Timesteps (B,) and noise like ``x_0`` for one microbatch, on the CPU."""
        generator = self.fork()
        if self.noise_fn is not None:
            return self.noise_fn(x_0, generator)
        t = torch.randint(0, self.schedule.T, (len(x_0),), generator=generator)
        return t, torch.randn(x_0.shape, generator=generator, dtype=x_0.dtype)

    def check_run(
        self,
        model: Model,
        *,
        optimizers: Mapping[str, torch.optim.Optimizer],
        callbacks: Sequence[Any],
    ) -> None:
        """Refuse a net that cannot be called with a sample and its timestep."""
        super().check_run(model, optimizers=optimizers, callbacks=callbacks)
        check_denoiser(model.net, classes=self.class_dropout is not None)

    def spec(self) -> dict[str, Any]:
        return {
            "T": self.schedule.T,
            "betas": self._digest,
            "prediction": self.prediction,
            "min_snr": self.min_snr,
            "class_dropout": self.class_dropout,
        }

    def component_state(self) -> dict[str, Any]:
        schedule = {"kind": self.schedule.kind.value, "betas": self.schedule.betas.cpu().clone()}
        return {**super().component_state(), "schedule": schedule}

    def _classes(self, model: Model, batch: Any) -> torch.Tensor:
        """The batch's classes (B,), a share of them replaced by −1."""
        target = model.split_batch(batch)[2]
        known = getattr(model.net, "n_classes", None)
        if not isinstance(target, torch.Tensor) or target.dim() != 1 or target.is_floating_point():
            raise ValueError(
                "diffusion_objective(class_dropout=...) needs batches of (samples, class indices "
                "(B,))"
            )
        if known is not None and target.is_cpu and int(target.max()) >= known:
            raise ValueError(
                f"diffusion_objective: the batch has the class {int(target.max())}, but the net "
                f"knows {known} classes"
            )
        assert self.class_dropout is not None
        dropped = torch.rand(len(target), generator=self.fork()) < self.class_dropout
        return target.to(model.device).masked_fill(dropped.to(model.device), -1)

    def _record(self, term: LossTerm) -> NNEvaluationDataPoint:
        value = term.value
        return NNEvaluationDataPoint(metrics={} if value is None else {term.name: value})

    def _wanted(self, x_0: torch.Tensor, t: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        if self.prediction == "noise":
            return noise
        return x_0 if self.prediction == "sample" else self._noised(noise, t, -x_0)

    def _weights(self, t: torch.Tensor) -> torch.Tensor:
        """min(SNR, cap) in units of x_0's loss, over what the prediction's own loss weighs."""
        kept = self.schedule.alphas_cumprod[t]
        ratio = kept / (1 - kept)
        own = {"noise": ratio, "sample": torch.ones_like(ratio), "velocity": ratio + 1}
        return ratio.clamp(max=self.min_snr) / own[self.prediction]

    def _noised(self, x_0: torch.Tensor, t: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        shape = (-1, *[1] * (x_0.dim() - 1))
        kept = self.schedule.sqrt_alphas_cumprod[t].view(shape).to(x_0)
        added = self.schedule.sqrt_one_minus_alphas_cumprod[t].view(shape).to(x_0)
        return kept * x_0 + added * noise

    def _check_draw(self, x_0: torch.Tensor, t: torch.Tensor, noise: torch.Tensor) -> None:
        if t.shape != x_0.shape[:1] or t.is_floating_point() or noise.shape != x_0.shape:
            raise ValueError(
                f"noise_fn must return integer timesteps of shape {tuple(x_0.shape[:1])} and noise "
                f"of shape {tuple(x_0.shape)}, not {t.dtype} of {tuple(t.shape)} and "
                f"{tuple(noise.shape)}"
            )
        if self.noise_fn is not None and not bool(((t >= 0) & (t < self.schedule.T)).all()):
            raise ValueError(f"noise_fn returned timesteps outside of [0, {self.schedule.T})")


class _GlobalDiffusion(DiffusionObjective):
    """Draws of the global stream, which a run seeds and restores."""

    def draw(self, x_0: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        t = torch.randint(0, self.schedule.T, (len(x_0),), device=x_0.device)
        return t, torch.randn_like(x_0)


@dataclass(frozen=True, slots=True)
class Trained:
    """What a net was trained with in this process."""

    schedule: str
    prediction: str


TRAINED: weakref.WeakKeyDictionary[torch.nn.Module, Trained] = weakref.WeakKeyDictionary()
"""By net, what the last microbatch of a diffusion objective or step used."""


def check_trained(
    net: torch.nn.Module, schedule: NoiseSchedule, prediction: str, *, owner: str
) -> None:
    """Refuse another schedule or prediction than ``net`` was trained with, where it is known."""
    known = TRAINED.get(net)
    if known is None:
        return
    if known.schedule != fingerprint(schedule):
        raise ValueError(
            f"{owner}: this is not the schedule that the net was trained with; its run has it: "
            "stored_schedule(run.id)"
        )
    if known.prediction != prediction:
        raise ValueError(
            f"{owner}: the net was trained to predict the {known.prediction}, not the {prediction}; "
            f"pass prediction={known.prediction!r} to sample_in_steps"
        )


def fingerprint(schedule: NoiseSchedule) -> str:
    """The SHA-256 digest of the schedule's betas."""
    return hashlib.sha256(schedule.betas.detach().cpu().double().numpy().tobytes()).hexdigest()


def stored_schedule(run: str, *, tag: Any = "last", root: str | None = None) -> NoiseSchedule:
    """The schedule that the run ``run`` was trained with, by a :class:`DiffusionObjective`.

    Raises ``FileNotFoundError`` for a run or tag that is not there and ``ValueError`` for
    one that no diffusion objective trained.
    """
    return stored_diffusion(run, tag=tag, root=root)[0]


def stored_diffusion(
    run: str, *, tag: Any = "last", root: str | None = None
) -> tuple[NoiseSchedule, str]:
    """The schedule of the run ``run`` and what its net predicts; see :func:`stored_schedule`."""
    from nnx.store import NNCheckpoint

    state = NNCheckpoint.load_training_state(run, tag, root)
    if state is None:
        raise FileNotFoundError(f"there is no training state {tag} of the run {run}")
    saved = (state.get("components") or {}).get(DiffusionObjective.component_name)
    if saved is None or "schedule" not in saved["state"]:
        raise ValueError(f"the run {run} holds no schedule: no diffusion_objective trained it")
    schedule, spec = saved["state"]["schedule"], saved["state"]["spec"]
    rebuilt = schedule_of(NoiseSchedulers(schedule["kind"]), schedule["betas"])
    return rebuilt, str(spec.get("prediction", "noise"))


def check_denoiser(net: torch.nn.Module, *, classes: bool = False) -> None:
    """Refuse a net whose forward does not take ``(x, t)``, or ``(x, t, y)`` with classes."""
    wanted = "forward(x, t, y)" if classes else "forward(x, t)"
    told = classes and getattr(net, "n_classes", -1) is None
    try:
        inspect.signature(net.forward).bind(*[None] * (3 if classes else 2))
    except TypeError:
        raise ValueError(
            f"diffusion calls the net with a noisy sample and its timestep"
            f"{' and its class' * classes}, {wanted}, which {type(net).__name__} does not take. "
            "DiffusionMLP and UNet do"
        ) from None
    if told:
        raise ValueError(f"{type(net).__name__} was built without n_classes and takes no classes")


def of_config(config: Mapping[str, Any]) -> DiffusionObjective:
    """The factory of ``"diffusion.noise"``.

    ``config`` has the ``kind`` of the schedule, its arguments (``T``, ``beta_min``,
    ``beta_max``, ``s``) and the objective's (``seed``, ``nonfinite``, ``prediction``, ``min_snr``,
    ``class_dropout``).
    """
    names = ("seed", "nonfinite", "prediction", "min_snr", "class_dropout")
    own = {name: config[name] for name in names if name in config}
    asked = {name: value for name, value in config.items() if name not in ("kind", *own)}
    return DiffusionObjective(NoiseSchedulers(config["kind"])(**asked), **own)
