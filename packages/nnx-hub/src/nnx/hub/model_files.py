"""What a model is saved as: its files in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnx.hub.card import CHART, chart_of, model_card
from nnx.hub.layout import CARD, CONFIG, WEIGHTS, config_of, to_bytes
from nnx.models import MissingModelFactoryError, check_topology
from nnx.params import RuntimeModule
from nnx.utils.tensor_file import as_stored, chunks


def check_portable(model: Any) -> None:
    """Refuse a model that the files would not bring back."""
    net = model.params.net
    if isinstance(net, RuntimeModule):
        raise MissingModelFactoryError(
            f"{net.module} is a runtime-only module, which no factory can rebuild; register a "
            "factory and build the model from a ModelSpec, or keep the weights alone with "
            "export_state_dict()"
        )
    check_topology(model)


def contents(model: Any, card: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Each file as its parts; tensors are not copied."""
    tensors = {
        name: as_stored(f"the net's state {name!r}", value)
        for name, value in model.net.state_dict().items()
    }
    config, chart = config_of(model), chart_of(card.get("run"))
    count = sum(p.numel() for p in model.net.parameters())
    text = model_card(config, count, chart=chart is not None, **card)
    return {
        **{name: [data] for name, data in model.artifacts.items()},
        **({} if chart is None else {CHART: [chart]}),
        WEIGHTS: list(chunks(tensors, {})),
        CARD: [text.encode("utf-8")],
        CONFIG: [to_bytes(config)],
    }
