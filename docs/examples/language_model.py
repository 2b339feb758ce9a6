"""Shows: a language model trains on text files, is read back by its id, and writes what it read."""

from __future__ import annotations

from pathlib import Path

from nnx import GenerativeNNModel
from nnx.lm import TextTraining, train_text

SENTENCE = "the run store keeps every epoch on disk and a killed training goes on where it was. "
Path("texts").mkdir()
for i in range(6):
    Path(f"texts/{i}.txt").write_text(SENTENCE * 12, encoding="utf-8")

settings = TextTraining(
    vocab_size=300, layers=2, heads=2, width=48, context=32, batch_size=8, epochs=25
)
_, run = train_text(["texts"], settings=settings)

model = GenerativeNNModel.from_run(run.id)
text = model.generate("the run store", max_new_tokens=12, temperature=0)
print(text)
print(f"perplexity {run.idps[-1].val_edp.metrics['perplexity']:.2f}")
assert SENTENCE.startswith(text[:40]), text
