"""What a declared task does with outputs and targets, whatever its kind: the base of adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from nnx.enums import Losses
from nnx.errors import NNxError
from nnx.params.task import TaskSpec
from nnx.tasks import losses
from nnx.tasks.accumulator import TaskMetricAccumulator
from nnx.tasks.counts import tensor_of
from nnx.tasks.decoding import Decoded
from nnx.tasks.losses import Prepared, SupervisedTerms
from nnx.tasks.semantics import Semantics

if TYPE_CHECKING:
    from nnx.prediction import PredictionResult
    from nnx.records import NNEvaluationDataPoint


class TaskValidationError(ValueError, NNxError):
    """A batch, loss or model that does not fit the declared task."""


class TaskAdapter:
    """What a declared task does with outputs and targets. Make one with :func:`task_adapter`.

    An adapter of your own defines :meth:`prepare` and :meth:`loss_terms`, and
    :meth:`decode` where its decisions are not those of its :attr:`semantics`; a
    subclass of ``NNModel`` returns it from ``task_adapter``. An adapter remembers
    nothing between two calls.
    """

    suitable: tuple[str, ...] = ()  # suitable members of Losses, by value
    foreign_losses: tuple[type[nn.Module], ...] = ()  # live losses that cannot be meant

    def __init__(self, spec: TaskSpec) -> None:
        self.spec = spec

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.spec!r})"

    @property
    def semantics(self) -> Semantics:
        """What the outputs mean, to decisions, probabilities and metrics."""
        return Semantics.of_task(self.spec)

    # What to check before anything runs

    def check_model(self, *, net: Any, loss: Any, output_dim: int | None) -> None:
        """Refuse a net, a ``Losses`` member or a width that cannot serve the task.

        A ``LossSpec`` is judged by the module that it builds, in :meth:`check_loss_fn`.
        """
        kind = self.spec.kind
        if writes_sequences(net):
            raise TaskValidationError(
                f"a {kind} task does not cover Nets.{net.name}: its outputs are token or patch "
                "sequences. Train it without task= or with its own task object."
            )
        if isinstance(loss, Losses) and loss.value not in self.suitable:
            raise TaskValidationError(
                f"a {kind} task needs loss={' or '.join(self.suitable)}, not {loss.value}"
            )
        width = self.spec.num_outputs
        if width is not None and output_dim is not None and width != output_dim:
            raise TaskValidationError(
                f"the {kind} task declares {width} outputs but the net has output_dim={output_dim}"
            )

    def check_loss_fn(self, loss_fn: nn.Module) -> None:
        """Refuse a live loss module that cannot serve the task."""
        if isinstance(loss_fn, self.foreign_losses):
            raise TaskValidationError(
                f"{type(loss_fn).__name__} cannot score a {self.spec.kind} task; "
                f"it needs {' or '.join(self.suitable)}"
            )
        reduction = getattr(loss_fn, "reduction", "mean")
        if reduction not in ("mean", "sum"):
            raise TaskValidationError(
                f"{type(loss_fn).__name__} has reduction={reduction!r}; use 'mean' or 'sum'"
            )

    def check_logits(self, logits: np.ndarray) -> None:
        """Refuse raw outputs whose dtype or width is not the task's."""
        self._check_output(tensor_of(logits))

    # One batch

    def prepare(
        self, output: torch.Tensor, target: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Check one batch and return ``(output, target, valid)`` for loss and metrics.

        ``valid`` marks the targets that count; masked targets are replaced by
        0. Targets keep their dtype where the loss takes it. Raises
        ``TaskValidationError`` before anything is computed from the batch.
        """
        raise NotImplementedError

    def terms(self, loss_fn: nn.Module, prepared: Prepared) -> SupervisedTerms:
        """The loss of a prepared batch; its weight is computed when it is read."""
        if type(self).loss_terms is TaskAdapter.loss_terms:
            return self._terms(loss_fn, prepared)
        output, target, valid = prepared
        loss, numerator, denominator = self.loss_terms(loss_fn, output, target, valid)
        return SupervisedTerms(
            loss, output, target, valid, numerator=numerator, weight=denominator,
            valid_targets=lambda: float(prepared.some),
        )  # fmt: skip

    def _terms(self, loss_fn: nn.Module, prepared: Prepared) -> SupervisedTerms:
        raise NotImplementedError(f"{type(self).__name__} must define loss_terms()")

    def loss_terms(
        self,
        loss_fn: nn.Module,
        output: torch.Tensor,
        target: torch.Tensor,
        valid: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, float | None]:
        """``(loss, numerator, denominator)`` of a prepared batch.

        ``loss`` is the mean over valid targets (their total for a summed loss,
        whose denominator is ``None``); numerators and denominators add up over
        batches. With every target masked the denominator is 0.0, ``loss`` is
        NaN and the numerator 0 with a zero gradient.
        """
        terms = self._terms(loss_fn, Prepared(output, target, valid))
        return terms.loss, terms.numerator, terms.denominator

    def decode(self, output: torch.Tensor) -> torch.Tensor:
        """Decisions of raw outputs: class indices, 0/1 indicators or values."""
        return self.semantics.decide(output)

    def decoded(
        self, output: torch.Tensor, target: torch.Tensor, valid: torch.Tensor | None
    ) -> Decoded:
        """The decisions of a prepared batch beside their targets, to be scored.

        Floating decisions are scored as values, others of the output's shape as 0/1
        indicators, and those without its axis 1 as classes.
        """
        decisions = self.decode(output)
        if decisions.is_floating_point():
            return Decoded.values(decisions, target, valid)
        if decisions.shape == output.shape:
            return Decoded.indicators(decisions, target, valid)
        return Decoded.classes(decisions, target, valid)

    def decode_array(self, logits: np.ndarray) -> np.ndarray:
        """:meth:`decode` for arrays."""
        return self.decode(tensor_of(logits)).numpy()

    # Records

    def accumulator(
        self, *, keep_arrays: bool = False, bounded: bool = False
    ) -> TaskMetricAccumulator:
        """A fresh accumulator of this task's metrics."""
        return TaskMetricAccumulator(self, keep_arrays=keep_arrays, bounded=bounded)

    def record(
        self,
        output: torch.Tensor,
        target: torch.Tensor,
        *,
        loss: float | None,
        extra_metrics: Mapping[str, Callable[..., float]] | None = None,
    ) -> NNEvaluationDataPoint:
        """The record of one batch of raw outputs, as the default step writes it."""
        accumulator = self.accumulator(keep_arrays=bool(extra_metrics))
        accumulator.update(*self.prepare(output.detach(), target))
        return accumulator.result(loss=loss, extra_metrics=extra_metrics)

    def prediction(self, logits: np.ndarray, sample_ids: np.ndarray) -> PredictionResult:
        """Logits with the task's probabilities and decisions."""
        from nnx.prediction.result import task_prediction

        return task_prediction(self, logits, sample_ids)

    # Shared checks

    def _check_output(self, output: torch.Tensor) -> None:
        kind, width = self.spec.kind, self.spec.num_outputs
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            raise TaskValidationError(
                f"a {kind} output must be a floating tensor, not {described(output)}"
            )
        if output.ndim < 2:
            raise TaskValidationError(
                f"a {kind} output must be (N, {width or 'outputs'}, ...), not {described(output)}"
            )
        if width is not None and output.shape[1] != width:
            raise TaskValidationError(
                f"the {kind} task declares {width} outputs but axis 1 of the model's output "
                f"{tuple(output.shape)} has {output.shape[1]}"
            )

    def _prepared(
        self,
        output: torch.Tensor,
        target: torch.Tensor,
        valid: torch.Tensor,
        wrong: torch.Tensor,
        domain: str,
    ) -> Prepared:
        """The batch with 0 for masked targets; refused where targets are ``wrong``.

        The one time that a batch's values are waited for.
        """
        flags = torch.stack([wrong.any(), valid.all(), valid.any()])
        some_wrong, complete, some = flags.tolist()
        if some_wrong:
            found = target[wrong].reshape(-1)[0].item()
            raise TaskValidationError(f"{self.spec.kind} targets must be {domain}; found {found}")
        return Prepared(output, torch.where(valid, target, 0), valid, complete=complete, some=some)

    def _whole(
        self, loss_fn: nn.Module, prepared: Prepared, target: torch.Tensor
    ) -> SupervisedTerms:
        """The loss function on the batch as it is."""
        output, _, valid = prepared
        loss = loss_fn(losses.native_input(loss_fn, output), target)
        losses.check_scalar(loss, loss_fn)
        return SupervisedTerms(
            loss, output, target, valid,
            weight=lambda: losses.loss_weight(loss_fn, output, target),
            valid_targets=lambda: float(prepared.some),
        )  # fmt: skip

    def _check_target(self, target: Any) -> None:
        if not isinstance(target, torch.Tensor):
            raise TaskValidationError(
                f"a {self.spec.kind} target must be a tensor, not {type(target).__name__}"
            )


def writes_sequences(net: Any) -> bool:
    """Whether a net of ``Nets`` has an output for each token or patch, not one for each row."""
    return getattr(net, "value", None) in ("transformer", "vit")


def described(value: Any) -> str:
    """A target's kind, for errors."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    return type(value).__name__
