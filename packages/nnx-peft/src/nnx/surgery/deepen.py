"""Net2DeeperNet: one more layer, same function (Chen, Goodfellow, Shlens 2016, arXiv:1511.05641)."""

from __future__ import annotations

import copy
import dataclasses

import torch
from nnx.enums import Activations
from nnx.nets import FeedFwdNN
from nnx.surgery.sites import (
    Site,
    feed_forward_owner,
    find,
    is_elementwise,
    is_plain_sequential,
)
from torch import nn

# Modules that keep the size of the last dimension.
_SAME_WIDTH = (nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d)


def deepen(model: nn.Module, *, after_layer_name: str) -> nn.Module:
    """A copy of ``model`` with an identity Linear and a ReLU after the named layer.

    The named layer is an ``nn.ReLU`` in an ``nn.Sequential``, or a hidden
    Linear of ``FeedFwdNN.layers`` that a ReLU follows; a ReLU after an identity
    changes nothing that a ReLU has let through. A ``FeedFwdNN``'s params follow
    (hidden dims, activation and dropout overrides; the new layer has no
    dropout).

    Raises ``KeyError`` for an unknown name, ``TypeError`` when the layer is
    neither kind, ``ValueError`` when the activation there is not a ReLU or the
    width cannot be told.
    """
    site = find(model, after_layer_name)
    if isinstance(site.layer, nn.ReLU) and is_plain_sequential(site.parent):
        reference = _width_source(site)
        deeper = copy.deepcopy(model)
        _splice(find(deeper, after_layer_name), reference)
        return deeper
    owner = feed_forward_owner(model, site)
    if isinstance(site.layer, nn.Linear) and owner is not None:
        _require_relu(owner, site)
        deeper = copy.deepcopy(model)
        _insert(deeper, find(deeper, after_layer_name))
        return deeper
    raise TypeError(
        f"{after_layer_name!r} is a {type(site.layer).__name__} held by a "
        f"{type(site.parent).__name__}; name an nn.ReLU in an nn.Sequential or a hidden Linear of "
        "FeedFwdNN.layers"
    )


def identity_linear(like: nn.Linear) -> nn.Linear:
    """``y = x`` over ``like``'s outputs, with its dtype, device, mode and bias or none."""
    width, weight = like.out_features, like.weight
    bias = like.bias is not None
    with torch.device("meta"):  # allocate without drawing an initialization
        layer = nn.Linear(width, width, bias=bias)
    layer.weight = nn.Parameter(torch.eye(width, dtype=weight.dtype, device=weight.device))
    if bias:
        layer.bias = nn.Parameter(torch.zeros(width, dtype=weight.dtype, device=weight.device))
    return layer.train(like.training)


def _width_source(site: Site) -> nn.Linear:
    """The Linear whose outputs reach the ReLU."""
    children = list(site.parent._modules.values())
    for module in reversed(children[: site.position]):
        if isinstance(module, nn.Linear):
            return module
        if module is None or not (is_elementwise(module) or isinstance(module, _SAME_WIDTH)):
            break
    raise ValueError(
        f"the width at {site.path!r} cannot be told: no Linear precedes it in its Sequential "
        "through element-wise or normalizing modules"
    )


def _splice(site: Site, reference: nn.Linear) -> None:
    """Insert after ``site``; numbered names move up, other names are kept."""
    relu = site.layer
    assert isinstance(relu, nn.ReLU)
    added: list[nn.Module] = [
        identity_linear(reference).train(relu.training),
        nn.ReLU(relu.inplace).train(relu.training),
    ]
    parent, at = site.parent, site.position + 1
    names, children = list(parent._modules), list(parent._modules.values())
    numbered = names == [str(i) for i in range(len(names))]
    fresh = [_fresh(names, f"{site.name}_deeper"), _fresh(names, f"{site.name}_deeper_relu")]
    children[at:at] = added
    names[at:at] = fresh
    parent._modules.clear()
    for i, (name, child) in enumerate(zip(names, children)):
        parent._modules[str(i) if numbered else name] = child


def _fresh(names: list[str], name: str) -> str:
    while name in names:
        name += "_"
    return name


def _require_relu(owner: FeedFwdNN, site: Site) -> None:
    i = site.position
    if i + 1 == len(owner.layers):
        raise ValueError(f"{site.path!r} is the output layer: no ReLU follows it")
    activation = owner.params.activation_for(i)
    if activation is not Activations.RELU:
        raise ValueError(
            f"the activation after {site.path!r} is {activation.value}, and only a ReLU lets an "
            "identity layer through unchanged"
        )


def _insert(model: nn.Module, site: Site) -> None:
    owner = feed_forward_owner(model, site)
    assert owner is not None
    assert isinstance(site.layer, nn.Linear)
    at = site.position + 1
    owner.layers.insert(at, identity_linear(site.layer))
    params = owner.params
    hidden = list(params.hidden_dims or ())
    count = len(hidden)
    hidden.insert(at, site.layer.out_features)
    activations = params.activations
    if activations is not None or params.activation is not Activations.RELU:
        activations = [params.activation_for(i) for i in range(count)]
        activations.insert(at, Activations.RELU)
    dropouts = params.dropout_probs
    if dropouts is not None or params.dropout_prob:
        dropouts = [params.dropout_for(i) for i in range(count)]
        dropouts.insert(at, 0.0)
    owner.params = dataclasses.replace(
        params, hidden_dims=hidden, activations=activations, dropout_probs=dropouts
    )
