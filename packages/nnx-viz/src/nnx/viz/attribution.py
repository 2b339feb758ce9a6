"""Which inputs a prediction comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nnx.viz._common import borrowed, heatmap, require, subplots, to_device_of, unwrap

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
    x: torch.Tensor,
    *,
    method: str = "integrated_gradients",
    target: Any = None,
    **method_kwargs: Any,
) -> tuple[torch.Tensor, go.Figure]:
    """Attributions of ``x`` (same shape), and their heatmap, computed by Captum.

    ``method`` is one of ``integrated_gradients`` (Sundararajan et al. 2017),
    ``gradient_shap`` (Lundberg & Lee 2017), ``deep_lift`` (Shrikumar et al.
    2017), ``saliency`` (Simonyan et al. 2013), ``input_x_gradient`` and
    ``occlusion`` (Zeiler & Fergus 2014). ``target`` is the output index (or one
    per sample) to explain; a model with several outputs needs it. Further
    keywords go to Captum's ``attribute``; zero ``baselines`` (gradient_shap)
    and a small ``sliding_window_shapes`` (occlusion) are supplied when absent.

    A 4-D input is drawn as its first sample averaged over channels, a 3-D
    input as its first sample, a 2-D input as one row per sample.

    The model runs in eval mode; modes, gradients and random streams are as
    before afterwards. Raises ``ValueError`` for an unknown method or a missing
    target.
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; choose one of {', '.join(METHODS)}")
    captum = require("captum.attr", "nnx.viz.attribute")
    require("plotly.graph_objects", "nnx.viz.attribute")
    net = unwrap(model)
    inputs = to_device_of(net, x.detach().clone())
    options = {**_defaults(method, inputs), **method_kwargs}
    with borrowed(net):
        try:
            result = getattr(captum, METHODS[method])(net).attribute(
                inputs, target=target, **options
            )
        except AssertionError as error:
            if target is None and "arget" in str(error):
                raise ValueError(
                    "the model has several outputs; pass target= (the output index to explain)"
                ) from error
            raise
    result = result.detach()
    figure, _ = subplots([""], 1, cell=420, width=900)
    figure.add_trace(heatmap(_drawable(result), signed=True), row=1, col=1)
    figure.update_yaxes(autorange="reversed")
    figure.update_layout(title=f"Attribution: {method.replace('_', ' ')}")
    return result, figure


def _defaults(method: str, x: torch.Tensor) -> dict[str, Any]:
    import torch

    if method == "gradient_shap":
        return {"baselines": torch.zeros_like(x)}
    if method == "occlusion":
        # One feature at a time; patches of up to 3 x 3 over all channels of a picture.
        shape = tuple(x.shape[1:])
        window = (1,) if len(shape) == 1 else (*shape[:-2], *(min(3, s) for s in shape[-2:]))
        return {"sliding_window_shapes": window}
    return {}


def _drawable(values: torch.Tensor) -> np.ndarray:
    array = values.float().cpu()
    if array.ndim == 4:
        array = array[0].mean(dim=0)
    elif array.ndim == 3:
        array = array[0]
    elif array.ndim != 2:
        array = array.reshape(1, -1)
    return array.numpy()
