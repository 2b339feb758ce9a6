"""The inputs of a streaming update, checked and flattened to samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from nnx.tasks.semantics import Semantics

ARGUMENTS = {"probabilities": "probabilities", "labels": "labels", "continuous": "values"}


class GivenViews:
    """A batch whose views the caller supplied, flattened to samples."""

    labels: torch.Tensor
    probabilities: torch.Tensor
    continuous: torch.Tensor

    def __init__(
        self,
        semantics: Semantics,
        target: Any,
        given: Mapping[str, Any],
        valid: Any,
        num_outputs: int | None,
    ) -> None:
        actual = torch.as_tensor(target)
        table = given["probabilities"]
        categorical = semantics.kind == "categorical"
        if categorical and actual.ndim == 1 and not actual.numel():
            actual = actual.long()  # an empty list has no dtype of its own
        soft = categorical and actual.is_floating_point()
        if soft and (table is None or actual.shape != np.shape(table) or actual.ndim != 2):
            raise ValueError(
                "categorical targets must be class indices, or (N, C) class probabilities given "
                f"with (N, C) probabilities; got {actual.dtype} of {tuple(actual.shape)}"
            )
        if soft and given["labels"] is not None:
            raise ValueError("class-probability targets have no labels to compare labels= with")
        mask = target_mask(actual, valid, semantics)
        if soft:
            self.target = torch.where(mask.unsqueeze(1), actual, 0)
        else:
            self.target = torch.where(mask, actual, 0).reshape(-1)
        self.valid = mask.reshape(-1)
        for reads, view in given.items():
            if view is None:
                continue
            tensor = torch.as_tensor(view)
            if reads == "probabilities" and categorical:
                tensor = self._rows(tensor, actual, soft, num_outputs)
            elif tensor.shape != actual.shape:
                raise ValueError(
                    f"{ARGUMENTS[reads]} of shape {tuple(tensor.shape)} do not fit targets of "
                    f"shape {tuple(actual.shape)}"
                )
            else:
                tensor = tensor.reshape(-1)
            setattr(self, reads, tensor)
        width = num_outputs or 0
        if categorical and table is not None:
            width = self.probabilities.shape[1]
        if (categorical and not soft and width) or semantics.kind == "bernoulli":
            check_range(semantics, self.target, self.valid, width)

    def _rows(
        self, table: torch.Tensor, actual: torch.Tensor, soft: bool, num_outputs: int | None
    ) -> torch.Tensor:
        expected = (
            actual.shape if soft else (*actual.shape[:1], *table.shape[1:2], *actual.shape[1:])
        )
        if table.ndim < 2 or tuple(table.shape) != tuple(expected):
            raise ValueError(
                f"categorical probabilities must be (N, C, ...), not {tuple(table.shape)} for "
                f"targets of shape {tuple(actual.shape)}"
            )
        check_width(table.shape[1], num_outputs)
        return table.movedim(1, -1).reshape(-1, table.shape[1])


def target_mask(target: torch.Tensor, valid: Any, semantics: Semantics) -> torch.Tensor:
    """Which entries count: not masked by the caller, not NaN, not the ignored class."""
    mask = torch.ones_like(target, dtype=torch.bool)
    if target.is_floating_point():
        mask = ~torch.isnan(target)
        if semantics.kind == "categorical" and target.ndim == 2:
            mask = mask.all(1)
    elif semantics.ignored is not None:
        mask = target != semantics.ignored
    if valid is None:
        return mask
    given = torch.as_tensor(valid)
    if given.dtype != torch.bool or given.shape != mask.shape:
        raise ValueError(
            f"valid must be a boolean mask of shape {tuple(mask.shape)}, not {given.dtype} of "
            f"{tuple(given.shape)}"
        )
    return mask & given.to(mask.device)


def check_width(width: int, declared: int | None) -> None:
    if declared is not None and width != declared:
        raise ValueError(f"the outputs are {width} wide; {declared} were declared or seen before")


def check_range(
    semantics: Semantics, target: torch.Tensor, valid: torch.Tensor | None, width: int
) -> None:
    """Refuse class indices that are no class, and bernoulli targets that are not 0 or 1."""
    if semantics.kind == "categorical":
        wrong = (target < 0) | (target >= width)
        domain = f"class indices in [0, {width})"
    elif semantics.kind == "bernoulli":
        wrong = (target != 0) & (target != 1)
        domain = "0 or 1"
    else:
        return
    if valid is not None:
        wrong = wrong & valid
    if bool(wrong.any()):
        raise ValueError(f"targets must be {domain}; found {target[wrong][0].item()}")
