"""Shapes of the networks.

The params of networks that other distributions build are kept here too, so that
a stored run of one loads, prints and keeps its id with only core installed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from nnx.enums import Activations, Nets
from nnx.params.base import (
    Converted,
    Params,
    StateField,
    always,
    converted,
    encode_enum,
    frozen_list,
    member,
    optional,
    put,
    read_literal,
)
from nnx.utils import validation as check

_activation = member(Activations)


def _activations(values: Any) -> Any:
    return None if values is None else [_activation(value) for value in read_literal(values)]


@dataclass(frozen=True, kw_only=True, slots=True)
class NNParams(Params):
    """A network's dimensions, activations and dropout.

    ``activations`` and ``dropout_probs`` name one value per hidden layer and
    default to ``activation`` and ``dropout_prob`` everywhere. ``n_heads`` is
    read by attention networks only.
    """

    dropout_prob: float
    n_heads: int | None = None
    activation: Converted[Activations | None, str] = converted(Activations.LEAKY_RELU)
    activations: Converted[list[Activations] | None, Sequence[Activations | str]] = converted(None)
    dropout_probs: list[float] | None = None
    input_dim: int
    output_dim: int
    hidden_dims: list[int] | None = None

    _SECTION: ClassVar[str] = "net"
    _STATE: ClassVar[tuple[StateField, ...]] = (
        always("input_dim"),
        always("output_dim"),
        always("dropout_prob"),
        always("hidden_dims", encode=str, decode=read_literal),
        always("activation", encode=encode_enum, decode=lambda v: v and _activation(v)),
        optional("n_heads"),
        StateField(
            "activations",
            encode=lambda values: str([value.value for value in values]),
            decode=_activations,
            omit=lambda p: set(p.activations or ()) <= {p.activation},
        ),
        StateField(
            "dropout_probs",
            encode=str,
            decode=read_literal,
            omit=lambda p: set(p.dropout_probs or ()) <= {p.dropout_prob},
        ),
    )

    def __post_init__(self) -> None:
        NNParams._check(self)

    def _check(self) -> None:
        owner = type(self).__name__

        def dim(field: str, value: Any) -> int:
            return check.count(owner, field, value)

        def probability(field: str, value: Any) -> float:
            return check.real(owner, field, value, at_least=0, at_most=1)

        def activation(field: str, value: Any) -> Any:
            return check.member(owner, field, value, Activations)

        if self.activation is not None:
            put(self, activation=activation("activation", self.activation))
        put(
            self,
            input_dim=dim("input_dim", self.input_dim),
            output_dim=dim("output_dim", self.output_dim),
            hidden_dims=frozen_list(owner, "hidden_dims", self.hidden_dims, dim),
            n_heads=None if self.n_heads is None else dim("n_heads", self.n_heads),
            dropout_prob=probability("dropout_prob", self.dropout_prob),
            dropout_probs=frozen_list(owner, "dropout_probs", self.dropout_probs, probability),
            activations=frozen_list(owner, "activations", self.activations, activation),
        )
        layers = self._n_hidden()
        for field in ("activations", "dropout_probs"):
            values = getattr(self, field)
            if values is not None and layers is not None and len(values) != layers:
                check.refuse(owner, field, values, f"one entry for each of {layers} hidden layers")

    def _n_hidden(self) -> int | None:
        """How many entries a per-layer list has; ``None`` when nothing reads them."""
        return len(self.hidden_dims or ())

    @property
    def dims(self) -> list[int]:
        """All widths, input first, output last."""
        return [self.input_dim, *(self.hidden_dims or ()), self.output_dim]

    def activation_for(self, layer_idx: int) -> Activations:
        """The activation after hidden layer ``layer_idx`` (from 0)."""
        chosen = self.activation if self.activations is None else self.activations[layer_idx]
        return Activations.LEAKY_RELU if chosen is None else chosen

    def dropout_for(self, layer_idx: int) -> float:
        """The dropout probability after hidden layer ``layer_idx`` (from 0)."""
        return self.dropout_prob if self.dropout_probs is None else self.dropout_probs[layer_idx]

    @classmethod
    def _from_file(cls, state: Any) -> Any:
        return NNParams.resolve_from_state(state) if cls is NNParams else cls.from_state(state)

    @staticmethod
    def resolve_from_state(state: Mapping[str, Any]) -> NNParams:
        """Rebuild the params class that wrote ``state``, told apart by its own keys."""
        found = state if isinstance(state, Mapping) else ()
        kinds = (cls for key, cls in _own_classes().values() if key in found)
        return next(kinds, NNParams).from_state(state)


@dataclass(frozen=True, kw_only=True, slots=True)
class NNConvParams(NNParams):
    """A convolutional network over square images that arrive flat or as (N, C, H, W).

    ``input_dim`` is ``in_channels * side * side``. Each entry of
    ``conv_channels`` is one block: convolution, ``activation``, max-pool. Per-layer
    lists name the dense hidden layers, which the blocks precede.
    """

    conv_channels: list[int]
    in_channels: int = 1
    kernel_size: int = 5
    stride: int = 1
    padding: int = 0
    pool_size: int = 2

    _STATE: ClassVar[tuple[StateField, ...]] = (
        *NNParams._STATE,
        always("conv_channels", encode=str, decode=read_literal),
        optional("in_channels"),
        optional("kernel_size"),
        optional("stride"),
        optional("padding"),
        optional("pool_size"),
    )

    def __post_init__(self) -> None:
        owner = type(self).__name__

        def dim(field: str, value: Any) -> int:
            return check.count(owner, field, value)

        put(
            self,
            conv_channels=frozen_list(owner, "conv_channels", self.conv_channels, dim),
            **{
                f: dim(f, getattr(self, f))
                for f in ("in_channels", "kernel_size", "stride", "pool_size")
            },
            padding=check.count(owner, "padding", self.padding, at_least=0),
        )
        if not self.conv_channels:
            check.refuse(owner, "conv_channels", self.conv_channels, "a list of at least one width")
        NNParams._check(self)
        self.spatial_sizes()

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> NNConvParams:
        """Rebuild from :meth:`state`; per-layer lists of an earlier form name the blocks first."""
        return super(NNConvParams, cls).from_state(_without_blocks(state))

    def image_side(self) -> int:
        """The side of the square input image, in pixels."""
        pixels, rest = divmod(self.input_dim, self.in_channels)
        side = math.isqrt(pixels)
        if rest or side * side != pixels:
            check.refuse(
                type(self).__name__,
                "input_dim",
                self.input_dim,
                f"in_channels ({self.in_channels}) times a square number of pixels",
            )
        return side

    def spatial_sizes(self) -> list[int]:
        """The side of the feature map after each block."""
        sizes: list[int] = []
        size = self.image_side()
        for block in range(len(self.conv_channels)):
            convolved = (size + 2 * self.padding - self.kernel_size) // self.stride + 1
            pooled = convolved // self.pool_size
            if size + 2 * self.padding < self.kernel_size or pooled < 1:
                raise ValueError(
                    f"{type(self).__name__}.conv_channels[{block}] gets a feature map of "
                    f"{size}x{size}, too small for kernel_size={self.kernel_size}, "
                    f"padding={self.padding} and pool_size={self.pool_size}; use fewer blocks, "
                    "a smaller kernel or more padding"
                )
            sizes.append(pooled)
            size = pooled
        return sizes

    def flatten_dim(self) -> int:
        """How many features the last block hands to the dense layers."""
        return self.conv_channels[-1] * self.spatial_sizes()[-1] ** 2


def _without_blocks(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """``state`` with lists for the dense layers alone, where it has entries for blocks too."""
    channels = read_literal(state.get("conv_channels"))
    blocks, layers = len(channels or ()), len(read_literal(state.get("hidden_dims")) or ())
    changed: dict[str, Any] = {}
    for key in ("activations", "dropout_probs"):
        values = read_literal(state.get(key))
        if blocks and values is not None and len(values) == blocks + layers:
            if key == "activations" and set(values[:blocks]) != {state.get("activation")}:
                raise ValueError(
                    f"NNConvParams.activations {values} give convolution blocks an activation of "
                    "their own, which is no longer supported: the blocks have `activation`"
                )
            changed[key] = str(values[blocks:])
    return {**state, **changed}


@dataclass(frozen=True, kw_only=True, slots=True)
class NNMoEParams(NNParams):
    """A feed-forward network whose hidden layers are mixtures of experts."""

    num_experts: int
    top_k: int = 2
    capacity_factor: float | None = None

    _STATE: ClassVar[tuple[StateField, ...]] = (
        *NNParams._STATE,
        always("num_experts"),
        optional("top_k"),
        optional("capacity_factor"),
    )

    def __post_init__(self) -> None:
        NNParams._check(self)
        owner = type(self).__name__
        put(self, num_experts=check.count(owner, "num_experts", self.num_experts, at_least=2))
        put(self, top_k=check.count(owner, "top_k", self.top_k, at_most=self.num_experts))
        if self.capacity_factor is not None:
            limit = check.real(owner, "capacity_factor", self.capacity_factor, above=0)
            put(self, capacity_factor=float(limit))


def _own_classes() -> dict[Nets, tuple[str, type[NNParams]]]:
    """The networks with params of their own: a key that only those write, and the class."""
    from nnx.params.transformer import NNTransformerParams, NNViTParams

    return {
        Nets.TRANSFORMER: ("vocab_size", NNTransformerParams),
        Nets.VIT: ("image_size", NNViTParams),
        Nets.CONV: ("conv_channels", NNConvParams),
        Nets.FEED_FWD_MOE: ("num_experts", NNMoEParams),
    }


def net_of(params: NNParams) -> Nets:
    """The network that ``params`` describe; of those that share theirs, the feed-forward one."""
    own = {cls: net for net, (_, cls) in _own_classes().items()}
    return own.get(type(params), Nets.FEED_FWD)


def check_net_params(net: Nets, params: Any) -> None:
    """Raise ``ValueError`` unless ``params`` describe the network ``net``."""
    own = {key: cls for key, (_, cls) in _own_classes().items()}
    needed = own.get(net, NNParams)
    if type(params) is not needed:
        why = " (a subclass is not: a run would load without what it adds)"
        raise ValueError(
            f"Nets.{net.name} is built from {needed.__name__}, not {check.show(params)}"
            + why * isinstance(params, needed)
        )
