"""Shapes of transformers: decoder-only language models and vision transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from nnx.params.base import StateField, always, optional, put
from nnx.params.builder import Builder
from nnx.params.net import NNParams
from nnx.utils import validation as check


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


class NNTransformerParamsBuilder(Builder[NNTransformerParams]):
    """Asks only for what a transformer reads; the inherited fields get their quiet values."""

    _builds = NNTransformerParams
    _needs: ClassVar[Mapping[str, str]] = {
        "vocab_size": ".vocab(size=...)",
        "n_layers": ".layers(n=..., heads=..., d_model=...)",
        "max_seq_len": ".context(max_seq_len=...)",
    }

    def __init__(self) -> None:
        super().__init__()
        self._fields["dropout_prob"] = 0.0

    def vocab(self, size: int) -> NNTransformerParamsBuilder:
        """The vocabulary's size, which is also the input and output width."""
        return self._set(vocab_size=size, input_dim=size, output_dim=size)

    def layers(self, *, n: int, heads: int, d_model: int) -> NNTransformerParamsBuilder:
        """Depth, attention heads and width; the width is checked against the heads here."""
        owner = self._builds.__name__
        depth = check.count(owner, "n_layers", n)
        width, heads = check_heads(owner, d_model, heads, even=True)
        return self._set(n_layers=depth, n_heads=heads, d_model=width)

    def ffn(self, *, mult: int) -> NNTransformerParamsBuilder:
        """How many times wider than the model its feed-forward layers are."""
        return self._set(ffn_mult=mult)

    def ffn_dim(self, width: int) -> NNTransformerParamsBuilder:
        """The width of its feed-forward layers, where no multiple says it."""
        return self._set(ffn_dim=width)

    def kv_heads(self, n: int) -> NNTransformerParamsBuilder:
        """Key and value heads that groups of query heads share."""
        return self._set(n_kv_heads=n)

    def norm_eps(self, eps: float) -> NNTransformerParamsBuilder:
        """What every norm adds to the mean square."""
        return self._set(norm_eps=eps)

    def context(
        self, *, max_seq_len: int, rope_base: float | None = None
    ) -> NNTransformerParamsBuilder:
        """The longest sequence and the rotary base, together (an omitted base is reset)."""
        chosen = {} if rope_base is None else {"rope_base": rope_base}
        return self._replace(("rope_base",), max_seq_len=max_seq_len, **chosen)

    def dropout(self, *, attn: float = 0.0, resid: float = 0.0) -> NNTransformerParamsBuilder:
        """Attention and residual dropout, together (an omitted rate is reset)."""
        return self._set(attn_dropout=attn, resid_dropout=resid)

    def tied_embeddings(self, value: bool) -> NNTransformerParamsBuilder:
        """Whether the output layer shares the input embedding's weights."""
        return self._set(tie_embeddings=value)
