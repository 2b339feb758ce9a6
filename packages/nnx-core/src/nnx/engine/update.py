"""The one place that updates weights.

An :class:`UpdateEngine` takes the losses of microbatches and owns, in this
order: backward, accumulation over the window, synchronization, unscaling, the
finite check, clipping, the optimizer step, the update counters and their events.

A window is ``accumulate`` microbatches, or fewer when the epoch ends. Its
update is the one of the union of its microbatches as one batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, cast

import torch
from torch.nn.utils import clip_grad_norm_

from nnx.components import ComponentSpec
from nnx.engine import direct, gradients
from nnx.engine.window import Applied, GradientWindow, TermTotals, WindowSynchronizer, WindowTotals
from nnx.objectives import LossTerm, ObjectiveResult, UpdateEvent
from nnx.objectives.base import NONFINITE_POLICIES
from nnx.objectives.supervised import supervised_terms_of
from nnx.tasks.losses import SupervisedTerms
from nnx.utils import validation as check


class UpdateEngine:
    """Owner of every optimizer update of a run.

    ``clip_norms`` is the gradient norm limit of each optimizer by name.
    ``nonfinite`` is the policy for a loss or a gradient that is NaN or infinite: such
    an update is never taken, by any kind of step. A ``scaler`` makes FP16 windows: when
    any optimizer's unscaled gradients overflow none of them steps, quietly, and the
    scale backs off. ``net`` is read for the names of parameters in errors.
    """

    def __init__(
        self,
        optimizers: Mapping[str, torch.optim.Optimizer],
        *,
        accumulate: int = 1,
        clip_norms: Mapping[str, float | None] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        nonfinite: str = "fail",
        synchronize: WindowSynchronizer | None = None,
        net: torch.nn.Module | None = None,
    ) -> None:
        self.optimizers = dict(optimizers)
        self.accumulate = accumulate
        self.clip_norms = dict(clip_norms or {})
        self.scaler = scaler
        self.nonfinite = check.choice("UpdateEngine", "nonfinite", nonfinite, NONFINITE_POLICIES)
        self.synchronize = synchronize
        self.net = net
        self.on_backward_error: Callable[[BaseException], None] | None = None
        self.updates = 0
        self.update_counts = dict.fromkeys(self.optimizers, 0)
        self._window: GradientWindow | None = None
        self._epoch = WindowTotals()
        self._kept = self._dropped = 0

    # -- epochs ---------------------------------------------------------------

    def begin_epoch(self) -> None:
        """Start the epoch's totals and drop what an aborted epoch left open."""
        self.discard()
        self._epoch = WindowTotals()
        self._kept = self._dropped = 0

    def epoch_loss(self) -> float | None:
        """The whole epoch's loss, by the rule of a window.

        Dropped windows are left out. NaN when every window was dropped, ``None``
        when nothing was valid.
        """
        if self._dropped and not self._kept:
            return math.nan
        return self._epoch.loss()

    # -- microbatches ---------------------------------------------------------

    def apply(
        self, result: ObjectiveResult, *, epoch_idx: int, batch_idx: int, is_last: bool
    ) -> Applied:
        """Back-propagate one microbatch and step when it closes the window."""
        terms = cast("tuple[LossTerm, ...]", result.terms)
        return self._apply(terms, epoch_idx, batch_idx, is_last)

    def apply_supervised(
        self, supervised: SupervisedTerms, *, epoch_idx: int, batch_idx: int, is_last: bool
    ) -> Applied:
        """The default step. A window of one microbatch costs no more than a plain loop's."""
        if self.accumulate == 1 and self.scaler is None and self.synchronize is None:
            return self._step_at_once(supervised, epoch_idx, batch_idx)
        # Like a plain loop, this differentiates every leaf of the graph.
        terms = supervised_terms_of(supervised)
        return self._apply(terms, epoch_idx, batch_idx, is_last, restrict=False)

    def close(self, *, epoch_idx: int, batch_idx: int) -> Applied:
        """Close the window that the end of the epoch cut short, if one is open."""
        applied = Applied()
        if self._window is not None:
            self._close(self._window, applied, epoch_idx, batch_idx)
        return applied

    def discard(self) -> None:
        """Forget an open window and its gradients."""
        if self._window is not None:
            self._window.clear()
            self._window = None

    # -- state ----------------------------------------------------------------

    def component_spec(self) -> ComponentSpec:
        """The counters are the component ``nnx.update_engine``."""
        return ComponentSpec("nnx.update_engine", version=1, required=False)

    def component_state(self) -> dict[str, Any]:
        """The committed updates of the run and of each optimizer."""
        return {"updates": self.updates, "optimizers": dict(self.update_counts)}

    def load_component_state(self, state: Mapping[str, Any], *, version: int) -> None:
        """Continue the counters of another session."""
        self.updates = int(state["updates"])
        counts = state["optimizers"]
        self.update_counts = {name: int(counts.get(name, 0)) for name in self.optimizers}

    def window_state(self) -> dict[str, Any]:
        """The open window and the epoch's totals, for a point inside an epoch."""
        return {
            "window": None if self._window is None else self._window.state(),
            "epoch": self._epoch.state(),
            "kept": self._kept,
            "dropped": self._dropped,
        }

    def load_window_state(self, state: Mapping[str, Any]) -> None:
        """Continue the window and the epoch of :meth:`window_state`."""
        self._epoch = WindowTotals.from_state(state["epoch"])
        self._kept, self._dropped = int(state["kept"]), int(state["dropped"])
        self._window = None
        if state["window"] is not None:
            self._window = self._open_window()
            self._window.load_state(state["window"])

    # -- one microbatch -------------------------------------------------------

    def _step_at_once(self, supervised: SupervisedTerms, epoch_idx: int, batch_idx: int) -> Applied:
        if supervised.valid is not None and supervised.masked:
            return Applied(closed=True)
        owned = [p for name in self.optimizers for p in self._parameters_of(name)]
        for parameter in owned:
            parameter.grad = None  # zero_grad() would open a profiler range for it
        loss = supervised.loss
        try:
            direct.backward(loss)
        except Exception as error:
            self._note_backward_error(error)
            raise
        held = [p.grad for p in owned if p.grad is not None]
        value, *flags = gradients.read([loss, *gradients.nonfinite_flags(held)])
        # 0/0 or an empty sum may mean that nothing is valid.
        if (value == 0.0 or not math.isfinite(value)) and supervised.masked:
            self._open_window()  # clears the gradients
            return Applied(closed=True)
        if not math.isfinite(value):
            self._open_window()
            self._fail(f"the training loss is {value}", epoch_idx, batch_idx)
        if any(flags):
            problem = gradients.nonfinite_gradient(self.optimizers, self.net)
            self._open_window()
            self._fail(problem, epoch_idx, batch_idx)
        for name, optimizer in self.optimizers.items():
            self._clip(name)
            direct.step(optimizer)
            self.update_counts[name] += 1
        self.updates += 1
        return Applied(value, True, True)

    def _apply(
        self,
        terms: tuple[LossTerm, ...],
        epoch_idx: int,
        batch_idx: int,
        is_last: bool,
        *,
        restrict: bool = True,
    ) -> Applied:
        try:
            window = self._window = self._window or self._open_window()
            window.totals.microbatches += 1
            entries = [window.totals_of(term) for term in terms]
            active = [term for term in terms if term.weight != 0 and not term.masked]
            closes = is_last or window.totals.microbatches >= self.accumulate
            shares = None
            if self.synchronize is not None:
                shares = self.synchronize.shares(active, closes=closes)
            if shares is not None:
                window.backward_shares(shares, scaler=self.scaler)
            elif active and not window.totals.nonfinite:
                self._backward(window, active, is_last, restrict)
            live = self._count(terms, entries)
            ready = None
            if closes and self.synchronize is None and self.scaler is None:
                # The gradients are made before anything is read, so that one read tells it all.
                ready = self._reduce(window, window.totals)
            flags = [] if ready is None else gradients.nonfinite_flags(window.held())
            value, finite = self._add_values(window, live, flags, epoch_idx, batch_idx)
            applied = Applied(value)
            if closes:
                self._close(window, applied, epoch_idx, batch_idx, ready, finite)
        except BaseException:
            self.discard()
            raise
        return applied

    def _backward(
        self, window: GradientWindow, active: Sequence[LossTerm], is_last: bool, restrict: bool
    ) -> None:
        alone = window.totals.microbatches == 1 and (is_last or self.accumulate == 1)
        # With every denominator known, one pass through the combined loss is enough.
        combine = alone and len(active) > 1 and self.synchronize is None
        try:
            window.backward(active, scaler=self.scaler, combine=combine, restrict=restrict)
        except Exception as error:
            self._note_backward_error(error)
            raise

    def _note_backward_error(self, error: BaseException) -> None:
        if self.on_backward_error is not None:
            self.on_backward_error(error)

    def _count(
        self, terms: Sequence[LossTerm], entries: Sequence[TermTotals]
    ) -> list[tuple[LossTerm, TermTotals]]:
        """Add the denominators of the terms that are not masked; those terms."""
        live = [(term, entry) for term, entry in zip(terms, entries) if not term.masked]
        for term, entry in live:
            entry.live = True
            entry.denominator += float(term.denominator or 0.0)
        return live

    def _add_values(
        self,
        window: GradientWindow,
        live: Sequence[tuple[LossTerm, TermTotals]],
        flags: Sequence[torch.Tensor],
        epoch_idx: int,
        batch_idx: int,
    ) -> tuple[float | None, bool]:
        """Add a microbatch to the window's sums: its combined loss, and whether ``flags`` are 0.

        One read of the device.
        """
        readings = gradients.read([*(term.reading() for term, _ in live), *flags])
        finite = not any(readings[len(live) :])
        combined = 0.0
        for (term, entry), reading in zip(live, readings):
            numerator, value = term.sums(reading)
            entry.numerator += numerator
            if term.weight == 0:
                continue
            entry.weighted += term.weight * numerator
            combined += term.weight * value
            if not math.isfinite(reading):
                window.totals.nonfinite = True
                # With several processes all must leave the window together.
                if self.nonfinite == "fail" and self.synchronize is None:
                    self._fail(f"loss term {term.name!r} is {reading}", epoch_idx, batch_idx)
        return (combined if live else None), finite

    # -- closing a window -----------------------------------------------------

    def _close(
        self,
        window: GradientWindow,
        applied: Applied,
        epoch_idx: int,
        batch_idx: int,
        stepping: list[str] | None = None,
        finite: bool = True,
    ) -> None:
        """End a window; ``stepping`` and ``finite`` where its gradients were made already."""
        applied.closed = True
        totals = window.totals
        if self.synchronize is not None:
            totals = self.synchronize.totals(totals)
        if totals.nonfinite:
            self._drop("a loss term of the update window is not finite", epoch_idx, batch_idx)
            return
        if stepping is None:
            stepping = self._reduce(window, totals)
            finite = not stepping or self._gradients_are_finite(window, stepping)
        if not finite:
            if self.scaler is None:
                self._drop(
                    gradients.nonfinite_gradient(self.optimizers, self.net), epoch_idx, batch_idx
                )
                return
            self.scaler.update()  # backs off
            stepping = []
        self._kept += 1
        self._epoch.add_terms(totals)
        if not stepping:
            self.discard()
            return
        self._step(stepping)
        applied.committed = True
        applied.events = self._events(stepping, totals, epoch_idx, batch_idx)
        self._window = None  # the gradients stay, for callbacks to read

    def _reduce(self, window: GradientWindow, totals: WindowTotals) -> list[str]:
        """Make the window's gradients; the names of the optimizers that hold some."""
        if not totals.live():
            return []
        window.reduce(totals)
        if self.synchronize is not None:
            self.synchronize.gradients(window.parameters)
        return [
            name
            for name in self.optimizers
            if any(parameter.grad is not None for parameter in self._parameters_of(name))
        ]

    def _gradients_are_finite(self, window: GradientWindow, stepping: Sequence[str]) -> bool:
        if self.scaler is not None:
            for name in stepping:
                self.scaler.unscale_(self.optimizers[name])
        finite = gradients.all_finite(window.held())
        return finite if self.synchronize is None else self.synchronize.all_finite(finite)

    def _step(self, stepping: Sequence[str]) -> None:
        for name in stepping:
            self._clip(name)
        for name in stepping:
            if self.scaler is None:
                direct.step(self.optimizers[name])
            else:
                self.scaler.step(self.optimizers[name])
            self.update_counts[name] += 1
        if self.scaler is not None:
            self.scaler.update()
        self.updates += 1

    def _clip(self, name: str) -> None:
        limit = self.clip_norms.get(name)
        if limit is not None:
            clip_grad_norm_(self._parameters_of(name), limit)

    def _events(
        self, stepping: Sequence[str], totals: WindowTotals, epoch_idx: int, batch_idx: int
    ) -> tuple[UpdateEvent, ...]:
        losses = {name: term.value for name, term in totals.live().items()}
        return tuple(
            UpdateEvent(
                optimizer=name,
                update_idx=self.update_counts[name],
                epoch_idx=epoch_idx,
                batch_idx=batch_idx,
                microbatches=totals.microbatches,
                losses=losses,
                loss=cast(float, totals.loss()),
            )
            for name in stepping
        )

    def _drop(self, problem: str, epoch_idx: int, batch_idx: int) -> None:
        self._dropped += 1
        self.discard()
        if self.nonfinite == "fail":
            self._fail(problem, epoch_idx, batch_idx)

    def _fail(self, what: str, epoch_idx: int, batch_idx: int) -> NoReturn:
        raise FloatingPointError(
            f"{what} at epoch {epoch_idx}, batch {batch_idx}; no optimizer was stepped. Lower the "
            "learning rate, clip gradients (grad_clip_norm), or train an objective with "
            'nonfinite="skip", which drops such windows.'
        )

    # -- parameters -----------------------------------------------------------

    def _open_window(self) -> GradientWindow:
        """A window over what the optimizers own now, without gradients."""
        owned = [p for name in self.optimizers for p in self._parameters_of(name)]
        return GradientWindow(list(dict.fromkeys(owned)) if len(self.optimizers) > 1 else owned)

    def _parameters_of(self, name: str) -> list[torch.nn.Parameter]:
        return [p for group in self.optimizers[name].param_groups for p in group["params"]]


GradientAccumulationState = UpdateEngine
"""What a step context carries between the microbatches of a window."""
