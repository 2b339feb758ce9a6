"""Where surgery may cut: finding a layer and checking what surrounds it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from nnx.nets import FeedFwdNN
from nnx.utils.modules import closest, module_paths, require_module
from torch import nn

# Modules that act on each element alone, so a copied unit stays a copy.
_ELEMENTWISE: tuple[type[nn.Module], ...] = (
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU,
    nn.Mish, nn.Softplus, nn.Softsign, nn.Tanh, nn.Tanhshrink, nn.Sigmoid, nn.LogSigmoid,
    nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Hardshrink, nn.Softshrink, nn.Threshold,
    nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout,
)  # fmt: skip


@dataclass(frozen=True)
class Site:
    """A layer, the module that holds it, and the name it is held under."""

    path: str
    parent: nn.Module
    name: str
    layer: nn.Module

    @property
    def position(self) -> int:
        """The layer's place among its parent's children."""
        return list(self.parent._modules).index(self.name)


def find(model: nn.Module, path: str) -> Site:
    """The site of ``path`` (dotted, as in ``named_modules()``); ``KeyError`` when absent."""
    modules = dict(module_paths(require_module("surgery", model)))
    if not isinstance(path, str) or not path or path not in modules:
        near = closest(path, [name for name in modules if name]) if isinstance(path, str) else ()
        raise KeyError(
            f"{path!r} is not a submodule of {type(model).__name__}; see model.named_modules(); "
            f"the closest are {', '.join(map(repr, near))}"
        )
    parent, _, name = path.rpartition(".")
    return Site(path, modules[parent], name, modules[path])


def is_elementwise(module: nn.Module) -> bool:
    """Exact types only: a subclass may compute anything."""
    if type(module) is nn.PReLU:
        return module.num_parameters == 1
    return type(module) in _ELEMENTWISE


def is_plain_sequential(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def feed_forward_owner(model: nn.Module, site: Site) -> FeedFwdNN | None:
    """The built-in feed-forward net whose ``layers`` hold the site, if one does."""
    owner_path, _, name = site.path.removesuffix(f".{site.name}").rpartition(".")
    owner = model.get_submodule(owner_path)
    if not isinstance(owner, FeedFwdNN) or type(owner).forward is not FeedFwdNN.forward:
        return None
    return owner if name == "layers" and owner.layers is site.parent else None


def require_plain(layer: nn.Linear, path: str) -> None:
    """Refuse a weight that is no plain tensor of floats (a quantized one)."""
    weight = layer.weight
    plain = type(weight) in (nn.Parameter, torch.Tensor) and weight.layout is torch.strided
    if not plain or not weight.is_floating_point():
        raise ValueError(
            f"the weight of {path!r} is a {type(weight).__name__}, not a plain tensor of floats; "
            "change the shape before you quantize"
        )


def require_unshared(model: nn.Module, layer: nn.Linear, path: str) -> None:
    """Refuse a Linear that is registered, or whose tensors are held, somewhere else too."""
    paths = [n for n, m in module_paths(model) if m is layer]
    if len(paths) > 1:
        raise ValueError(
            f"{path!r} is one module under {' and '.join(map(repr, paths))}; resizing it would "
            "change every place that calls it. Give each place its own layer"
        )
    if "weight" not in layer._parameters:
        raise ValueError(
            f"the weight of {path!r} is computed (pruned or parametrized); make it a plain "
            "parameter first"
        )
    require_plain(layer, path)
    own = {id(p) for p in layer._parameters.values() if p is not None}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if module is not layer and id(parameter) in own:
                raise ValueError(
                    f"{path!r} shares a tensor with '{name}.{key}'; resizing it would leave the "
                    "other one behind. Untie them first"
                )
