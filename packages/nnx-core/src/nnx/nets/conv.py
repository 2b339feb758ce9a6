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

    Block ``i`` is ``convs.i`` (``Conv2d``), ``params.activation`` and max pooling
    by ``pool_size``, without dropout; the result is flattened into ``fcs.0`` to
    ``fcs.n``, whose activations and dropouts are those of the hidden layers. Input ``(B, in_channels, side, side)``, or ``(B, input_dim)``, which
    is reshaped to that. Output: raw logits ``(B, output_dim)``.
    """

    def __init__(self, params: NNConvParams) -> None:
        super().__init__(params)
        channels = [params.in_channels, *params.conv_channels]
        self.convs = nn.ModuleList(
            nn.Conv2d(m, n, params.kernel_size, params.stride, params.padding)
            for m, n in itertools.pairwise(channels)
        )
        self.fcs = dense([params.flatten_dim(), *(params.hidden_dims or ()), params.output_dim])
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
        for conv in self.convs:
            X = F.max_pool2d(self._activation(conv(X)), self._pool_size)
        X = X.flatten(1)
        last = len(self.fcs) - 1
        for i, layer in enumerate(self.fcs):
            X = layer(X)
            if i < last:
                X = self._activate(i, X)
        return X
