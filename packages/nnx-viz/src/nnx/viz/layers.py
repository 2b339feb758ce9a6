"""The table of a model's layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nnx.viz._common import borrowed, require, to_device_of, unwrap

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torchinfo import ModelStatistics


def summary(
    model: nn.Module | Any,
    *,
    input_size: tuple[int, ...] | None = None,
    input_data: torch.Tensor | tuple | list | dict | None = None,
    batch: Any = None,
    depth: int = 4,
    col_names: tuple[str, ...] = ("output_size", "num_params", "mult_adds"),
) -> ModelStatistics:
    """Layers, output shapes, parameters and multiply-adds of a model.

    At most one of three inputs drives the forward pass that measures shapes:
    ``input_size`` (the shape of a synthetic input, batch included),
    ``input_data`` (a tensor, positional arguments, or a dict of keyword
    arguments), or ``batch`` (a batch as the model trains on, split by the
    model's batch adapter). Without one, only parameters are counted.

    Returns torchinfo's ``ModelStatistics``: print it, or read
    ``total_params``, ``trainable_params`` and ``total_mult_adds``.

    Raises ``ValueError`` when more than one input is given, or when
    ``input_size`` is given for a model that takes keyword inputs.
    """
    torchinfo = require("torchinfo", "nnx.viz.summary")
    given = [n for n, v in (("input_size", input_size), ("input_data", input_data), ("batch", batch))
             if v is not None]  # fmt: skip
    if len(given) > 1:
        raise ValueError(f"summary takes one of {', '.join(given)}, not {len(given)} of them")
    net = unwrap(model)
    if input_size is not None and _takes_keywords(model):
        raise ValueError(
            "summary(input_size=...) makes one positional tensor, but this model takes keyword "
            "inputs; pass batch= (a training batch) or input_data= (a dict) instead"
        )
    args: Any = None
    kwargs: dict[str, Any] = {}
    if batch is not None:
        args, kwargs = _split(model, net, batch)
        if not args:  # torchinfo reads a mapping as the keyword arguments
            args, kwargs = kwargs, {}
    elif input_data is not None:
        args = input_data
    if input_size is None and args is None:  # nothing runs, so shapes and costs are unknown
        col_names = tuple(
            c for c in col_names if c in ("num_params", "params_percent", "trainable")
        )
    with borrowed(net):
        return torchinfo.summary(
            net,
            input_size=input_size,
            input_data=to_device_of(net, args),
            depth=depth,
            col_names=col_names,
            mode="eval",
            verbose=0,
            **to_device_of(net, kwargs),
        )


def _takes_keywords(model: Any) -> bool:
    from nnx.models import KeywordInputs

    return isinstance(getattr(model, "batch_adapter", None), KeywordInputs)


def _split(model: Any, net: nn.Module, batch: Any) -> tuple[Any, dict[str, Any]]:
    from nnx.models import adapter_for

    args, kwargs, _ = adapter_for(net, getattr(model, "batch_adapter", None)).split(batch)
    return list(args), dict(kwargs)
