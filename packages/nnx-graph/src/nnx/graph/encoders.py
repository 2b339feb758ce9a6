"""What turns the nodes of a graph into vectors: PyG's layers, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from nnx.enums import Activations
from nnx.params.base import Params, StateField, always, optional, put
from nnx.utils import validation as check
from torch import nn
from torch.nn import functional as F
from torch_geometric import nn as layers

NORMS = ("batch", "layer")

Layer = Callable[["EncoderSpec", int, int, bool], nn.Module]


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderSpec(Params):
    """Which layers an encoder has.

    ``kind``: ``graph_conv`` (GCN), ``graph_sage`` (GraphSAGE), ``graph_att`` (GAT),
    ``gin`` (Xu et al., 2019, https://arxiv.org/abs/1810.00826), ``gatv2`` (Brody et al.,
    2022, https://arxiv.org/abs/2105.14491) or ``transformer`` (Shi et al., 2021,
    https://arxiv.org/abs/2009.03509). ``heads`` are those of the attention layers:
    concatenated in hidden layers, averaged in the last. ``edge_dim`` is the number of
    edge features, for the layers that take them (gin, graph_att, gatv2, transformer).
    ``norm`` normalizes after each layer but the last; ``residual`` adds a hidden layer's
    input to its output, through a linear map where the widths differ.
    """

    kind: str = "graph_conv"
    heads: int = 1
    edge_dim: int | None = None
    norm: str | None = None
    residual: bool = False

    _SECTION: ClassVar[str] = "encoder"
    _STATE: ClassVar[tuple[StateField, ...]] = (
        always("kind"),
        optional("heads"),
        optional("edge_dim"),
        optional("norm"),
        optional("residual"),
    )

    def __post_init__(self) -> None:
        owner = "EncoderSpec"
        put(
            self,
            kind=check.choice(owner, "kind", self.kind, ENCODERS),
            heads=check.count(owner, "heads", self.heads),
            residual=check.flag(owner, "residual", self.residual),
            edge_dim=None
            if self.edge_dim is None
            else check.count(owner, "edge_dim", self.edge_dim),
            norm=None if self.norm is None else check.choice(owner, "norm", self.norm, NORMS),
        )
        if self.heads > 1 and self.kind not in _ATTENTION:
            check.refuse(owner, "heads", self.heads, f"1 for {self.kind!r}, which has no heads")
        if self.edge_dim is not None and self.kind not in _EDGES:
            raise ValueError(
                f"EncoderSpec.edge_dim: {self.kind} layers take no edge features; "
                f"choose one of {', '.join(_EDGES)}"
            )

    @staticmethod
    def of(encoder: Any) -> EncoderSpec:
        """The spec of a kind's name, of a state, or of a spec."""
        if isinstance(encoder, str):
            return EncoderSpec(kind=encoder)
        if isinstance(encoder, Mapping):
            return EncoderSpec.from_state(encoder)
        return check.instance("encoder", "encoder", encoder, EncoderSpec)

    def config(self) -> Any:
        """The kind alone where it says everything, else the state."""
        state = self.state()
        return self.kind if state == {"kind": self.kind} else state


class GraphEncoder(nn.Module):
    """Message-passing layers ``layers.0`` to ``layers.n`` through ``dims``.

    Input: ``x`` ``(N, dims[0])``, ``edge_index`` ``(2, M)`` and, with ``edge_dim``,
    ``edge_attr`` ``(M, edge_dim)``. Output ``(N, dims[-1])``. Activation and dropout
    follow each layer; the last one only with ``activate_last``.
    """

    def __init__(
        self,
        spec: EncoderSpec,
        dims: Sequence[int],
        *,
        activation: str = "relu",
        dropout: float = 0.0,
        activate_last: bool = False,
    ) -> None:
        super().__init__()
        self.spec, self.dims = spec, tuple(dims)
        self.activation, self.activate_last = activation, activate_last
        self.drop = nn.Dropout(dropout)  # a module: a trace would fix a function's mode
        build = _KINDS[spec.kind]
        convs: list[nn.Module] = []
        norms: list[nn.Module] = []
        skips: list[nn.Module] = []
        width, last = dims[0], len(dims) - 2
        for i, out in enumerate(dims[1:]):
            convs.append(build(spec, width, out, i < last))
            made = out * spec.heads if i < last else out
            if i < last:
                norms.append(_norm(spec.norm, made))
                skips.append(nn.Identity() if width == made else nn.Linear(width, made, bias=False))
            width = made
        self.layers = nn.ModuleList(convs)
        self.norms = nn.ModuleList(norms if spec.norm else [])
        self.skips = nn.ModuleList(skips if spec.residual else [])
        self._function = _function(activation)

    @property
    def takes_edges(self) -> bool:
        """Whether ``forward`` needs ``edge_attr``."""
        return self.spec.edge_dim is not None

    def forward(
        self,
        x: torch.Tensor,
        edge_index: torch.Tensor,
        edge_attr: torch.Tensor | None = None,
    ) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            made = layer(x, edge_index, edge_attr) if self.takes_edges else layer(x, edge_index)
            x = self.after(i, made, x)
        return x

    def after(self, i: int, made: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """What follows layer ``i``, which made ``made`` of ``x``; row by row in eval mode."""
        last = i == len(self.layers) - 1
        if last and not self.activate_last:
            return made
        if not last and self.norms:
            made = self.norms[i](made)
        if not last and self.skips:
            made = made + self.skips[i](x)
        return self.drop(self._function(made))

    def extra_repr(self) -> str:
        return f"dims={list(self.dims)}, activation={self.activation!r}, dropout={self.drop.p}"


def hidden_widths(owner: str, hidden_dims: Any) -> tuple[int, ...]:
    """The widths of an encoder's layers, at least one."""
    if isinstance(hidden_dims, str) or not isinstance(hidden_dims, Sequence) or not hidden_dims:
        check.refuse(owner, "hidden_dims", hidden_dims, "a list of at least one width")
    return tuple(check.count(owner, f"hidden_dims[{i}]", n) for i, n in enumerate(hidden_dims))


def encoder_config(
    owner: str,
    *,
    input_dim: int,
    hidden_dims: Any,
    encoder: Any,
    activation: str,
    dropout: float,
) -> dict[str, Any]:
    """The checked part of a recipe's config that :func:`encoder_of` builds from."""
    return {
        "input_dim": check.count(owner, "input_dim", input_dim),
        "hidden_dims": list(hidden_widths(owner, hidden_dims)),
        "encoder": EncoderSpec.of(encoder).config(),
        "activation": Activations(
            check.choice(owner, "activation", activation, [a.value for a in Activations])
        ).value,
        "dropout": float(check.real(owner, "dropout", dropout, at_least=0, below=1)),
    }


def encoder_of(
    config: Mapping[str, Any], *, outputs: int | None = None, activate_last: bool = False
) -> GraphEncoder:
    """The encoder of a recipe's config; ``outputs`` adds a last layer of that width."""
    dims = [config["input_dim"], *config["hidden_dims"], *(() if outputs is None else (outputs,))]
    return GraphEncoder(
        EncoderSpec.of(config["encoder"]), dims, activation=config["activation"],
        dropout=config["dropout"], activate_last=activate_last,
    )  # fmt: skip


def _function(activation: str) -> Callable[[torch.Tensor], torch.Tensor]:
    module = Activations(activation)()
    return module.forward if isinstance(module, nn.Module) else module


def _norm(kind: str | None, width: int) -> nn.Module:
    return nn.LayerNorm(width) if kind == "layer" else RowsNorm(width)


class RowsNorm(nn.BatchNorm1d):
    """Batch normalization of node rows; one row alone is normalized as in evaluation.

    A row has no variance to estimate, and a batch with a single node is nothing unusual.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and len(x) < 2:
            return F.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        return super().forward(x)


def _conv(spec: EncoderSpec, width: int, out: int, hidden: bool) -> nn.Module:
    return layers.GCNConv(width, out)


def _sage(spec: EncoderSpec, width: int, out: int, hidden: bool) -> nn.Module:
    return layers.SAGEConv(width, out)


def _attention(kind: Callable[..., nn.Module]) -> Layer:
    def build(spec: EncoderSpec, width: int, out: int, hidden: bool) -> nn.Module:
        return kind(width, out, heads=spec.heads, concat=hidden, edge_dim=spec.edge_dim)

    return build


def _gin(spec: EncoderSpec, width: int, out: int, hidden: bool) -> nn.Module:
    mlp = nn.Sequential(nn.Linear(width, out), nn.ReLU(), nn.Linear(out, out))
    if spec.edge_dim is None:
        return layers.GINConv(mlp, train_eps=True)
    return layers.GINEConv(mlp, train_eps=True, edge_dim=spec.edge_dim)


_KINDS: dict[str, Layer] = {
    "graph_conv": _conv,
    "graph_sage": _sage,
    "graph_att": _attention(layers.GATConv),
    "gin": _gin,
    "gatv2": _attention(layers.GATv2Conv),
    "transformer": _attention(layers.TransformerConv),
}
ENCODERS = tuple(_KINDS)
_ATTENTION = ("graph_att", "gatv2", "transformer")
_EDGES = ("gin", *_ATTENTION)
