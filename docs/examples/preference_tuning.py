"""Shows: preferences are learned against a reference that is kept in a file, not in memory."""

from __future__ import annotations

from nnx import (
    GenerativeNNModel,
    Losses,
    Nets,
    NNModelParams,
    NNOptimParams,
    NNPreferenceDataset,
    NNTokenizerParams,
    NNTrainParams,
    NNTransformerParams,
    set_seed,
    train_bpe,
)
from nnx.lm import DPOObjective, ReferenceLogProbs

ANIMALS = ["cat", "dog", "bird", "fish", "horse", "mouse", "cow", "goat"]
trained = train_bpe(
    texts=[f"the {a} is kind the {a} is cruel" for a in ANIMALS] * 3, vocab_size=200
)
tokenizer = NNTokenizerParams.of(trained, "tokenizer.json")
set_seed(0)
shape = NNTransformerParams.builder().vocab(tokenizer.vocab_size).context(max_seq_len=32)
model = GenerativeNNModel(
    shape.layers(n=2, heads=2, d_model=32).dropout(resid=0.1).build(),
    NNModelParams(net=Nets.TRANSFORMER, loss=Losses.CROSS_ENTROPY),
    tokenizer,
)
pairs = NNPreferenceDataset(
    prompts=[f"the {a} is" for a in ANIMALS],
    chosen=["kind"] * 8,
    rejected=["cruel"] * 8,
    tokenizer=tokenizer,
    batch_sizes=(3, 2, 2),
    val_proportion=0.25,
    test_proportion=0.0,
    seed=0,
)
reference = ReferenceLogProbs.cached("reference.safetensors", model, pairs)
stored = pairs.with_reference(reference)
objective = DPOObjective(beta=0.2)
params = NNTrainParams(
    n_epochs=20,
    seed=0,
    train_loader=stored.train_loader,
    val_loader=stored.val_loader,
    optim=NNOptimParams.builder().adamw(max_lr=3e-3).build(),
)
run = model.train(params, objective=objective, eval_step_fn=objective.eval_step())
first, last = run.idps[0].train_edp.loss, run.idps[-1].val_edp
print(f"loss {first:.4f} at the first step, {last.loss:.4f} on unseen pairs at the end")
print(f"{last.metrics['reward_accuracy']:.0%} of them are told apart")
