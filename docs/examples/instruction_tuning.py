"""Shows: a model tuned on conversations answers each question with its answer, and stops."""

from __future__ import annotations

from nnx import (
    GenerativeNNModel,
    Losses,
    Nets,
    NNModelParams,
    NNOptimParams,
    NNTokenizerParams,
    NNTrainParams,
    NNTransformerParams,
    set_seed,
    train_bpe,
)
from nnx.lm import ChatDataset, reply
from nnx.lm.chat import SPECIAL_TOKENS
from nnx.lm_tasks import CausalLMTask
from torch.utils.data import DataLoader

ANSWERS = {
    "where is the cat?": "on the mat",
    "where is the dog?": "over the hill",
    "who runs?": "the dog",
}

trained = train_bpe(
    texts=[*ANSWERS, *ANSWERS.values()] * 5,
    vocab_size=320,
    special_tokens=[*SPECIAL_TOKENS],
    byte_level=True,
)
tokenizer = NNTokenizerParams.of(trained, "tokenizer.json")
chats = [
    [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    for asked, answer in ANSWERS.items()
]
data = ChatDataset([{"messages": chat} for chat in chats], tokenizer)

set_seed(0)
shape = NNTransformerParams.builder().vocab(tokenizer.vocab_size).context(max_seq_len=64)
model = GenerativeNNModel(
    shape.layers(n=2, heads=2, d_model=48).build(),
    NNModelParams(net=Nets.TRANSFORMER, loss=Losses.CROSS_ENTROPY),
    tokenizer,
)
params = NNTrainParams(
    n_epochs=50,
    seed=0,
    train_loader=DataLoader(data, batch_size=3, collate_fn=data.collate),
    optim=NNOptimParams.builder().adamw(max_lr=1e-2).build(),
)
model.train(params, objective=CausalLMTask(vocab_size=tokenizer.vocab_size).objective())

right = sum(
    reply(model, chat[:1], temperature=0, max_new_tokens=40) == chat[1]["content"] for chat in chats
)
print(f"{right} of {len(chats)} questions are answered")
assert right == len(chats)
