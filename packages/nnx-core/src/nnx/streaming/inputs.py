"""The inputs of a streaming update, checked as a whole before any of it is counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nnx.monitors.views import BatchViews, Views
from nnx.tasks.decoding import as_rows
from nnx.tasks.semantics import BERNOULLI, CATEGORICAL, CONTINUOUS, Semantics

ARGUMENTS = {"probabilities": "probabilities", "labels": "labels", "continuous": "values"}


def logit_views(
    semantics: Semantics, target: Any, logits: Any, valid: Any, num_outputs: int | None
) -> Views:
    """The views of raw outputs and the targets that fit them."""
    output, actual = torch.as_tensor(logits).detach(), torch.as_tensor(target)
    if not output.is_floating_point():
        raise ValueError(f"logits must be floating, not {output.dtype}")
    if semantics.kind == CATEGORICAL and output.ndim < 2:
        raise ValueError(f"categorical logits must be (N, C, ...), not {tuple(output.shape)}")
    if (
        semantics.kind != CATEGORICAL
        and actual.shape == output.shape[:1]
        and output[:1].numel() == 1
    ):
        actual = actual.reshape(output.shape)  # (N,) targets of (N, 1) outputs
    soft = semantics.has_shares(actual, output)
    expected = output.shape if soft else _target_shape(semantics, output)
    if actual.shape != expected:
        raise ValueError(
            f"targets of shape {tuple(actual.shape)} do not fit {semantics.kind} logits of shape "
            f"{tuple(output.shape)}"
        )
    width = output.shape[1] if output.ndim > 1 else 1
    _check_width(width, num_outputs, rows=len(output))
    actual, mask = _targets(semantics, actual, valid, soft=soft, classes=width)
    views = Views(semantics, output, actual, mask)
    views.outputs = width
    return views


def given_views(
    semantics: Semantics,
    target: Any,
    given: Mapping[str, Any],
    valid: Any,
    num_outputs: int | None,
) -> BatchViews:
    """The views that the caller supplied, flattened to samples.

    ``given`` has the metric inputs by name. Labels that are not given are decided
    from the probabilities.
    """
    views, actual = BatchViews(), torch.as_tensor(target)
    views.semantics = semantics
    if not actual.numel():
        actual = actual.long() if semantics.kind == CATEGORICAL else actual
    tensors = {name: torch.as_tensor(v) for name, v in given.items() if v is not None}
    table = tensors.get("probabilities")
    if semantics.kind == CATEGORICAL and table is not None:
        _check_table(table, actual)
    shares = semantics.kind == CATEGORICAL and _are_shares(actual, tensors)
    axes = actual.shape[:1] + actual.shape[2:] if shares else actual.shape
    for name, tensor in tensors.items():
        whole = name == "probabilities" and semantics.kind == CATEGORICAL
        if (tensor.shape[:1] + tensor.shape[2:] if whole else tensor.shape) != axes:
            raise ValueError(
                f"{ARGUMENTS[name]} of shape {tuple(tensor.shape)} do not fit targets of shape "
                f"{tuple(actual.shape)}"
            )
    views.outputs = _outputs(semantics, actual, table, shares)
    _check_width(views.outputs, num_outputs, rows=len(actual) if actual.ndim else 0)
    classes = views.outputs or num_outputs
    views.width = 2 if semantics.kind == BERNOULLI else (classes or 0)
    hard, mask = _targets(semantics, actual, valid, soft=shares, classes=classes)
    views.valid = mask.reshape(-1)
    if shares:
        views.shares, hard = as_rows(hard), semantics.harden(hard)
    views.target = hard.reshape(-1)
    for name, tensor in tensors.items():
        whole = name == "probabilities" and semantics.kind == CATEGORICAL
        setattr(views, name, as_rows(tensor) if whole else tensor.reshape(-1))
    if "labels" in tensors:
        views.labels = _classes(semantics, views.labels, views.valid, classes, "labels")
    elif table is not None:
        views.labels = _likeliest(semantics, views.probabilities)
    return views


def _target_shape(semantics: Semantics, output: torch.Tensor) -> torch.Size:
    """Of targets that are no class probabilities."""
    return output.shape[:1] + output.shape[2:] if semantics.kind == CATEGORICAL else output.shape


def _are_shares(actual: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether targets given beside these views are class probabilities."""
    table, labels = tensors.get("probabilities"), tensors.get("labels")
    if not actual.is_floating_point():
        return False
    if table is not None:
        return actual.shape == table.shape
    return labels is not None and actual.ndim == labels.ndim + 1


def _check_table(table: torch.Tensor, actual: torch.Tensor) -> None:
    if table.ndim < 2 or actual.shape not in (table.shape, table.shape[:1] + table.shape[2:]):
        raise ValueError(
            f"categorical probabilities must be (N, C, ...), not {tuple(table.shape)} for "
            f"targets of shape {tuple(actual.shape)}"
        )


def _outputs(
    semantics: Semantics, actual: torch.Tensor, table: torch.Tensor | None, shares: bool
) -> int | None:
    """How many classes or outputs the batch has; ``None`` where it does not say."""
    if semantics.kind != CATEGORICAL:
        return actual.shape[1] if actual.ndim > 1 else 1
    if table is not None:
        return table.shape[1]
    return actual.shape[1] if shares else None


def _check_width(width: int | None, declared: int | None, *, rows: int) -> None:
    if rows and None not in (width, declared) and width != declared:
        raise ValueError(f"the outputs are {width} wide; {declared} were declared or seen before")


def _targets(
    semantics: Semantics, actual: torch.Tensor, valid: Any, *, soft: bool, classes: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Checked targets with 0 where they are masked, and the mask, which has no class axis."""
    if soft:
        mask = ~torch.isnan(actual).any(1)
    elif actual.is_floating_point():
        mask = ~torch.isnan(actual)
    else:
        mask = torch.ones_like(actual, dtype=torch.bool)
    if semantics.ignored is not None and not soft:
        mask = mask & (actual != semantics.ignored)
    if valid is not None:
        given = torch.as_tensor(valid)
        if given.dtype != torch.bool or given.shape != mask.shape:
            raise ValueError(
                f"valid must be a boolean mask of shape {tuple(mask.shape)}, not {given.dtype} of "
                f"{tuple(given.shape)}"
            )
        mask = mask & given.to(mask.device)
    actual = torch.where(mask.unsqueeze(1) if soft else mask, actual, 0)
    if soft:
        _refuse((actual < 0).any(1) & mask, actual, "class probabilities, at least 0")
        return actual, mask
    if semantics.kind == BERNOULLI:
        _refuse(~((actual >= 0) & (actual <= 1)) & mask, actual, "0 or 1, or soft between them")
    elif semantics.kind != CONTINUOUS:
        actual = _classes(semantics, actual, mask, classes, "targets")
    return actual, mask


def _classes(
    semantics: Semantics,
    values: torch.Tensor,
    valid: torch.Tensor,
    classes: int | None,
    what: str,
) -> torch.Tensor:
    """Class indices, or 0/1 decisions, as integers; those that are masked become 0."""
    values = torch.where(valid, values, 0)
    whole = values.long()
    limit = 2 if semantics.kind == BERNOULLI else classes
    wrong = (whole != values) | (whole < 0)
    if limit is not None:
        wrong = wrong | (whole >= limit)
    domain = f"class indices in [0, {limit})" if limit else "class indices"
    _refuse(
        wrong & valid,
        values,
        "0 or 1" if limit == 2 and semantics.kind == BERNOULLI else domain,
        what,
    )
    return whole


def _refuse(wrong: torch.Tensor, values: torch.Tensor, domain: str, what: str = "targets") -> None:
    if bool(wrong.any()):
        values = values if values.shape == wrong.shape else values.movedim(1, -1).min(-1).values
        raise ValueError(f"{what} must be {domain}; found {values[wrong][0].item()}")


def _likeliest(semantics: Semantics, probabilities: torch.Tensor) -> torch.Tensor:
    if semantics.kind == BERNOULLI:
        return (probabilities >= semantics.threshold).long()
    return semantics.decide(probabilities)
