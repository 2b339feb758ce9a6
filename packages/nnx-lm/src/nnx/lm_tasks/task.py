"""Causal language modelling as a task: next-token targets, their loss, their evaluation.

Everything is over tokens: the loss's denominator, the negative log-likelihood
and the accuracy count the same valid targets, however the batches are cut.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from nnx.components import ComponentSpec
from nnx.lm.cross_entropy import linear_cross_entropy
from nnx.lm_tasks.batches import LMTaskError, aligned
from nnx.models import adapter_for
from nnx.objectives import LossTerm, Objective, ObjectiveContext, ObjectiveResult
from nnx.precision import full_precision, inference_precision
from nnx.records import NNEvaluationDataPoint
from nnx.utils import validation as check
from torch import nn

__all__ = [
    "ALIGNMENTS",
    "CausalLMEval",
    "CausalLMObjective",
    "CausalLMTask",
    "perplexity",
]

ALIGNMENTS = ("shift_inputs", "pre_shifted")
"""``"shift_inputs"``: a batch is token ids, shifted here. ``"pre_shifted"``: inputs and targets."""


def perplexity(nll: float | None) -> float | None:
    """``exp(nll)``: infinity where that overflows, ``None`` of ``None``."""
    if nll is None:
        return None
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf


@dataclass(frozen=True, kw_only=True)
class CausalLMTask:
    """How a batch becomes next-token targets.

    Args:
        vocab_size: classes of the logits.
        alignment: one of :data:`ALIGNMENTS`.
        ignore_id: targets with this id count nowhere.
        pad_id: neither do targets with this id.
        smoothing: label smoothing in [0, 1) of the objective; evaluation has none.
        vocab_axis: where the logits have their classes, -1 or 1.
        tokenizer: the digest (or name) of the tokenizer, so that a resume with
            another one is refused.
        eos_id: the token that ends a text. Where it equals ``pad_id``, the first
            one after a text is a target and the rest is padding; otherwise padding
            with the end token would unlearn it.

    A batch is token ids (B, T), a tuple ``(ids,)`` or ``(ids, loss_mask)``, and
    with ``"pre_shifted"`` a tuple ``(inputs, targets)`` or ``(inputs, targets,
    loss_mask)``; or a mapping of ``input_ids``, ``targets`` (or ``labels``),
    ``loss_mask``, ``attention_mask`` and ``documents`` (the number of each token's
    document, of packed rows). Masks are 0 or 1 per token; padding goes on the right.
    """

    vocab_size: int
    alignment: str = "shift_inputs"
    ignore_id: int = -100
    pad_id: int | None = None
    smoothing: float = 0.0
    vocab_axis: int = -1
    tokenizer: str | None = None
    version: int = 1
    eos_id: int | None = None

    def __post_init__(self) -> None:
        owner = "CausalLMTask"
        check.choice(owner, "alignment", self.alignment, ALIGNMENTS)
        values = {
            "vocab_size": check.count(owner, "vocab_size", self.vocab_size),
            "ignore_id": check.integer(owner, "ignore_id", self.ignore_id),
            "smoothing": check.real(owner, "smoothing", self.smoothing, at_least=0, below=1),
        }
        for name in ("pad_id", "eos_id"):
            if getattr(self, name) is not None:
                values[name] = check.integer(owner, name, getattr(self, name))
        if self.vocab_axis not in (-1, 1) or isinstance(self.vocab_axis, bool):
            check.refuse(owner, "vocab_axis", self.vocab_axis, "-1 or 1")
        if self.tokenizer is not None:
            check.text(owner, "tokenizer", self.tokenizer)
        if self.version != 1:
            check.refuse(owner, "version", self.version, "1, the only one known here")
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def state(self) -> dict[str, Any]:
        """The task as plain data."""
        state = {name: getattr(self, name) for name in _FIELDS}
        if self.eos_id is not None:
            state["eos_id"] = self.eos_id
        return state

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> CausalLMTask:
        """The task of :meth:`state`; an unknown key is a ``ValueError``."""
        unknown = set(state) - {*_FIELDS, "eos_id"}
        if unknown:
            raise ValueError(f"CausalLMTask has no key {', '.join(map(repr, sorted(unknown)))}")
        return CausalLMTask(**state)

    # A batch -----------------------------------------------------------------------------

    def split(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """``(inputs, targets, loss_mask)``, each (B, T); the mask covers the targets.

        Raises :class:`LMTaskError` for another layout, dtype or shape, an id outside
        the vocabulary, a mask of other values, or padding on the left.
        """
        read = self._read(batch)
        return read.inputs, read.targets, read.mask

    def valid(self, targets: torch.Tensor, loss_mask: torch.Tensor | None) -> torch.Tensor:
        """Which targets count, as booleans of the targets' shape."""
        valid = targets != self.ignore_id
        if self.pad_id is not None:
            padding = targets == self.pad_id
            if self.eos_id == self.pad_id:  # the first of a run ends the text before it
                padding[..., 1:] &= padding[..., :-1].clone()
                padding[..., :1] = False
            valid &= ~padding
        return valid if loss_mask is None else valid & loss_mask

    def objective(self, *, nonfinite: str = "fail") -> CausalLMObjective:
        """What ``NNModel.train(objective=...)`` trains with."""
        return CausalLMObjective(self, nonfinite=nonfinite)

    def eval_step(self) -> CausalLMEval:
        """What ``NNModel.train(eval_step_fn=...)`` evaluates with."""
        return CausalLMEval(self)

    # Logits and sums ---------------------------------------------------------------------

    def logits(self, model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The model's logits (B, T, vocab) of ``inputs``, in float32 or wider.

        Raises :class:`LMTaskError` when they do not fit ``targets`` and ``vocab_size``.
        """
        return self._checked(_forward(model, inputs, None), targets)

    def token_sums(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        valid: torch.Tensor,
        *,
        with_ce: bool = True,
    ) -> tuple[torch.Tensor, float, int, int]:
        """``(cross_entropy, nll, correct, count)``, sums over the valid targets.

        The first is differentiable and smoothed (zero with ``with_ce=False``); the
        others are plain numbers of the unsmoothed task.
        """
        rows, wanted = logits[valid], targets[valid]
        if with_ce:
            ce = F.cross_entropy(rows, wanted, reduction="sum", label_smoothing=self.smoothing)
        else:
            ce = rows.new_zeros(())
        with torch.no_grad():
            nll = F.cross_entropy(rows, wanted, reduction="none").double().sum()
            correct = (rows.argmax(dim=-1) == wanted).sum()
            numbers = torch.stack((nll, correct.double())).tolist()
        return ce, numbers[0], int(numbers[1]), len(wanted)

    def _read(self, batch: Any) -> _Read:
        inputs, targets, mask, documents = aligned(batch, self.alignment)
        valid = self.valid(targets, mask)
        count = self._check_ids(inputs, targets, valid)
        return _Read(inputs, targets, mask, valid, count, documents)

    def _check_ids(self, inputs: torch.Tensor, targets: torch.Tensor, valid: torch.Tensor) -> int:
        """Refuse ids outside the vocabulary; how many targets are valid. One read of the device."""
        wanted = torch.where(valid, targets, 0)
        facts = [inputs.min(), inputs.max(), wanted.min(), wanted.max(), valid.sum()]
        low, high, first, last, count = torch.stack(facts).tolist()
        for name, least, most in (("token", low, high), ("target", first, last)):
            if least < 0 or most >= self.vocab_size:
                raise LMTaskError(
                    f"the batch has {name} id {least if least < 0 else most}, outside the "
                    f"vocabulary of {self.vocab_size} (0 to {self.vocab_size - 1}); another "
                    "tokenizer wrote it, or padding needs pad_id, ignore_id or a mask"
                )
        return int(count)

    def _checked(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        moved = logits if self.vocab_axis == -1 or logits.dim() != 3 else logits.transpose(1, 2)
        if moved.shape != (*targets.shape, self.vocab_size):
            raise LMTaskError(
                f"the model gives {tuple(logits.shape)} for targets {tuple(targets.shape)} and a "
                f"vocabulary of {self.vocab_size} on axis {self.vocab_axis}"
            )
        return full_precision(moved)


_FIELDS = (
    "vocab_size", "alignment", "ignore_id", "pad_id", "smoothing", "vocab_axis", "tokenizer",
    "version",
)  # fmt: skip


class _Read(NamedTuple):
    """A checked batch; every tensor (B, T), on the device it came on."""

    inputs: torch.Tensor
    targets: torch.Tensor
    mask: torch.Tensor | None
    valid: torch.Tensor
    tokens: int
    documents: torch.Tensor | None


class CausalLMObjective(Objective):
    """The cross-entropy over valid tokens as one term, ``"token_ce"``.

    Its denominator is the number of valid tokens, so accumulated microbatches of
    any token counts give the full batch's update. The logits of a large vocabulary
    are never kept (:func:`nnx.lm.linear_cross_entropy`) where the network offers
    its last hidden states. The task is component state: a resume with another one
    is refused.
    """

    def __init__(self, task: CausalLMTask, *, nonfinite: str = "fail") -> None:
        super().__init__(nonfinite=nonfinite)
        self.task = check.instance("CausalLMObjective", "task", task, CausalLMTask)

    def __call__(self, ctx: ObjectiveContext) -> ObjectiveResult:
        task, model = self.task, ctx.model
        read = task._read(ctx.batch)
        if not read.tokens:
            return ObjectiveResult(())
        head = _hidden_states(model)
        if head is None:
            logits = task._checked(_forward(model, read.inputs, read.documents), read.targets)
            rows, targets = _valid_rows(logits, read)
            total = F.cross_entropy(rows, targets, reduction="sum", label_smoothing=task.smoothing)
        else:
            device = model.device
            net: Any = model.net
            hidden = net.hidden(
                read.inputs.to(device, non_blocking=True), **_documents(read.documents, device)
            )
            rows, targets = _valid_rows(hidden, read)
            total = linear_cross_entropy(rows, head.weight, targets, smoothing=task.smoothing)
        return ObjectiveResult((LossTerm("token_ce", total, read.tokens),))

    def check_run(self, model: Any, *, optimizers: Any, callbacks: Sequence[Any]) -> None:
        """Refuse a network of another vocabulary."""
        size = getattr(model.net_params, "vocab_size", None)
        if size is not None and size != self.task.vocab_size:
            raise LMTaskError(
                f"the task has a vocabulary of {self.task.vocab_size} and the network one of "
                f"{size}; give both the same"
            )

    def component_spec(self) -> ComponentSpec:
        return ComponentSpec("lm.causal_task")

    def component_state(self) -> dict[str, Any]:
        return {"task": self.task.state()}

    def check_component_state(self, state: Mapping[str, Any], *, version: int) -> list[str]:
        saved, held = dict(state.get("task") or {}), self.task.state()
        return [
            f"{key} was {saved.get(key)!r} and is {held.get(key)!r} now"
            for key in dict.fromkeys((*saved, *held))
            if saved.get(key) != held.get(key)
        ]

    def load_component_state(self, state: Mapping[str, Any], *, version: int) -> None:
        """Nothing to take over: the tasks are the same."""


class CausalLMEval:
    """``eval_step_fn``: one record over all tokens of the validation loader.

    ``loss`` and ``metrics["nll"]`` are nats per valid token, ``perplexity`` is
    ``exp(nll)``, ``token_accuracy`` the share that argmax gets right, all
    unsmoothed. Without a valid token the record is empty.
    """

    def __init__(self, task: CausalLMTask) -> None:
        self.task = check.instance("CausalLMEval", "task", task, CausalLMTask)

    def __call__(self, ctx: Any) -> NNEvaluationDataPoint:
        model, task = ctx.model, self.task
        precision = inference_precision(model.params, model.device)
        nll, correct, count, batches = 0.0, 0, 0, 0
        for batch in ctx.val_loader:
            batches += 1
            read = task._read(batch)
            if not read.tokens:
                continue
            with torch.no_grad(), precision.autocast():
                logits = task._checked(_forward(model, read.inputs, read.documents), read.targets)
            targets, valid = (t.to(logits.device) for t in (read.targets, read.valid))
            _, batch_nll, right, tokens = task.token_sums(logits, targets, valid, with_ce=False)
            nll, correct, count = nll + batch_nll, correct + right, count + tokens
        if not batches:
            raise LMTaskError("the validation loader yielded no batches")
        if not count:
            return NNEvaluationDataPoint(kind="causal_lm", count=0, status="empty")
        metrics = {"nll": nll / count, "token_accuracy": correct / count}
        return self.after_merge(
            NNEvaluationDataPoint(
                loss=nll / count, kind="causal_lm", count=count, status="ok", metrics=metrics
            )
        )

    def after_merge(self, record: NNEvaluationDataPoint) -> NNEvaluationDataPoint:
        """``record`` with the perplexity of its loss; several processes' means are merged first."""
        found = perplexity(record.loss)
        if found is None:
            return record
        return dataclasses.replace(record, metrics={**record.metrics, "perplexity": found})


def causal_lm(config: Mapping[str, Any]) -> CausalLMObjective:
    """The factory of the objective ``"lm.causal"``; ``config`` is a task's state."""
    return CausalLMTask.from_state(config).objective()


def _hidden_states(model: Any) -> nn.Linear | None:
    """The output layer, where the loss may be computed from hidden states and its weight.

    A network offers that by ``hidden(tokens, documents=)`` and a plain ``lm_head``;
    hooks on the whole network (as FSDP's) want its own forward pass.
    """
    net = model.net
    head: Any = getattr(net, "lm_head", None)
    plain = type(head) is nn.Linear and getattr(head, "bias", None) is None
    if not plain or model.batch_adapter is not None:
        return None
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in (net, head))
    return head if hasattr(net, "hidden") and not hooked else None


def _forward(model: Any, inputs: torch.Tensor, documents: torch.Tensor | None) -> torch.Tensor:
    device = model.device
    raw = model.net(inputs.to(device, non_blocking=True), **_documents(documents, device))
    return adapter_for(model.net, model.batch_adapter).output(raw)


def _documents(documents: torch.Tensor | None, device: torch.device) -> dict[str, torch.Tensor]:
    return {} if documents is None else {"documents": documents.to(device, non_blocking=True)}


def _valid_rows(values: torch.Tensor, read: _Read) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of ``values`` (B, T, ...) with valid targets, and those targets."""
    flat, targets = values.flatten(0, 1), read.targets.flatten()
    if read.tokens < targets.numel():
        index = read.valid.flatten().nonzero().squeeze(1)
        flat = flat.index_select(0, index.to(flat.device, non_blocking=True))
        targets = targets[index]
    return flat, targets.to(flat.device, non_blocking=True)
