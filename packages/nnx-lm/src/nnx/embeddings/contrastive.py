"""Training a text embedder on pairs that belong together."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from nnx.embeddings.encoding import device_of, encode
from nnx.objectives.contrastive import nt_xent
from nnx.records import NNEvaluationDataPoint
from nnx.utils import validation as check
from nnx.utils.modes import restored_modes
from torch.utils.data import DataLoader, Dataset

if TYPE_CHECKING:
    from nnx.engine.contexts import TrainStepContext, TrainStepFn


class ContrastiveTextDataset(Dataset[tuple[str, str]]):
    """``(anchor, positive)`` pairs of strings; load them with :func:`pair_collate`.

    Raises ``ValueError`` for no pairs and for an entry that is no pair of strings.
    """

    def __init__(self, pairs: list[tuple[str, str]]) -> None:
        checked = []
        for i, pair in enumerate(pairs):
            entry: Any = pair
            is_pair = isinstance(entry, (tuple, list)) and len(entry) == 2
            if not is_pair or not all(isinstance(text, str) for text in entry):
                raise ValueError(
                    f"ContrastiveTextDataset: entry {i} is {check.show(entry)}, not a pair of "
                    "strings (anchor, positive)"
                )
            checked.append((entry[0], entry[1]))
        if not checked:
            raise ValueError("ContrastiveTextDataset needs at least one (anchor, positive) pair")
        self.pairs = checked

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[str, str]:
        return self.pairs[index]


def pair_collate(batch: Iterable[tuple[str, str]]) -> tuple[list[str], list[str]]:
    """``(anchors, positives)`` of some pairs."""
    anchors, positives = zip(*batch)
    return list(anchors), list(positives)


def text_contrastive_train_step_factory(*, temperature: float = 0.5) -> TrainStepFn:
    """A ``train_step_fn`` over ``(anchors, positives)`` batches, lists of strings.

    ``model.net`` is the backbone. The loss is NT-Xent at ``temperature`` > 0; a batch
    has at least 2 pairs.
    """
    owner = "text_contrastive_train_step_factory"
    heat = check.real(owner, "temperature", temperature, above=0)

    def step(ctx: TrainStepContext) -> NNEvaluationDataPoint:
        from nnx.engine.finalize import finalize_step

        net = ctx.model.net
        net.train()
        ctx.optimizer.zero_grad(set_to_none=True)
        anchors, positives = _pair_batch(ctx.batch)
        first, second = (encode(net, texts, ctx.model.device) for texts in (anchors, positives))
        return NNEvaluationDataPoint(loss=finalize_step(ctx, nt_xent(first, second, heat)))

    return step


def train_contrastive(
    backbone: Any,
    dataset: ContrastiveTextDataset | list[tuple[str, str]],
    *,
    n_epochs: int = 3,
    batch_size: int = 16,
    lr: float = 2e-5,
    temperature: float = 0.05,
    device: str | torch.device | None = None,
    shuffle: bool = True,
    grad_clip_norm: float | None = 1.0,
    weight_decay: float = 0.0,
    optimizer_cls: type = torch.optim.AdamW,
    verbose: bool = False,
) -> Any:
    """Train ``backbone`` in place on pairs by NT-Xent, and return it.

    For a run on disk, callbacks and schedules, use
    :func:`text_contrastive_train_step_factory` with ``NNModel.train``.

    Frozen parameters stay out of the optimizer. ``device`` moves the backbone.
    ``shuffle`` draws from the global torch stream. A last batch of a single pair is
    left out, since it has nothing to be told from. Modes are restored.

    Raises ``ValueError`` for fewer than 2 pairs, ``batch_size`` below 2 and numbers
    out of range, before anything changes, and ``FloatingPointError`` before the step
    of a loss that is not finite.
    """
    owner = "train_contrastive"
    pairs = (
        dataset if isinstance(dataset, ContrastiveTextDataset) else ContrastiveTextDataset(dataset)
    )
    if len(pairs) < 2:
        raise ValueError("train_contrastive needs at least 2 pairs: NT-Xent compares them")
    epochs = check.count(owner, "n_epochs", n_epochs)
    size = check.count(owner, "batch_size", batch_size, at_least=2)
    check.real(owner, "lr", lr, above=0)
    check.real(owner, "temperature", temperature, above=0)
    check.real(owner, "weight_decay", weight_decay, at_least=0)
    if grad_clip_norm is not None:
        check.real(owner, "grad_clip_norm", grad_clip_norm, above=0)
    trained = [p for p in backbone.parameters() if p.requires_grad]
    if not trained:
        raise ValueError("train_contrastive: every parameter of the backbone is frozen")
    if device is not None:
        backbone.to(device)
    where = device_of(backbone)
    optimizer = optimizer_cls(trained, lr=lr, weight_decay=weight_decay)
    loader = DataLoader(
        pairs, batch_size=size, shuffle=shuffle, collate_fn=pair_collate,
        drop_last=len(pairs) % size == 1,
    )  # fmt: skip
    with restored_modes(backbone):
        backbone.train()
        for epoch in range(epochs):
            losses = [
                _update(backbone, batch, optimizer, trained, where, temperature, grad_clip_norm)
                for batch in loader
            ]
            if verbose:
                print(f"epoch {epoch + 1}/{epochs}: loss {sum(losses) / len(losses):.4f}")
    return backbone


def _update(
    backbone: Any,
    batch: tuple[list[str], list[str]],
    optimizer: torch.optim.Optimizer,
    trained: list[torch.nn.Parameter],
    device: torch.device,
    temperature: float,
    clip: float | None,
) -> float:
    optimizer.zero_grad(set_to_none=True)
    first, second = (encode(backbone, texts, device) for texts in batch)
    loss = nt_xent(first, second, temperature)
    value = loss.item()
    if not math.isfinite(value):
        raise FloatingPointError(
            f"the contrastive loss is {value}; nothing was stepped. Lower lr, raise temperature, "
            "or look for texts whose embedding is not finite"
        )
    loss.backward()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(trained, clip)
    optimizer.step()
    return value


def _pair_batch(batch: Any) -> tuple[list[str], list[str]]:
    parts = list(batch) if isinstance(batch, (tuple, list)) else []
    if len(parts) != 2 or len(parts[0]) != len(parts[1]):
        raise ValueError(
            "text contrastive training reads batches (anchors, positives), two lists of strings "
            "of one length; give the loader collate_fn=nnx.embeddings.pair_collate"
        )
    return list(parts[0]), list(parts[1])
