"""A convolutional net."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn import functional as F

from nnx.nets.layers import BuiltinNet, dense
from nnx.params import NNConvParams


class ConvNN(BuiltinNet):
    """Convolution blocks, then feed-forward layers.

    Block ``i`` is ``convs.i`` (``Conv2d``), activation, dropout, and max pooling
    by ``pool_size``; the result is flattened into ``layers.0`` to ``layers.n``.
    Per-layer activations and dropouts count the blocks first, then the hidden
    layers. Input ``(B, in_channels, side, side)``, or ``(B, input_dim)``, which
    is reshaped to that. Output: raw logits ``(B, output_dim)``.
    """

    def __init__(self, params: NNConvParams) -> None:
        super().__init__(params)
        channels = [params.in_channels, *params.conv_channels]
        self.convs = nn.ModuleList(
            nn.Conv2d(m, n, params.kernel_size, params.stride, params.padding)
            for m, n in itertools.pairwise(channels)
        )
        self.layers = dense([params.flatten_dim(), *(params.hidden_dims or ()), params.output_dim])
        self._image = (params.in_channels, params.image_side(), params.image_side())
        self._pool_size = params.pool_size

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        if X.shape[1:] != self._image:
            if X.dim() < 2 or X.shape[1:].numel() != self.params.input_dim:
                raise ValueError(
                    f"ConvNN expects (B, {', '.join(map(str, self._image))}) or "
                    f"(B, {self.params.input_dim}) inputs, got {tuple(X.shape)}"
                )
            X = X.reshape(X.shape[0], *self._image)
        for i, conv in enumerate(self.convs):
            X = F.max_pool2d(self._activate(i, conv(X)), self._pool_size)
        X = X.flatten(1)
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            X = layer(X)
            if i < last:
                X = self._activate(len(self.convs) + i, X)
        return X
