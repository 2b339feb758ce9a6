"""A small language model with its tokenizer, in a folder of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from nnx import (
    GenerativeNNModel,
    Losses,
    Nets,
    NNModelParams,
    NNTokenizerParams,
    NNTransformerParams,
    set_seed,
    train_bpe,
)

sys.path.insert(0, str(Path(__file__).parent))  # the helper in llama.py
os.environ.setdefault("NNX_TQDM_DISABLE", "1")

TEXTS = [
    "the cat sat on the mat and looked at the cat",
    "a dog ran over the hill to see the other dog",
    "rain in spain stays mainly in the plain",
    "to be or not to be that is the question",
] * 4


class Kit:
    """The models of the golden values."""

    texts = TEXTS

    @staticmethod
    def tokenizer(path="tok.json", **options):
        trained = train_bpe(
            texts=TEXTS, vocab_size=120, special_tokens=["<pad>", "<eos>"], **options
        )
        return NNTokenizerParams.of(trained, path)

    @staticmethod
    def shape(vocab=40, *, n=2, heads=2, d_model=32, context=48, drop=0.0, tied=True, **other):
        builder = (
            NNTransformerParams.builder()
            .vocab(vocab)
            .layers(n=n, heads=heads, d_model=d_model)
            .context(max_seq_len=context)
            .dropout(attn=drop, resid=drop)
            .tied_embeddings(tied)
        )
        for name, value in other.items():
            getattr(builder, name)(value)
        return builder.build()

    @classmethod
    def net(cls, vocab=40, *, seed=11, **shape):
        set_seed(seed)
        return Nets.TRANSFORMER(params=cls.shape(vocab, **shape))

    @classmethod
    def model(cls, *, seed=11, byte_level=False, tokenizer=None, **shape):
        set_seed(seed)
        tokenizer = tokenizer or cls.tokenizer(byte_level=byte_level)
        return GenerativeNNModel(
            net_params=cls.shape(tokenizer.vocab_size, **shape),
            params=NNModelParams(net=Nets.TRANSFORMER, loss=Losses.CROSS_ENTROPY),
            tokenizer=tokenizer,
        )


@pytest.fixture
def kit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Kit
