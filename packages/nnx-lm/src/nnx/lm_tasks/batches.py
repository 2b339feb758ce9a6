"""A batch of a language model as it lies, made inputs and targets of one shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from nnx.errors import NNxError

_IDS = ("input_ids", "tokens", "inputs")
_TARGETS = ("targets", "labels")


class LMTaskError(ValueError, NNxError):
    """A batch or a model that the task cannot take."""


def aligned(
    batch: Any, alignment: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Inputs, targets, loss mask and documents of a batch, each (B, T); the mask covers the targets."""
    inputs, targets, mask, attention, documents = _layout(alignment, batch)
    for name, ids in (("token ids", inputs), ("targets", targets)):
        if ids is None:
            continue
        if not isinstance(ids, torch.Tensor) or ids.is_floating_point() or ids.dim() != 2:
            raise LMTaskError(
                f"{name} must be integers of shape (batch, tokens), not {_shape(ids)}"
            )
    inputs = inputs.long()
    attention = _mask("attention_mask", attention, (inputs.shape,))
    if attention is not None:
        _refuse_left_padding(attention)
    if alignment == "shift_inputs":
        if inputs.shape[1] < 2:
            raise LMTaskError(
                f"a row of {inputs.shape[1]} token has no next token; rows need at least 2"
            )
        whole, inputs, targets = inputs.shape, inputs[:, :-1], inputs[:, 1:]
        mask = _mask("loss_mask", mask, (targets.shape, whole))
        mask = mask[:, 1:] if mask is not None and mask.shape == whole else mask
        if attention is not None:
            mask = attention[:, 1:] if mask is None else mask & attention[:, 1:]
        if documents is not None:
            same = documents[:, 1:] == documents[:, :-1]
            mask, documents = same if mask is None else mask & same, documents[:, :-1]
    else:
        if targets.shape != inputs.shape:
            raise LMTaskError(
                f"inputs {tuple(inputs.shape)} and targets {tuple(targets.shape)} must be "
                "aligned: the target of a token is the one that follows it"
            )
        targets = targets.long()
        mask = _mask("loss_mask", mask, (targets.shape,))
        if attention is not None:
            mask = attention if mask is None else mask & attention
    return inputs, targets, mask, documents


def _layout(alignment: str, batch: Any) -> tuple[Any, Any, Any, Any, Any]:
    """inputs, targets, loss mask, attention mask and documents as they lie in the batch."""
    shifted = alignment == "pre_shifted"
    if isinstance(batch, Mapping):
        inputs = next((batch[key] for key in _IDS if key in batch), None)
        targets = next((batch[key] for key in _TARGETS if key in batch), None)
        if inputs is None or (shifted and targets is None):
            lacks = "input_ids" if inputs is None else "targets"
            raise LMTaskError(f"the batch has no {lacks}: it holds {sorted(map(str, batch))}")
        rest = (batch.get(k) for k in ("loss_mask", "attention_mask", "documents"))
        return inputs, targets if shifted else None, *rest
    parts = batch if isinstance(batch, (tuple, list)) else (batch,)
    wanted = (2, 3) if shifted else (1, 2)
    if len(parts) not in wanted:
        raise LMTaskError(
            f"alignment={alignment!r} reads "
            + ("(inputs, targets) or (inputs, targets, loss_mask)" if shifted else
               "token ids or (ids, loss_mask)")
            + f", not {len(parts)} part(s)"
            + ("; aligned (inputs, targets) are alignment='pre_shifted'" * (not shifted))
        )  # fmt: skip
    if shifted:
        return parts[0], parts[1], parts[2] if len(parts) == 3 else None, None, None
    mask = parts[1] if len(parts) == 2 else None
    if isinstance(mask, torch.Tensor) and mask.dtype != torch.bool and (mask > 1).any():
        raise LMTaskError(
            "the second part of a batch is a loss mask of 0 and 1 with alignment="
            "'shift_inputs'; aligned (inputs, targets) are alignment='pre_shifted'"
        )
    return parts[0], None, mask, None, None


def _mask(name: str, mask: Any, shapes: Sequence[torch.Size]) -> torch.Tensor | None:
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor) or mask.shape not in shapes:
        raise LMTaskError(f"{name} must be {tuple(shapes[0])}, one per token, not {_shape(mask)}")
    if mask.dtype != torch.bool and not ((mask == 0) | (mask == 1)).all():
        raise LMTaskError(f"{name} must hold 0 and 1 alone")
    return mask.bool()


def _refuse_left_padding(attention: torch.Tensor) -> None:
    late = attention[:, 1:] & ~attention[:, :-1]
    if late.any():
        row = int(late.any(dim=1).nonzero()[0])
        raise LMTaskError(
            f"row {row} of the batch has padding before a real token; the model reads no "
            "attention mask, so pad on the right"
        )


def _shape(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return type(value).__name__
