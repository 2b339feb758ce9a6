"""Averages of a net's weights over its training, as a callback."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from nnx.callbacks import Callback
from nnx.components import ComponentSpec
from nnx.objectives.supervised import single_input
from nnx.records import NNEvaluationDataPoint
from nnx.seeding import isolated_rng
from nnx.utils import validation as check
from nnx.utils.modes import restored_modes
from torch.optim.swa_utils import AveragedModel

if TYPE_CHECKING:
    from nnx.callbacks.context import CallbackContext
    from nnx.models import Model
    from torch import nn


class WeightAverage(Callback):
    """What :class:`EMA` and :class:`SWA` share: the average, where it is kept and used.

    The average is torch's ``AveragedModel``; it and its counter are component state, so
    that a resume continues it. Every epoch writes it as the weights-only checkpoint
    ``tag``, and as ``best_tag`` in the epochs in which the run's monitor improved, or,
    without one, the validation error (or loss) was the lowest so far. With
    :meth:`eval_step` validation scores the average, and both speak of the same weights;
    with ``best_tag="best"`` as well, the run's BEST is the average.
    """

    rank_behaviour = "every"
    component_name: str

    def __init__(self, tag: str, best_tag: str) -> None:
        self.tag = check.name(type(self).__name__, "tag", tag)
        self.best_tag = check.name(type(self).__name__, "best_tag", best_tag)
        self.best = math.inf
        self._averaged: AveragedModel | None = None
        self._statistics: dict[str, torch.Tensor] = {}  # of the average, where they were refreshed

    @property
    def averaged(self) -> nn.Module:
        """The averaged copy of the net, in training's device and dtype."""
        return self._held().module

    @property
    def updates(self) -> int:
        """How many times weights were taken into the average."""
        return 0 if self._averaged is None else int(self._averaged.n_averaged)

    def on_train_begin(self, ctx: CallbackContext) -> None:
        self._averaged = AveragedModel(ctx.model.net, multi_avg_fn=self._average)
        self.best, self._statistics = math.inf, {}

    def on_epoch_end(self, ctx: CallbackContext) -> None:
        self._before_use(ctx.model, ctx.epoch)
        if self.updates == 0:
            return
        with self.applied_to(ctx.model.net):
            ctx.defer_checkpoint(self.tag)
            # BEST is the run's to decide: what is asked for under its name waits for that.
            if self.best_tag == "best" or self._improved(ctx.idp):
                ctx.defer_checkpoint(self.best_tag)

    @contextmanager
    def applied_to(self, net: nn.Module) -> Iterator[None]:
        """The average's weights in ``net`` for a while; its own come back bit for bit.

        So do its batch statistics, where the average has refreshed ones.
        """
        buffers = dict(net.named_buffers())
        pairs: list[tuple[torch.Tensor, torch.Tensor]]
        pairs = [*zip(net.parameters(), self.averaged.parameters())]
        pairs += [(buffers[name], value) for name, value in self._statistics.items()]
        kept = [own.detach().clone() for own, _ in pairs]
        try:
            with torch.no_grad():
                for own, average in pairs:
                    own.copy_(average)
            yield
        finally:
            with torch.no_grad():
                for (own, _), value in zip(pairs, kept):
                    own.copy_(value)

    def eval_step(self, inner: Callable[[Any], NNEvaluationDataPoint] | None = None) -> Any:
        """An ``eval_step_fn`` that validates the average, by ``inner`` or ``model.evaluate``."""

        def step(ctx: Any) -> NNEvaluationDataPoint:
            def score() -> NNEvaluationDataPoint:
                if inner is not None:
                    return inner(ctx)
                return ctx.model.evaluate(ctx.val_loader, ctx.extra_metrics, ctx.metrics)

            self._before_use(ctx.model, ctx.epoch_idx)
            if self.updates == 0:
                return score()
            with self.applied_to(ctx.model.net):
                return score()

        return step

    def component_spec(self) -> ComponentSpec:
        return ComponentSpec(self.component_name, version=1)

    def component_state(self) -> dict[str, Any]:
        weights = {n: p.detach().clone() for n, p in self.averaged.named_parameters()}
        return {
            "updates": self.updates,
            "best": self.best,
            "weights": weights,
            "statistics": {name: value.clone() for name, value in self._statistics.items()},
            **self.settings(),
        }

    def check_component_state(self, state: Mapping[str, Any], *, version: int) -> list[str]:
        """Every setting that differs from the saved one."""
        return [
            f"{name} is {value!r}, but the checkpoint was trained with {state.get(name)!r}"
            for name, value in self.settings().items()
            if state.get(name) != value
        ]

    def load_component_state(self, state: Mapping[str, Any], *, version: int) -> None:
        average = self._held()
        average.n_averaged.fill_(int(state["updates"]))
        self.best = float(state["best"])
        with torch.no_grad():
            for name, parameter in average.module.named_parameters():
                parameter.copy_(state["weights"][name])
        self._statistics = dict(state.get("statistics") or {})

    def settings(self) -> dict[str, Any]:
        """What a resume must agree with."""
        raise NotImplementedError

    def _average(self, averages: Any, current: Any, count: Any) -> None:
        raise NotImplementedError

    def _before_use(self, model: Model, epoch: int) -> None:
        """What the average takes from the end of ``epoch``, before it is scored or stored."""

    def _held(self) -> AveragedModel:
        if self._averaged is None:
            raise RuntimeError(f"{type(self).__name__} has no average before training begins")
        return self._averaged

    def _improved(self, idp: Any) -> bool:
        if idp is None:
            return False
        if idp.selection is not None:
            return bool(idp.selection.improved)
        record = idp.val_edp
        value = None if record is None else record.error
        value = record.loss if value is None and record is not None else value
        if value is None or not math.isfinite(value) or value >= self.best:
            return False
        self.best = float(value)
        return True


class EMA(WeightAverage):
    """The exponential moving average of the weights, moved once per committed update.

    ``average ← d · average + (1 − d) · weights`` with d = ``decay``; with ``warmup`` d is
    at most (1 + n) / (10 + n) after n updates, so that the start is forgotten. Raises
    ``ValueError`` for ``decay`` outside [0, 1).
    """

    component_name = "nnx.ema"

    def __init__(
        self,
        decay: float = 0.999,
        *,
        warmup: bool = True,
        tag: str = "ema",
        best_tag: str = "ema_best",
    ) -> None:
        super().__init__(tag, best_tag)
        self.decay = float(check.real("EMA", "decay", decay, at_least=0, below=1))
        self.warmup = check.flag("EMA", "warmup", warmup)

    def on_train_begin(self, ctx: CallbackContext) -> None:
        super().on_train_begin(ctx)
        self._held().n_averaged.fill_(1)  # the weights at the start are its first value
        if ctx.trainer is None:
            ctx.update_listeners.append(self._move)

    def on_optimizer_update(self, ctx: CallbackContext, event: Any) -> None:
        if ctx.trainer is not None and ctx.optimizers and event.optimizer == min(ctx.optimizers):
            self._move(ctx)

    def settings(self) -> dict[str, Any]:
        return {"decay": self.decay, "warmup": self.warmup}

    def _move(self, ctx: CallbackContext) -> None:
        self._held().update_parameters(ctx.model.net)

    def _average(self, averages: Any, current: Any, count: Any) -> None:
        updates = int(count)  # counts the start
        decay = min(self.decay, (1 + updates) / (10 + updates)) if self.warmup else self.decay
        torch._foreach_lerp_(list(averages), list(current), 1.0 - decay)


class SWA(WeightAverage):
    """The plain mean of the weights at the ends of epochs (Izmailov et al. 2018, arXiv:1803.05407).

    Epochs from ``start`` on take part. From then on ``lr`` is the learning rate, reached
    over ``anneal_epochs`` by the ``strategy`` "cos" or "linear" as with torch's ``SWALR``;
    ``None`` leaves the rate to the run's scheduler.

    A net with batch statistics needs those of the average: ``refresh``, a loader of
    training batches, computes them before the average is validated or stored, and
    :meth:`refresh_batch_norm` does so at any time. In several processes pass all of them
    the same batches. Raises ``ValueError`` for values out of their domain and, when a run
    starts, for ``lr`` beside a scheduler on the update clock.
    """

    component_name = "nnx.swa"

    def __init__(
        self,
        start: int = 0,
        *,
        lr: float | None = None,
        anneal_epochs: int = 10,
        strategy: str = "cos",
        refresh: Iterable[Any] | None = None,
        tag: str = "swa",
        best_tag: str = "swa_best",
    ) -> None:
        super().__init__(tag, best_tag)
        self.start = check.count("SWA", "start", start, at_least=0)
        self.lr = None if lr is None else float(check.real("SWA", "lr", lr, above=0))
        self.anneal_epochs = check.count("SWA", "anneal_epochs", anneal_epochs, at_least=0)
        self.strategy = check.choice("SWA", "strategy", strategy, ("cos", "linear"))
        self.refresh = refresh
        self._taken = -1  # the last epoch whose weights are in the average
        self._rates: dict[str, list[float]] = {}  # where the annealing began
        self._model: Model | None = None

    def on_train_begin(self, ctx: CallbackContext) -> None:
        super().on_train_begin(ctx)
        self._taken, self._rates = -1, {}
        run = ctx.run
        used = [run.train.scheduler] if run.trainer is None else run.trainer.schedulers.values()
        if self.lr is not None and any(s is not None and s.clock != "epoch" for s in used):
            raise ValueError(
                "SWA(lr=...): the run's scheduler sets the learning rate at every update; give it "
                "the epoch clock, or leave lr out"
            )

    def on_epoch_begin(self, ctx: CallbackContext) -> None:
        if self.lr is None or ctx.epoch < self.start:
            return
        optimizers = ctx.optimizers or {"": ctx.optimizer}
        if not self._rates:
            self._rates = {
                name: [float(group["lr"]) for group in optimizer.param_groups]
                for name, optimizer in optimizers.items()
            }
        share = self._annealed(ctx.epoch - self.start + 1)
        for name, optimizer in optimizers.items():
            for group, rate in zip(optimizer.param_groups, self._rates[name]):
                new = share * self.lr + (1.0 - share) * rate
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(new)
                else:
                    group["lr"] = new

    def settings(self) -> dict[str, Any]:
        annealed = {"anneal_epochs": self.anneal_epochs, "strategy": self.strategy}
        return {"start": self.start, "lr": self.lr, **(annealed if self.lr is not None else {})}

    def component_state(self) -> dict[str, Any]:
        return {**super().component_state(), "taken": self._taken, "rates": dict(self._rates)}

    def load_component_state(self, state: Mapping[str, Any], *, version: int) -> None:
        super().load_component_state(state, version=version)
        self._taken = int(state.get("taken", -1))
        self._rates = {name: list(rates) for name, rates in (state.get("rates") or {}).items()}

    def refresh_batch_norm(self, loader: Iterable[Any]) -> None:
        """Compute the batch statistics of the average over ``loader``; no stream moves.

        Batches are those of training, or inputs alone.
        """
        net = self.averaged
        with isolated_rng(), restored_modes(net):
            torch.optim.swa_utils.update_bn(self._inputs(loader), net)
        self._statistics = {name: value.detach().clone() for name, value in net.named_buffers()}

    def _inputs(self, loader: Iterable[Any]) -> Iterator[torch.Tensor]:
        device = next(self.averaged.parameters()).device
        for batch in loader:
            if self._model is None or isinstance(batch, torch.Tensor):
                inputs = batch[0] if isinstance(batch, (list, tuple)) else batch
            else:
                inputs = single_input(self._model, batch, owner="SWA's batch statistics")
            yield inputs.to(device)

    def _before_use(self, model: Model, epoch: int) -> None:
        if epoch < self.start or epoch <= self._taken:
            return
        self._model, self._taken = model, epoch
        self._held().update_parameters(model.net)
        self._statistics = {}
        if self.refresh is not None:
            self.refresh_batch_norm(self.refresh)

    def _annealed(self, epochs: int) -> float:
        """How much of the way the rate has gone after ``epochs``."""
        way = min(1.0, epochs / self.anneal_epochs) if self.anneal_epochs else 1.0
        return (1.0 - math.cos(math.pi * way)) / 2 if self.strategy == "cos" else way

    def _average(self, averages: Any, current: Any, count: Any) -> None:
        torch._foreach_lerp_(list(averages), list(current), 1.0 / (int(count) + 1))
