"""Prompt tuning: learned embeddings in front of the tokens (Lester et al. 2021, arXiv:2104.08691)."""

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

_KEY = "soft_prompt"


class PromptTuner(nn.Module):
    """A frozen ``TransformerNN`` that reads learned embeddings before the tokens.

    ``soft_prompt`` is (n_prompt_tokens, d_model), normal with standard
    deviation 0.02, the only trainable tensor, in the dtype and on the device of
    the token embedding. Its positions count against ``max_seq_len``; their
    logits are dropped.

    Raises ``TypeError`` for another kind of model (see
    :mod:`nnx.peft.transformer`) and ``ValueError`` for a count below 1 or one
    that leaves no room for tokens.
    """

    def __init__(self, model: TransformerNN, *, n_prompt_tokens: int = 20) -> None:
        require_transformer(model, "PromptTuner")
        n_prompt_tokens = check.count(
            "PromptTuner", "n_prompt_tokens", n_prompt_tokens, at_most=model.params.max_seq_len - 1
        )
        super().__init__()
        self.model = model
        self.n_prompt_tokens = n_prompt_tokens
        like = placement_of(model.tok_embed)
        tensor = torch.empty(
            n_prompt_tokens, model.params.d_model, dtype=like.dtype, device=like.device
        )
        self.soft_prompt = nn.Parameter(nn.init.normal_(tensor, std=0.02))
        model.requires_grad_(False)
        self.training = model.training

    @property
    def effective_max_seq_len(self) -> int:
        """How many real tokens fit beside the prompt."""
        return int(self.model.params.max_seq_len) - self.n_prompt_tokens

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (batch, seq, vocab) of the real tokens (batch, seq).

        Raises ``ValueError`` when prompt and tokens exceed ``max_seq_len``.
        """
        return self.forward_with_cache(tokens)[0]

    def forward_with_cache(
        self, tokens: torch.Tensor, past_kvs: Any = None
    ) -> tuple[torch.Tensor, Any]:
        """As the model's; the first call puts the prompt into the cache."""
        if past_kvs is not None:
            return self.model.forward_with_cache(tokens, past_kvs)
        batch, length = tokens.shape
        if length > self.effective_max_seq_len:
            raise ValueError(
                f"{length} tokens and a prompt of {self.n_prompt_tokens} exceed the model's "
                f"max_seq_len of {self.model.params.max_seq_len}; at most "
                f"{self.effective_max_seq_len} tokens fit"
            )
        prompt = self.soft_prompt.expand(batch, -1, -1)
        x = torch.cat([prompt, self.model.tok_embed(tokens)], dim=1)
        logits, kvs = self.model.forward_embeddings(x)
        return logits[:, self.n_prompt_tokens :], kvs

    @property
    def class_axis(self) -> Any:
        """Where the model has its classes; see :mod:`nnx.prediction.batches`."""
        return getattr(self.model, "class_axis", None)

    def unpack_batch(self, batch: Any) -> Any:
        return self.model.unpack_batch(batch)

    def prompt_state_dict(self) -> dict[str, torch.Tensor]:
        """The soft prompt alone."""
        return {_KEY: self.state_dict()[_KEY]}

    def trainable_parameters(self) -> Iterator[nn.Parameter]:
        """The soft prompt, for an optimizer."""
        yield self.soft_prompt

    adapter_parameters = trainable_parameters
    adapted_child = "model"

    def extra_repr(self) -> str:
        return f"n_prompt_tokens={self.n_prompt_tokens}"


def save_prompt_weights(
    tuner: PromptTuner, path: str | os.PathLike[str], *, include_trainable: bool = False
) -> str:
    """Write only the soft prompt; return ``path``.

    Refuses with a ``ValueError`` when more was unfrozen, which the file would not
    hold, unless ``include_trainable`` puts it in.
    """
    return save_adapter(tuner, path, {_KEY}, what="prompt", include_trainable=include_trainable)


def load_prompt_weights(
    tuner: PromptTuner, source: Source, *, include_trainable: bool = False
) -> int:
    """Load the soft prompt from a path or a state dict; return how many tensors were taken.

    ``include_trainable`` reads all that is not frozen here. A tensor of another
    shape raises torch's size-mismatch ``RuntimeError``, and nothing is changed.
    """
    return load_adapter(tuner, source, {_KEY}, include_trainable=include_trainable)
