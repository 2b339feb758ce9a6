"""One adapter per kind of task: batch checks, masking, loss terms and decoding.

Shapes: N samples, C classes, L labels or targets; ``...`` are further axes.
Axis 1 of an output is the class, label or target axis.
"""

from __future__ import annotations

import torch
from torch import nn

from nnx.models import Model
from nnx.params.task import TaskSpec
from nnx.tasks import losses
from nnx.tasks.adapter import TaskAdapter, TaskValidationError, described, writes_sequences
from nnx.tasks.decoding import Decoded
from nnx.tasks.losses import Prepared, SupervisedTerms


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
                f"categorical targets must be integer class indices, not {described(target)}"
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
                f"regression targets must be floating, not {described(target)}"
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
