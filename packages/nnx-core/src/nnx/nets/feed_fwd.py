"""A feed-forward net."""

from __future__ import annotations

import torch

from nnx.nets.layers import BuiltinNet, dense
from nnx.params import NNParams


class FeedFwdNN(BuiltinNet):
    """Linear layers ``layers.0`` to ``layers.n`` through ``params.dims``.

    Input ``(B, input_dim)`` (or ``(..., input_dim)``); an input of more
    dimensions whose last is not ``input_dim`` is flattened per sample, so
    ``(B, C, H, W)`` images fit ``input_dim = C * H * W``. Output: raw logits
    ``(B, output_dim)``. The weights start as those of plain ``nn.Linear``
    layers built in this order under the same seed.
    """

    def __init__(self, params: NNParams) -> None:
        super().__init__(params)
        self.layers = dense([params.input_dim, *(params.hidden_dims or ()), params.output_dim])

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        if X.dim() > 2 and X.shape[-1] != self.layers[0].in_features:
            X = X.flatten(1)
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            X = layer(X)
            if i < last:
                X = self._activate(i, X)
        return X
