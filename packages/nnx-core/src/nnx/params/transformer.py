"""Shapes of transformers: decoder-only language models and vision transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from nnx.params.base import StateField, always, optional, put
from nnx.params.net import NNParams
from nnx.utils import validation as check

if TYPE_CHECKING:
    from nnx.params.builders import NNTransformerParamsBuilder


def check_heads(owner: str, d_model: Any, n_heads: Any, *, even: bool) -> tuple[int, int]:
    """``d_model`` splits into ``n_heads`` heads, of an even width where RoPE rotates pairs."""
    width = check.count(owner, "d_model", d_model)
    heads = check.count(owner, "n_heads", n_heads)
    if width % heads:
        check.refuse(owner, "d_model", width, f"a multiple of n_heads ({heads})")
    if even and (width // heads) % 2:
        check.refuse(
            owner,
            "d_model",
            width,
            f"an even multiple of n_heads ({heads}), since rotary embeddings rotate channel pairs",
        )
    return width, heads


@dataclass(frozen=True, kw_only=True, slots=True)
class NNTransformerParams(NNParams):
    """A decoder-only transformer; the inherited per-layer fields are not read by it.

    ``n_kv_heads`` key and value heads are shared by groups of query heads
    (``None``: one each). ``ffn_dim`` is the width of the feed-forward layers
    (``None``: two thirds of ``ffn_mult * d_model``, rounded down). ``norm_eps``
    is added to the mean square in every norm.
    """

    vocab_size: int
    n_layers: int
    d_model: int
    max_seq_len: int
    ffn_mult: int = 4
    rope_base: float = 10000.0
    tie_embeddings: bool = True
    attn_dropout: float = 0.0
    resid_dropout: float = 0.0
    n_kv_heads: int | None = None
    ffn_dim: int | None = None
    norm_eps: float = 1e-6

    _STATE: ClassVar[tuple[StateField, ...]] = (
        *NNParams._STATE,
        always("n_layers"),
        always("d_model"),
        always("vocab_size"),
        always("max_seq_len"),
        optional("ffn_mult"),
        optional("rope_base"),
        optional("tie_embeddings"),
        optional("attn_dropout"),
        optional("resid_dropout"),
        optional("n_kv_heads"),
        optional("ffn_dim"),
        optional("norm_eps"),
    )

    def __post_init__(self) -> None:
        NNParams._check(self)
        owner = type(self).__name__
        counts = ("vocab_size", "n_layers", "max_seq_len", "ffn_mult")
        put(self, **{name: check.count(owner, name, getattr(self, name)) for name in counts})
        d_model, n_heads = check_heads(owner, self.d_model, self.n_heads, even=True)
        put(
            self,
            d_model=d_model,
            n_heads=n_heads,
            rope_base=check.real(owner, "rope_base", self.rope_base, above=0),
            tie_embeddings=check.flag(owner, "tie_embeddings", self.tie_embeddings),
            norm_eps=check.real(owner, "norm_eps", self.norm_eps, at_least=0),
            **_dropouts(owner, self),
        )
        if self.ffn_dim is not None:
            put(self, ffn_dim=check.count(owner, "ffn_dim", self.ffn_dim))
            if self.ffn_mult != 4:
                raise ValueError(
                    f"{owner}.ffn_dim is the width itself and ffn_mult={self.ffn_mult} another "
                    "way to say it: give one of them"
                )
        if self.n_kv_heads is not None:
            put(self, n_kv_heads=check.count(owner, "n_kv_heads", self.n_kv_heads, at_most=n_heads))
            if n_heads % self.kv_heads:
                domain = f"a divisor of n_heads ({n_heads})"
                check.refuse(owner, "n_kv_heads", self.n_kv_heads, domain)

    def _n_hidden(self) -> None:
        return None

    @property
    def kv_heads(self) -> int:
        """How many key and value heads a layer has."""
        heads = self.n_heads if self.n_kv_heads is None else self.n_kv_heads
        assert heads is not None
        return heads

    @property
    def ffn_width(self) -> int:
        """The width of the feed-forward layers."""
        return 2 * self.ffn_mult * self.d_model // 3 if self.ffn_dim is None else self.ffn_dim

    @classmethod
    def builder(cls) -> NNTransformerParamsBuilder:
        """A builder that asks only for what the network reads."""
        from nnx.params.builders import NNTransformerParamsBuilder

        return NNTransformerParamsBuilder()


@dataclass(frozen=True, kw_only=True, slots=True)
class NNViTParams(NNParams):
    """A vision transformer over square patches of square images."""

    image_size: int
    patch_size: int
    d_model: int
    n_layers: int
    in_channels: int = 3
    ffn_mult: int = 4
    attn_dropout: float = 0.0
    resid_dropout: float = 0.0

    _STATE: ClassVar[tuple[StateField, ...]] = (
        *NNParams._STATE,
        always("image_size"),
        always("patch_size"),
        always("d_model"),
        always("n_layers"),
        optional("in_channels"),
        optional("ffn_mult"),
        optional("attn_dropout"),
        optional("resid_dropout"),
    )

    def __post_init__(self) -> None:
        NNParams._check(self)
        owner = type(self).__name__
        counts = ("image_size", "patch_size", "n_layers", "in_channels", "ffn_mult")
        put(self, **{name: check.count(owner, name, getattr(self, name)) for name in counts})
        if self.image_size % self.patch_size:
            check.refuse(
                owner,
                "image_size",
                self.image_size,
                f"a multiple of patch_size ({self.patch_size})",
            )
        d_model, n_heads = check_heads(owner, self.d_model, self.n_heads, even=False)
        put(self, d_model=d_model, n_heads=n_heads, **_dropouts(owner, self))

    def _n_hidden(self) -> None:
        return None

    @property
    def n_patches(self) -> int:
        """How many patches an image is cut into."""
        return (self.image_size // self.patch_size) ** 2


def _dropouts(owner: str, params: Any) -> dict[str, Any]:
    return {
        name: check.real(owner, name, getattr(params, name), at_least=0, at_most=1)
        for name in ("attn_dropout", "resid_dropout")
    }
