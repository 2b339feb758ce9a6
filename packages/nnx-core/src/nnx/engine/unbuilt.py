"""What a stored configuration would build, told before anything of it is allocated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from nnx.enums import Nets
from nnx.errors import NNxError
from nnx.models import state_topology
from nnx.params import NNParams
from nnx.seeding import isolated_rng

# A recorded recipe may have made a net this much smaller (factors instead of matrices).
_SHRINKING = 64
_LEAST = 1 << 22
_COUNTS = ("n_layers", "num_experts")


class UnfitConfigurationError(ValueError, NNxError):
    """A configuration that does not describe the weights beside it."""


def check_describes(
    net: Nets,
    net_params: NNParams,
    shapes: Mapping[str, Sequence[int]],
    *,
    has_transforms: bool = False,
) -> None:
    """Refuse net params whose net would not have the weights ``shapes``; builds no tensor.

    With recorded transforms the base net differs from the weights; then only its size is
    bounded, by 64 times theirs (4 million numbers at least).
    """
    _check_counts(net_params, len(shapes))
    with isolated_rng(), torch.device("meta"):
        built = state_topology(net(params=net_params))
    if has_transforms:
        stored = sum(_numel(shape) for shape in shapes.values())
        wanted = sum(_numel(shape) for shape in built.values() if shape is not None)
        if wanted > max(_SHRINKING * stored, _LEAST):
            raise UnfitConfigurationError(
                f"the configuration describes a net of {wanted:,} numbers, the weights are {stored:,}"
            )
        return
    wrong = [
        f"{name} would be {list(shape or ())}, the weights have {list(shapes[name])}"
        if name in shapes
        else f"{name} has no weights"
        for name, shape in built.items()
        if name not in shapes or (shape is not None and tuple(shapes[name]) != shape)
    ]
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise UnfitConfigurationError(
            f"the configuration of {net.value} does not describe the weights: "
            f"{'; '.join(wrong[:3])}{more}"
        )


def count_parameters(net: Nets, net_params: NNParams) -> int:
    """How many numbers a built-in net would have; builds no tensor."""
    with isolated_rng(), torch.device("meta"):
        built = net(params=net_params)
        return sum(p.numel() for p in built.parameters())


def _check_counts(net_params: NNParams, tensors: int) -> None:
    """A net has more tensors than layers; this many objects are not even begun."""
    for name in _COUNTS:
        count = getattr(net_params, name, None)
        if isinstance(count, int) and count > tensors:
            raise UnfitConfigurationError(
                f"the configuration asks for {name}={count}, and there are {tensors} weights"
            )
    hidden = getattr(net_params, "hidden_dims", None) or ()
    if len(hidden) > tensors:
        raise UnfitConfigurationError(
            f"the configuration asks for {len(hidden)} layers, and there are {tensors} weights"
        )


def _numel(shape: Sequence[int]) -> int:
    total = 1
    for extent in shape:
        total *= extent
    return total


_given: ContextVar[bool] = ContextVar("weights are given away", default=False)


@contextlib.contextmanager
def giving_weights() -> Iterator[None]:
    """Within the block, whoever rebuilds a model passes on weights that nobody else holds."""
    token = _given.set(True)
    try:
        yield
    finally:
        _given.reset(token)


def load_weights(net: nn.Module, weights: Mapping[str, Any]) -> None:
    """Load all of ``weights``; those that are given away become the net's own, uncopied."""
    held = dict(net.state_dict(keep_vars=True))
    parameters = [p for p in held.values() if isinstance(p, torch.Tensor)]
    fits = len({id(p) for p in parameters}) == len(held) and all(
        isinstance(weights.get(name), torch.Tensor)
        and weights[name].dtype == value.dtype
        and weights[name].device == value.device
        for name, value in held.items()
    )
    net.load_state_dict(weights, assign=_given.get() and fits)


class _NoInitialization(TorchFunctionMode):
    """Random initial weights that nobody draws, since every one of them is loaded."""

    _DRAWS = frozenset(
        getattr(torch.Tensor, name)
        for name in ("uniform_", "normal_", "random_", "bernoulli_", "erfinv_", "exponential_")
    )

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any | None = None
    ) -> Any:
        if func in self._DRAWS or getattr(func, "__module__", None) == nn.init.__name__:
            given = args[0] if args else (kwargs or {}).get("tensor")
            if isinstance(given, torch.Tensor):
                return given
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def uninitialized(net: Any) -> Iterator[None]:
    """Build a built-in net without drawing its initial weights; other nets as they are."""
    if not isinstance(net, Nets):
        yield
        return
    with _NoInitialization():
        yield
