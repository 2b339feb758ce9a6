"""Prefix tuning: learned keys and values in front of every layer (Li and Liang 2021, arXiv:2101.00190)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from nnx.peft.ownership import Source, load_adapter, save_adapter
from nnx.peft.transformer import placement_of, require_transformer
from nnx.utils import validation as check
from torch import nn

if TYPE_CHECKING:
    from nnx.lm import TransformerNN  # type: ignore[import-not-found,import-untyped,unused-ignore]


class PrefixTuner(nn.Module):
    """A frozen ``TransformerNN`` whose attention also sees learned keys and values.

    ``prefix_keys.i`` and ``prefix_values.i``, each (n_prefix, kv_heads,
    head_dim), are the only trainable tensors. They start small and random in
    the dtype and on the device of block ``i``'s attention projection, so the
    output starts near the model's, not equal to it.

    The model is changed in place: all of its parameters, adapters included, are
    frozen and its attention reads the prefix until the model is discarded.
    ``copy.deepcopy(tuner)`` makes an independent one.

    Args:
        model: see :mod:`nnx.peft.transformer`.
        n_prefix: virtual tokens per layer, >= 1.
        n_layers: how many leading blocks get a prefix; all when ``None``.

    Raises ``TypeError`` for another kind of model and ``ValueError`` for a
    count out of range or a model that has a prefix already.
    """

    def __init__(
        self, model: TransformerNN, *, n_prefix: int = 10, n_layers: int | None = None
    ) -> None:
        transformer = require_transformer(model, "PrefixTuner")
        n_prefix = check.count("PrefixTuner", "n_prefix", n_prefix)
        blocks = list(transformer.blocks)
        if n_layers is not None:
            n_layers = check.count("PrefixTuner", "n_layers", n_layers, at_most=len(blocks))
        if any(block.attn.kv_prefix is not None for block in blocks):
            raise ValueError(
                "the model is prefix-tuned already; a second prefix would replace the first one. "
                "Use copy.deepcopy of the first tuner to fork it"
            )
        super().__init__()
        self.model = model
        self.n_prefix = n_prefix
        targets = blocks[: n_layers or len(blocks)]
        params = transformer.params
        heads = getattr(params, "kv_heads", params.n_heads)
        shape = (n_prefix, heads, params.d_model // params.n_heads)
        self.prefix_keys = nn.ParameterList(_new(block, shape) for block in targets)
        self.prefix_values = nn.ParameterList(_new(block, shape) for block in targets)
        model.requires_grad_(False)
        for module in (self, self.prefix_keys, self.prefix_values):
            module.training = model.training
        for i, block in enumerate(targets):
            block.attn.kv_prefix = _Prefix(self.prefix_keys, self.prefix_values, i)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward pass; its attention adds the prefix."""
        return self.model(*args, **kwargs)

    def forward_with_cache(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own cached forward pass; the cache never holds the prefix."""
        return self.model.forward_with_cache(*args, **kwargs)

    @property
    def class_axis(self) -> Any:
        """Where the model has its classes; see :mod:`nnx.prediction.batches`."""
        return getattr(self.model, "class_axis", None)

    def unpack_batch(self, batch: Any) -> Any:
        return self.model.unpack_batch(batch)

    def prefix_state_dict(self) -> dict[str, torch.Tensor]:
        """The prefix tensors: ``prefix_keys.0``, ``prefix_values.0``, ..."""
        state = self.state_dict()
        return {key: state[key] for key in self._keys()}

    def trainable_parameters(self) -> Iterator[nn.Parameter]:
        """The prefix tensors, for an optimizer."""
        yield from self.prefix_keys
        yield from self.prefix_values

    adapter_parameters = trainable_parameters
    adapted_child = "model"

    def _keys(self) -> list[str]:
        pairs = (("prefix_keys", self.prefix_keys), ("prefix_values", self.prefix_values))
        return [f"{name}.{i}" for name, tensors in pairs for i in range(len(tensors))]

    def extra_repr(self) -> str:
        return f"n_prefix={self.n_prefix}, n_layers={len(self.prefix_keys)}"


class _Prefix:
    """What an attention calls for its block's prefix. Not a module: it owns nothing."""

    def __init__(self, keys: nn.ParameterList, values: nn.ParameterList, index: int) -> None:
        self.keys, self.values, self.index = keys, values, index

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys[self.index], self.values[self.index]


def _new(block: Any, shape: tuple[int, ...]) -> nn.Parameter:
    like = placement_of(block.attn.w_qkv)
    tensor = torch.empty(shape, dtype=like.dtype, device=like.device)
    return nn.Parameter(nn.init.normal_(tensor, std=0.02))


def save_prefix_weights(
    tuner: PrefixTuner, path: str | os.PathLike[str], *, include_trainable: bool = False
) -> str:
    """Write only the prefix tensors; return ``path``.

    Refuses with a ``ValueError`` when more was unfrozen, which the file would not
    hold, unless ``include_trainable`` puts it in.
    """
    return save_adapter(
        tuner, path, tuner._keys(), what="prefix", include_trainable=include_trainable
    )


def load_prefix_weights(
    tuner: PrefixTuner, source: Source, *, include_trainable: bool = False
) -> int:
    """Load the prefix tensors from a path or a state dict; return how many tensors were taken.

    ``include_trainable`` reads all that is not frozen here. A tensor of another
    shape raises torch's size-mismatch ``RuntimeError``, and nothing is changed.
    """
    return load_adapter(tuner, source, tuner._keys(), include_trainable=include_trainable)
