"""Net2WiderNet: more units, same function (Chen, Goodfellow, Shlens 2016, arXiv:1511.05641)."""

from __future__ import annotations

import copy
import dataclasses

import torch
from nnx.enums import Activations
from nnx.surgery.sites import (
    Site,
    feed_forward_owner,
    find,
    is_elementwise,
    is_plain_sequential,
    require_unshared,
)
from nnx.utils import validation as check
from torch import nn


def widen(
    model: nn.Module, *, layer_name: str, new_width: int, rng_seed: int | None = 0
) -> nn.Module:
    """A copy of ``model`` whose Linear ``layer_name`` has ``new_width`` outputs.

    Each new unit copies a randomly chosen old one, and the next Linear divides
    the weights of copies by their number, so the output stays the same within
    rounding (``atol=1e-5`` in FP32). The next Linear is looked for only inside
    an ``nn.Sequential`` or ``FeedFwdNN.layers``, through element-wise
    operations. A ``FeedFwdNN``'s params follow.

    ``rng_seed`` chooses the copied units; ``None`` takes fresh entropy. The
    global RNG is neither read nor advanced. ``requires_grad`` flags and modes
    are kept.

    Raises ``KeyError`` for an unknown name, ``TypeError`` when it is no Linear,
    ``ValueError`` when the width does not grow, nothing consumes the layer, or
    what lies between mixes units.
    """
    site = find(model, layer_name)
    if not isinstance(site.layer, nn.Linear):
        raise TypeError(f"{layer_name!r} is a {type(site.layer).__name__}, not a Linear")
    width = site.layer.out_features
    new_width = check.count("widen", "new_width", new_width, at_least=width + 1)
    consumer_name = _consumer(model, site)
    for path in (layer_name, consumer_name):
        require_unshared(model, find(model, path).layer, path)  # type: ignore[arg-type]

    source = _copied_units(width, new_width, rng_seed)
    widened = copy.deepcopy(model)
    _grow(widened, layer_name, consumer_name, source)
    return widened


def _copied_units(width: int, new_width: int, rng_seed: int | None) -> torch.Tensor:
    """For each unit of the wider layer, the old unit it copies: shape (new_width,)."""
    generator = torch.Generator()
    if rng_seed is None:
        generator.seed()
    else:
        generator.manual_seed(rng_seed)
    extra = torch.randint(width, (new_width - width,), generator=generator)
    return torch.cat([torch.arange(width), extra])


@torch.no_grad()
def _grow(model: nn.Module, layer_name: str, consumer_name: str, source: torch.Tensor) -> None:
    layer, consumer = model.get_submodule(layer_name), model.get_submodule(consumer_name)
    assert isinstance(layer, nn.Linear)
    assert isinstance(consumer, nn.Linear)
    width = layer.out_features
    source = source.to(layer.weight.device)
    copies = torch.bincount(source, minlength=width)
    _replace(layer, "weight", layer.weight[source])
    if layer.bias is not None:
        _replace(layer, "bias", layer.bias[source])
    layer.out_features = len(source)
    source, copies = source.to(consumer.weight.device), copies.to(consumer.weight.device)
    _replace(consumer, "weight", consumer.weight[:, source] / copies[source])
    consumer.in_features = len(source)

    site = find(model, layer_name)
    owner = feed_forward_owner(model, site)
    if owner is not None:
        hidden = list(owner.params.hidden_dims or ())
        hidden[site.position] = len(source)
        owner.params = dataclasses.replace(owner.params, hidden_dims=hidden)


def _replace(module: nn.Module, name: str, value: torch.Tensor) -> None:
    old = module.get_parameter(name)
    new = nn.Parameter(value.to(old.dtype).contiguous(), requires_grad=old.requires_grad)
    setattr(module, name, new)


def _consumer(model: nn.Module, site: Site) -> str:
    """The path of the Linear that alone reads the site's units."""
    prefix = site.path.removesuffix(site.name)
    owner = feed_forward_owner(model, site)
    if owner is not None:
        i = site.position
        if i + 1 == len(owner.layers):
            raise ValueError(f"{site.path!r} is the output layer: no Linear follows it")
        if owner.params.activation_for(i) is Activations.SOFTMAX:
            raise ValueError(
                f"the softmax after {site.path!r} mixes units, so copying one changes the others"
            )
        following = owner.layers[i + 1]
        if not isinstance(following, nn.Linear):
            raise ValueError(
                f"{site.path!r} is followed by a {type(following).__name__}, not a Linear"
            )
        return f"{prefix}{i + 1}"
    if not is_plain_sequential(site.parent):
        raise ValueError(
            f"{site.path!r} is held by a {type(site.parent).__name__}; what reads its units can "
            "only be told inside an nn.Sequential or FeedFwdNN.layers"
        )
    names = list(site.parent._modules)
    for name in names[site.position + 1 :]:
        module = site.parent._modules[name]
        if isinstance(module, nn.Linear):
            return prefix + name
        if module is None or not is_elementwise(module):
            raise ValueError(
                f"{prefix + name!r} ({type(module).__name__}) between {site.path!r} and the next "
                "Linear is not element-wise, so copying a unit would change the others"
            )
    raise ValueError(f"no Linear follows {site.path!r} in its Sequential")
