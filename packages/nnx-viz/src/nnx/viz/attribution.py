"""Which inputs a prediction comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nnx.viz._common import (
    borrowed,
    heatmap,
    inputs_of,
    output_of,
    require,
    subplots,
    to_device_of,
    unwrap,
)

if TYPE_CHECKING:
    import numpy as np
    import plotly.graph_objects as go
    import torch
    from torch import nn

METHODS = {
    "integrated_gradients": "IntegratedGradients",
    "gradient_shap": "GradientShap",
    "deep_lift": "DeepLift",
    "saliency": "Saliency",
    "input_x_gradient": "InputXGradient",
    "occlusion": "Occlusion",
}


def attribute(
    model: nn.Module | Any,
    x: torch.Tensor | tuple[Any, ...] | Mapping[str, Any],
    *,
    method: str = "integrated_gradients",
    target: Any = None,
    **method_kwargs: Any,
) -> tuple[Any, go.Figure]:
    """Attributions of ``x`` (same shape), and their heatmap, computed by Captum.

    ``method`` is one of ``integrated_gradients`` (Sundararajan et al. 2017),
    ``gradient_shap`` (Lundberg & Lee 2017), ``deep_lift`` (Shrikumar et al.
    2017), ``saliency`` (Simonyan et al. 2013), ``input_x_gradient`` and
    ``occlusion`` (Zeiler & Fergus 2014). ``target`` is the output index (or one
    per sample) to explain; a model with several outputs needs it. Further
    keywords go to Captum's ``attribute``; zero ``baselines`` (gradient_shap)
    and a small ``sliding_window_shapes`` (occlusion) are supplied when absent.

    ``x`` is what the model takes. For an NNModel whose batch adapter says so it
    is a tuple of positional or a mapping of keyword inputs; those of floating
    point are attributed, and come back in a tuple or a mapping.

    A 4-D input is drawn as its first sample averaged over channels, a 3-D
    input as its first sample, a 2-D input as one row per sample.

    The model runs in eval mode; modes, gradients and random streams are as
    before afterwards. Raises ``ValueError`` for an unknown method, a missing
    target, or inputs of which none is of floating point.
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; choose one of {', '.join(METHODS)}")
    captum = require("captum.attr", "nnx.viz.attribute")
    require("plotly.graph_objects", "nnx.viz.attribute")
    net = unwrap(model)
    args, kwargs = inputs_of(model, net, x)
    values = to_device_of(net, dict(enumerate(args)) | kwargs)
    names = [n for n, v in values.items() if _is_floating(v)]
    if not names:
        raise ValueError(
            "no input is of floating point, so none can be attributed; explain the layer behind "
            "the embedding instead (a module that takes the embedded inputs)"
        )
    inputs = tuple(values.pop(name) for name in names)
    rest = {"additional_forward_args": tuple(values.values())} if values else {}
    options = {**_defaults(method, inputs), **method_kwargs}
    with borrowed(net), _out_of_place(net):
        run = net if model is net else _called(model, net, (*names, *values))
        try:
            found = getattr(captum, METHODS[method])(run).attribute(
                _one(inputs), target=target, **rest, **options
            )
        except AssertionError as error:
            if target is None and "arget" in str(error):
                raise ValueError(
                    "the model has several outputs; pass target= (the output index to explain)"
                ) from error
            raise
    result = tuple(r.detach() for r in (found if isinstance(found, tuple) else (found,)))
    figure, _ = subplots([str(n) if kwargs else "" for n in names], 1, cell=420, width=900)
    for row, attributed in enumerate(result, 1):
        figure.add_trace(heatmap(_drawable(attributed), signed=True), row=row, col=1)
    figure.update_yaxes(autorange="reversed")
    figure.update_layout(title=f"Attribution: {method.replace('_', ' ')}")
    if isinstance(x, Mapping):
        return dict(zip(names, result)), figure
    return (result if isinstance(x, tuple) else result[0]), figure


def _called(model: Any, net: nn.Module, names: tuple[int | str, ...]) -> nn.Module:
    """``net`` as Captum calls it, every input by position, its answer a tensor."""
    from torch import nn

    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, *values: torch.Tensor) -> Any:
            given = dict(zip(names, values))
            args = [given[key] for key in sorted(k for k in given if isinstance(k, int))]
            kwargs = {key: value for key, value in given.items() if isinstance(key, str)}
            return output_of(model, net, self.net(*args, **kwargs))

    return Called().train(net.training)


def _is_floating(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _one(values: tuple[Any, ...]) -> Any:
    return values if len(values) > 1 else values[0]


@contextmanager
def _out_of_place(net: nn.Module) -> Iterator[None]:
    """Layers that work in place leave their input alone: its gradient is asked for."""
    changed: list[Any] = [m for m in net.modules() if getattr(m, "inplace", None) is True]
    for module in changed:
        module.inplace = False
    try:
        yield
    finally:
        for module in changed:
            module.inplace = True


def _defaults(method: str, inputs: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    import torch

    if method == "gradient_shap":
        return {"baselines": _one(tuple(torch.zeros_like(x) for x in inputs))}
    if method == "occlusion":
        return {"sliding_window_shapes": _one(tuple(_window(tuple(x.shape[1:])) for x in inputs))}
    return {}


def _window(shape: tuple[int, ...]) -> tuple[int, ...]:
    """One feature at a time; patches of up to 3 x 3 over all channels of a picture."""
    return (1,) if len(shape) == 1 else (*shape[:-2], *(min(3, s) for s in shape[-2:]))


def _drawable(values: torch.Tensor) -> np.ndarray:
    array = values.float().cpu()
    if array.ndim == 4:
        array = array[0].mean(dim=0)
    elif array.ndim == 3:
        array = array[0]
    elif array.ndim != 2:
        array = array.reshape(1, -1)
    return array.numpy()
