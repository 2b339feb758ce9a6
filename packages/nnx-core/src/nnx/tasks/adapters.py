"""One adapter per kind of task: batch checks, masking, loss terms and decoding.

Shapes: N samples, C classes, L labels or targets; ``...`` are further axes.
Axis 1 of an output is the class, label or target axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from nnx.errors import NNxError
from nnx.models import Model
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
        """Refuse a net, a ``Losses`` member or a width that cannot serve the task."""
        kind = self.spec.kind
        if writes_sequences(net):
            raise TaskValidationError(
                f"a {kind} task does not cover Nets.{net.name}: its outputs are token or patch "
                "sequences. Train it without task= or with its own task object."
            )
        if loss.value not in self.suitable:
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
                f"a {kind} output must be a floating tensor, not {_describe(output)}"
            )
        if output.ndim < 2:
            raise TaskValidationError(
                f"a {kind} output must be (N, {width or 'outputs'}, ...), not {_describe(output)}"
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


class CategoricalAdapter(TaskAdapter):
    """One class of C per sample: outputs ``(N, C, ...)``, targets ``(N, ...)``."""

    suitable = ("cross_entropy", "negative_log_likelihood")
    foreign_losses = (nn.BCEWithLogitsLoss, nn.BCELoss, nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss,
                      nn.HuberLoss)  # fmt: skip

    def check_loss_fn(self, loss_fn: nn.Module) -> None:
        super().check_loss_fn(loss_fn)
        index, width = losses.ignored_index(loss_fn), self.spec.num_outputs
        if index is not None and 0 <= index < (width or 0) and index != self.spec.ignore_index:
            raise TaskValidationError(
                f"the loss ignores class {index}, a class of the task; declare "
                f"TaskSpec.categorical({width}, ignore_index={index}) or change the loss"
            )

    def prepare(self, output: torch.Tensor, target: torch.Tensor) -> Prepared:
        self._check_output(output)
        self._check_target(target)
        if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
            raise TaskValidationError(
                f"categorical targets must be integer class indices, not {_describe(target)}"
            )
        expected = (output.shape[0], *output.shape[2:])
        if tuple(target.shape) != expected:
            raise TaskValidationError(
                f"categorical targets must have shape {expected} for an output of shape "
                f"{tuple(output.shape)}, not {tuple(target.shape)}"
            )
        target = target.long()
        ignored = self.spec.ignore_index
        valid = torch.ones_like(target, dtype=torch.bool) if ignored is None else target != ignored
        classes = output.shape[1]
        wrong = ((target < 0) | (target >= classes)) & valid
        masked = "" if ignored is None else f" (or ignore_index={ignored})"
        return self._prepared(output, target, valid, wrong, f"in [0, {classes}){masked}")

    def _terms(self, loss_fn: nn.Module, prepared: Prepared) -> SupervisedTerms:
        _, target, valid = prepared
        ignored = losses.ignored_index(loss_fn)
        if ignored is None:
            _refuse_masked(loss_fn, prepared)
        elif not prepared.complete:
            target = torch.where(valid, target, ignored)
        return self._whole(loss_fn, prepared, target)

    def decoded(
        self, output: torch.Tensor, target: torch.Tensor, valid: torch.Tensor | None
    ) -> Decoded:
        return Decoded.classes(self.decode(output), target, valid, width=output.shape[1])


class _ElementwiseAdapter(TaskAdapter):
    """Targets shaped like the output, each with a loss of its own."""

    def _terms(self, loss_fn: nn.Module, prepared: Prepared) -> SupervisedTerms:
        output, target, valid = prepared
        if prepared.complete or not losses.is_native(loss_fn, losses.ELEMENTWISE):
            _refuse_masked(loss_fn, prepared)
            return self._whole(loss_fn, prepared, target)
        # At full shape, so that a pos_weight still lines up with its labels. The
        # output is replaced too: 0 * NaN would reach the gradient.
        per_element = losses.with_reduction(loss_fn, "none")(torch.where(valid, output, 0), target)
        numerator = torch.where(valid, per_element, 0).sum()
        summed = getattr(loss_fn, "reduction", "mean") == "sum"
        weight = None if summed else valid.sum()
        return SupervisedTerms(
            numerator if weight is None else numerator / weight, output, target, valid,
            numerator=numerator, weight=weight, valid_targets=lambda: float(prepared.some),
        )  # fmt: skip


class MultilabelAdapter(_ElementwiseAdapter):
    """L independent labels per sample: outputs and 0/1 targets ``(N, L, ...)``; NaN is masked."""

    suitable = ("binary_cross_entropy",)
    foreign_losses = (nn.CrossEntropyLoss, nn.NLLLoss, nn.BCELoss, nn.MSELoss, nn.L1Loss,
                      nn.SmoothL1Loss, nn.HuberLoss)  # fmt: skip

    def prepare(self, output: torch.Tensor, target: torch.Tensor) -> Prepared:
        self._check_output(output)
        self._check_target(target)
        if target.shape != output.shape:
            raise TaskValidationError(
                f"multilabel targets must have the output's shape {tuple(output.shape)}, "
                f"not {tuple(target.shape)}"
            )
        if not target.is_floating_point():
            if target.is_complex():
                raise TaskValidationError(f"multilabel targets cannot be {target.dtype}")
            target = target.to(output.dtype)
        valid = ~torch.isnan(target)
        wrong = (target != 0) & (target != 1) & valid
        return self._prepared(output, target, valid, wrong, "0 or 1 (NaN is masked)")


class RegressionAdapter(_ElementwiseAdapter):
    """Continuous targets shaped like the output ``(N, L, ...)``; NaN is masked."""

    suitable = ("mean_squared_error",)
    foreign_losses = (nn.CrossEntropyLoss, nn.NLLLoss, nn.BCELoss, nn.BCEWithLogitsLoss)

    def prepare(self, output: torch.Tensor, target: torch.Tensor) -> Prepared:
        self._check_output(output)
        self._check_target(target)
        if not target.is_floating_point():
            raise TaskValidationError(
                f"regression targets must be floating, not {_describe(target)}"
            )
        if target.ndim == 1 and tuple(output.shape) == (len(target), 1):
            target = target.unsqueeze(1)
        if target.shape != output.shape:
            raise TaskValidationError(
                f"regression targets must have the output's shape {tuple(output.shape)} "
                f"(an (N,) target only fits an (N, 1) output), not {tuple(target.shape)}"
            )
        valid = ~torch.isnan(target)
        wrong = torch.isinf(target)
        return self._prepared(output, target, valid, wrong, "finite (NaN is masked)")


_ADAPTERS: dict[str, type[TaskAdapter]] = {
    "categorical": CategoricalAdapter,
    "multilabel": MultilabelAdapter,
    "regression": RegressionAdapter,
}


def writes_sequences(net: Any) -> bool:
    """Whether a net of ``Nets`` has an output for each token or patch, not one for each row."""
    return getattr(net, "value", None) in ("transformer", "vit")


def known_width(model: Model) -> int | None:
    """How many classes, labels or targets axis 1 of the outputs has, as far as a model says."""
    adapter = model.task_adapter
    if adapter is not None and adapter.spec.num_outputs is not None:
        return int(adapter.spec.num_outputs)
    if model.net_params is None or writes_sequences(model.params.net):
        return None
    return getattr(model.net_params, "output_dim", None)


def task_adapter(spec: TaskSpec) -> TaskAdapter:
    """The adapter of ``spec``'s kind."""
    return _ADAPTERS[spec.kind](spec)


def _refuse_masked(loss_fn: nn.Module, prepared: Prepared) -> None:
    if not prepared.complete:
        raise TaskValidationError(
            f"the batch has masked targets, which {type(loss_fn).__name__} cannot leave out; "
            "use one of torch's own losses or unmasked batches"
        )


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    return type(value).__name__
