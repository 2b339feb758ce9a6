"""Shows: a module of your own with named inputs trains, predicts and is resumed unchanged."""

from __future__ import annotations

import torch
from nnx import Checkpoints, KeywordInputs, NNCheckpoint, NNModel, NNModelParams, NNTrainParams
from torch import nn


class TwoTowers(nn.Module):
    """Nothing here knows of NNx."""

    def __init__(self):
        super().__init__()
        self.words = nn.EmbeddingBag(50, 16)
        self.numbers = nn.Linear(3, 16)
        self.head = nn.Linear(16, 2)

    def forward(self, *, tokens, features):
        return self.head(torch.relu(self.words(tokens) + self.numbers(features)))


generator = torch.Generator().manual_seed(0)
tokens = torch.randint(0, 50, (200, 6), generator=generator)
features = torch.randn(200, 3, generator=generator)
labels = ((tokens < 10).any(1) ^ (features[:, 0] > 1)).long()
batches = [
    {"tokens": t, "features": f, "labels": y, "row": r}
    for t, f, y, r in zip(
        tokens.split(20), features.split(20), labels.split(20), torch.arange(200).split(20)
    )
]


def wrap(module: nn.Module) -> NNModel:
    adapter = KeywordInputs(["tokens", "features"], target="labels")  # "row" is ignored
    return NNModel(module=module, params=NNModelParams(), batch_adapter=adapter)


torch.manual_seed(0)
model = wrap(TwoTowers())
run = model.train(NNTrainParams(n_epochs=30, seed=0, train_loader=batches))
accuracy = model.evaluate(batches).accuracy
classes = model.predict({"tokens": tokens[:5], "features": features[:5]}).classes

restored = NNModel.from_checkpoint(
    NNCheckpoint.load(run.id, Checkpoints.LAST),
    module=TwoTowers(),  # code is never stored: the instance is yours to make
    batch_adapter=KeywordInputs(["tokens", "features"], target="labels"),
)
print(f"accuracy {accuracy:.3f}; the first rows are of classes {list(map(int, classes))}")
assert accuracy > 0.9
assert restored.evaluate(batches).accuracy == accuracy
