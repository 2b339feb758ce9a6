"""Encoder and decoder: a model of links, and the recipe that rebuilds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from nnx.graph.batches import is_graph_collection_batch, is_link_batch
from nnx.graph.encoders import encoder_config, encoder_of
from nnx.link_tasks.split import LinkTaskError
from nnx.params import ModelSpec
from nnx.utils import validation as check
from torch import nn

__all__ = [
    "DECODERS", "FACTORY_ID", "LinkPredictor", "build", "is_link_batch", "link_predictor_spec",
]  # fmt: skip

FACTORY_ID = "nnx.link_predictor"
DECODERS = ("dot", "mlp")


class LinkPredictor(nn.Module):
    """Scores pairs of nodes by the vectors that ``encoder(x, edge_index)`` makes of them.

    ``decoder="dot"`` is the inner product, one logit per pair; ``"mlp"`` a network of one
    hidden layer over the element-wise product, ``width`` being the encoder's output width
    and ``outputs`` the number of logits. Both give ``u -> v`` and ``v -> u`` the same.

    Output: ``(K,)`` for one output, else ``(K, outputs)``.
    """

    def __init__(
        self, encoder: nn.Module, decoder: str = "dot", *, width: int = 0, outputs: int = 1
    ) -> None:
        super().__init__()
        owner = "LinkPredictor"
        self.encoder = encoder
        self.decoder = check.choice(owner, "decoder", decoder, DECODERS)
        self.outputs = check.count(owner, "outputs", outputs)
        if self.decoder == "dot":
            if self.outputs != 1:
                check.refuse(owner, "outputs", outputs, "1 for the dot decoder; use mlp")
            self.head: nn.Module | None = None
        else:
            width = check.count(owner, "width", width)
            self.head = nn.Sequential(
                nn.Linear(width, width), nn.ReLU(), nn.Linear(width, self.outputs)
            )

    def forward(
        self, x: torch.Tensor, edge_index: torch.Tensor, edge_label_index: torch.Tensor
    ) -> torch.Tensor:
        nodes = self.encoder(x, edge_index)
        both = nodes[edge_label_index[0]] * nodes[edge_label_index[1]]
        if self.head is None:
            return both.sum(dim=-1)
        logits = self.head(both)
        return logits.squeeze(-1) if self.outputs == 1 else logits

    def unpack_batch(self, batch: Any) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """Refuse every batch: only a :class:`LinkTask` can check one against its split.

        Raises :class:`LinkTaskError`. Batches of links are for ``task.objective()``,
        ``task.eval_step()`` and ``task.predict(...)``.
        """
        if not is_link_batch(batch):
            raise LinkTaskError(
                f"a link predictor reads batches of LinkTask.loader(...), not {_named(batch)}"
            )
        raise LinkTaskError(
            "a batch of links must be checked against its split, which this path cannot do: "
            "train with objective=task.objective() and eval_step_fn=task.eval_step(), and "
            "predict with task.predict(model, loader)"
        )

    def sample_ids(self, batch: Any) -> torch.Tensor:
        """The candidates' ids."""
        return batch.candidate_id


def link_predictor_spec(
    *,
    input_dim: int,
    hidden_dims: Sequence[int] = (32,),
    encoder: Any = "graph_conv",
    decoder: str = "dot",
    num_categories: int | None = None,
    activation: str = "relu",
    dropout: float = 0.0,
    seed: int = 0,
) -> ModelSpec:
    """The recipe of a :class:`LinkPredictor`, for ``NNModelParams(net=...)``.

    One layer per entry of ``hidden_dims``; no activation after the last. ``encoder`` is a
    kind of :class:`~nnx.graph.EncoderSpec`, or such a spec without edge features.
    ``num_categories`` asks for that many logits per pair (``decoder="mlp"``).
    """
    owner = "link_predictor_spec"
    config = encoder_config(
        owner, input_dim=input_dim, hidden_dims=hidden_dims, encoder=encoder,
        activation=activation, dropout=dropout,
    )  # fmt: skip
    if isinstance(config["encoder"], dict) and "edge_dim" in config["encoder"]:
        raise ValueError(f"{owner}: link batches carry no edge features; leave edge_dim out")
    config["decoder"] = check.choice(owner, "decoder", decoder, DECODERS)
    if num_categories is not None:
        config["num_categories"] = check.count(owner, "num_categories", num_categories, at_least=2)
        if decoder == "dot":
            raise ValueError(
                f"{owner}: a dot product is one number; {num_categories} categories need "
                'decoder="mlp"'
            )
    return ModelSpec(FACTORY_ID, 1, config, seed=seed)


def build(config: Mapping[str, Any]) -> LinkPredictor:
    """The factory behind :func:`link_predictor_spec`."""
    encoder = encoder_of(config)
    return LinkPredictor(
        encoder, config["decoder"], width=encoder.dims[-1],
        outputs=config.get("num_categories") or 1,
    )  # fmt: skip


def _named(batch: Any) -> str:
    return "whole graphs" if is_graph_collection_batch(batch) else type(batch).__name__
