"""Byte-pair tokenizers trained on plain text (Sennrich et al. 2016, arXiv:1508.07909)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from nnx.utils import validation as check

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def train_bpe(
    files: Sequence[str] | None = None,
    *,
    vocab_size: int = 8192,
    texts: Iterable[str] | None = None,
    special_tokens: Sequence[str] | None = None,
    min_frequency: int = 2,
    byte_level: bool = False,
) -> Tokenizer:
    """A byte-pair tokenizer of at most ``vocab_size`` tokens, trained on ``files`` or ``texts``.

    Words are what whitespace and punctuation separate, and decoding joins tokens
    with spaces. ``byte_level=True`` keeps every byte, so that decoding gives the
    text back exactly and no character is unknown; generation wants that.

    ``special_tokens`` get the first ids, in their order. ``min_frequency`` is how
    often a pair must occur to be merged.

    Raises ``ValueError`` unless exactly one of ``files`` and ``texts`` is given.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    check.count("train_bpe", "vocab_size", vocab_size)
    check.count("train_bpe", "min_frequency", min_frequency, at_least=0)
    if (files is None) == (texts is None):
        raise ValueError("train_bpe reads either files=[...] or texts=[...]: give one of them")
    alphabet: list[str] = []
    if byte_level:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=list(special_tokens or ()),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    if files is not None:
        tokenizer.train(_existing(files), trainer)
    else:
        tokenizer.train_from_iterator(_strings(texts or ()), trainer)
    return tokenizer


def _existing(files: Any) -> list[str]:
    if isinstance(files, (str, bytes, os.PathLike)):
        raise TypeError(f"train_bpe reads a list of files, not one path: files=[{files!r}]")
    paths = [os.fspath(path) for path in files]
    for path in paths:
        if not os.path.isfile(path):
            raise FileNotFoundError(f"train_bpe cannot read {path!r}: it is no file")
    return paths


def _strings(texts: Any) -> Any:
    if isinstance(texts, (str, bytes)):
        raise TypeError("train_bpe reads a list of texts, not one string: texts=[text]")
    return texts
