"""What the built-in nets share: per-layer activation and dropout, weights in a file."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional as F

from nnx.enums import Activations
from nnx.params import NNParams
from nnx.utils.files import atomic_write

Self = TypeVar("Self", bound="BuiltinNet")
Activation = Callable[[torch.Tensor], torch.Tensor]


class BuiltinNet(nn.Module):
    """A net that is rebuilt from its :class:`~nnx.params.NNParams`.

    Hidden layer ``i`` is followed by ``params.activation_for(i)`` and dropout
    with probability ``params.dropout_for(i)``. The last layer is followed by
    neither: the output is raw logits.
    """

    def __init__(self, params: NNParams) -> None:
        super().__init__()
        self.params = params

    @property
    def params(self) -> NNParams:
        """The configuration this net was built from."""
        return self._params

    @params.setter
    def params(self, value: NNParams) -> None:
        self._params = value
        self._activation = _function(value.activation or Activations.LEAKY_RELU)
        self._after: list[tuple[Activation, float]] = [
            (_function(value.activation_for(i)), value.dropout_for(i))
            for i in range(n_hidden(value))
        ]

    def unpack_batch(self, batch: Any) -> tuple[tuple[Any, ...], Any]:
        """``((X,), target)`` of a two-element batch: the net's inputs, and what they should give."""
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            size = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
            raise ValueError(
                f"{type(self).__name__} expects batches of (inputs, targets), "
                f"got {type(batch).__name__}{size}; a loader gives them: "
                "DataLoader(TensorDataset(inputs, targets), batch_size=32)"
            )
        return (batch[0],), batch[1]

    def to_file(self, path: str) -> None:
        """Write the weights (a plain ``state_dict``); the old or the new file survives."""
        with atomic_write(path, "wb") as stream:
            torch.save(self.state_dict(), stream)

    @classmethod
    def from_state(cls: type[Self], state_dict: Mapping[str, Any], params: NNParams) -> Self:
        """A net of ``params`` holding ``state_dict``."""
        net = cls(params)
        net.load_state_dict(state_dict)
        return net

    @classmethod
    def from_file(
        cls: type[Self],
        path: str | os.PathLike[str],
        params: NNParams,
        map_location: Any = "cpu",
    ) -> Self:
        """A net of ``params`` with the weights that :meth:`to_file` wrote."""
        return cls.from_state(
            torch.load(path, map_location=map_location, weights_only=True), params
        )

    def _activate(self, i: int, X: torch.Tensor) -> torch.Tensor:
        """Activation and dropout after hidden layer ``i``."""
        activation, probability = self._after[i]
        X = activation(X)
        return F.dropout(X, probability, training=True) if probability and self.training else X

    def extra_repr(self) -> str:
        p, hidden = self._params, range(n_hidden(self._params))
        activations = [p.activation_for(i).value for i in hidden]
        return f"activations={activations}, dropouts={[p.dropout_for(i) for i in hidden]}"


def n_hidden(params: NNParams) -> int:
    """How many dense layers precede the output layer."""
    return len(params.hidden_dims or ())


def _function(activation: Activations) -> Activation:
    """What the activation computes, without the bookkeeping of a module call."""
    module = activation()
    return module.forward if isinstance(module, nn.Module) else module


def dense(dims: list[int]) -> nn.ModuleList:
    """Linear layers through ``dims``, initialized by torch in that order."""
    return nn.ModuleList(nn.Linear(m, n) for m, n in itertools.pairwise(dims))
