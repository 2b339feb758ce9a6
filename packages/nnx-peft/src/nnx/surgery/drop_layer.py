"""Removing a layer that does little."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

from nnx.surgery.sites import find
from torch import nn


def drop_layer(
    model: nn.Module,
    *,
    layer_name: str | list[str],
    importance: Callable[[nn.Module], float] | None = None,
) -> nn.Module:
    """A copy of ``model`` with one layer replaced by ``nn.Identity``.

    ``layer_name`` is a dotted name, or a list of candidates of which the one
    with the lowest ``importance(submodule)`` is dropped (the first of equals).
    A layer that changes shapes can be dropped; the model's forward pass then
    fails rather than computing something else.

    Raises ``KeyError`` for an unknown name and ``ValueError`` for an empty list,
    a list without ``importance``, or a single name with it.
    """
    if isinstance(layer_name, str):
        if importance is not None:
            raise ValueError("importance chooses among a list of names; a single name needs none")
        chosen = find(model, layer_name).path
    else:
        chosen = _least_important(model, list(layer_name), importance)
    thinner = copy.deepcopy(model)
    site = find(thinner, chosen)
    setattr(site.parent, site.name, nn.Identity().train(site.layer.training))
    return thinner


def _least_important(
    model: nn.Module, names: list[str], importance: Callable[[nn.Module], float] | None
) -> str:
    if not names:
        raise ValueError("layer_name is an empty list; name at least one candidate")
    if importance is None:
        raise ValueError("a list of candidates needs importance= to choose one")
    sites = [find(model, name) for name in names]
    scores = [float(importance(site.layer)) for site in sites]
    unknown = [site.path for site, score in zip(sites, scores) if math.isnan(score)]
    if unknown:
        raise ValueError(f"importance is NaN for {', '.join(map(repr, unknown))}")
    return sites[scores.index(min(scores))].path
