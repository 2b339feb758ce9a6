"""Proof that travels: the written files run against their source on fixed prompts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from nnx.errors import NNxError
from nnx.lm.transformer import TransformerNN
from nnx.utils.modes import eval_mode

TOLERANCE = 1e-4
"""The largest difference of two float32 logits that is rounding."""

PROMPTS, TOKENS = 2, 16


class ParityError(ValueError, NNxError):
    """Written files that do not compute what their source does; they were removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """How the written model compares with its source.

    Over ``tokens`` positions of seeded prompts: the largest difference of two logits, the mean
    Kullback-Leibler divergence of the next token in nats, and the share of positions with the
    same most probable token. ``by`` read the files.
    """

    by: str
    tokens: int
    max_logit_difference: float
    kl_divergence: float
    greedy_agreement: float
    tolerance: float | None

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


def prompts(net: TransformerNN) -> torch.Tensor:
    """The fixed token ids, (2, up to 16)."""
    length = min(TOKENS, net.params.max_seq_len)
    drawn = torch.Generator().manual_seed(0)
    return torch.randint(net.params.vocab_size, (PROMPTS, length), generator=drawn)


def compare(
    net: TransformerNN,
    written: Callable[[torch.Tensor], torch.Tensor],
    *,
    by: str,
    tolerance: float | None,
    off: Callable[[], str],
) -> Parity:
    """Compare logits (B, T, vocab) of ``written`` with those of ``net``, in float64.

    Raises :class:`ParityError` beyond ``tolerance``; ``off()`` names the tensor.
    """
    tokens = prompts(net)
    device = net.norm_out.weight.device
    with eval_mode(net), torch.inference_mode():
        source = net(tokens.to(device)).double().cpu()
        found = written(tokens).double().cpu()
    difference = float((source - found).abs().max())
    expected, other = source.log_softmax(-1), found.log_softmax(-1)
    divergence = (expected.exp() * (expected - other)).sum(-1).mean()
    parity = Parity(
        by=by, tokens=tokens.numel(), max_logit_difference=difference,
        kl_divergence=max(0.0, float(divergence)),
        greedy_agreement=float((source.argmax(-1) == found.argmax(-1)).double().mean()),
        tolerance=tolerance,
    )  # fmt: skip
    if tolerance is not None and not difference <= tolerance:
        raise ParityError(
            f"the written model's logits differ by {difference:.3g} from the source's, more than "
            f"{tolerance:g}: {off()}. Nothing was kept"
        )
    return parity


def first_difference(pairs: Any, most: Callable[[str, Any], float]) -> str:
    """Which of ``(name, source, written)`` tensors is off by more than ``most`` allows."""
    worst = "no tensor is off, so the reader computes something else"
    excess = 0.0
    for name, source, written in pairs:
        if tuple(source.shape) != tuple(written.shape):
            return f"{name} has the shape {tuple(written.shape)}, not {tuple(source.shape)}"
        if torch.equal(source, written):
            continue
        gap = float((source.double() - written.double()).abs().max())
        gap = math.inf if math.isnan(gap) else gap
        if gap > most(name, source) and gap > excess:
            worst, excess = f"{name} is off by {gap:.3g}", gap
    return worst
