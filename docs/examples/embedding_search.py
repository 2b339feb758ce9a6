"""Shows: a language model becomes a text embedder whose FAISS index finds the answer to a question."""

from __future__ import annotations

import torch
from nnx import Nets, NNTokenizerParams, NNTransformerParams, set_seed, train_bpe
from nnx.embeddings import TokenEncoder, export_to_faiss, search_faiss, train_contrastive

PAIRS = [
    ("how do i stop a training", "training ends early when a callback asks for it"),
    ("where are my runs", "every run is a directory below the runs folder"),
    ("how do i continue a killed run", "a stateful resume goes on where the process was killed"),
    ("which epoch was best", "the best checkpoint is elected by the monitor"),
    ("can i use two optimizers", "a trainer holds several named optimizers"),
    ("how do i add an adapter", "low rank adapters wrap the linear layers of a frozen net"),
]
texts = [text for pair in PAIRS for text in pair]
tokenizer = NNTokenizerParams.of(train_bpe(texts=texts * 3, vocab_size=300), "tokenizer.json")
shape = NNTransformerParams.builder().vocab(tokenizer.vocab_size).context(max_seq_len=32)

set_seed(0)
encoder = TokenEncoder(Nets.TRANSFORMER(shape.layers(n=1, heads=2, d_model=32).build()), tokenizer)
train_contrastive(encoder, PAIRS, n_epochs=40, batch_size=6, lr=3e-3)

questions, answers = zip(*PAIRS)
numbers = [100 + i for i in range(len(answers))]
path = export_to_faiss(encoder, list(answers), "answers.faiss", ids=numbers)
scores, found = search_faiss(encoder, path, list(questions), k=1)
right = sum(int(a) == b for a, b in zip(found[:, 0], numbers))
print(f"{right} of {len(PAIRS)} questions find their answer")
assert torch.tensor(scores).max() <= 1.0001  # cosines
