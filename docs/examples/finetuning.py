"""Shows: with its first layers frozen, a trained net learns a new task and keeps those bits."""

from __future__ import annotations

import torch
from nnx import Nets, NNModel, NNModelParams, NNParams, NNTrainParams, load_pretrained
from torch.utils.data import DataLoader, TensorDataset


def loader(classes: int, n: int = 240) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(n, 8, generator=generator)
    y = (X[:, :classes]).argmax(1)
    return DataLoader(TensorDataset(X, y), batch_size=24, shuffle=True)


def net(classes: int) -> NNModel:
    return NNModel(
        NNParams(input_dim=8, output_dim=classes, hidden_dims=[32, 16], dropout_prob=0.0),
        NNModelParams(net=Nets.FEED_FWD),
    )


torch.manual_seed(0)
source = net(classes=4)
source.train(NNTrainParams(n_epochs=15, seed=0, train_loader=loader(4)))

target = net(classes=2)
trunk = {name: w for name, w in source.net.state_dict().items() if not name.startswith("layers.2")}
result = load_pretrained(target.net, trunk)
frozen = target.freeze("layers.0.*", "layers.1.*")
before = {name: weight.clone() for name, weight in target.net.state_dict().items()}
target.train(NNTrainParams(n_epochs=10, seed=0, train_loader=loader(2)))

after = target.net.state_dict()
kept = [name for name in after if torch.equal(after[name], before[name])]
accuracy = target.evaluate(loader(2)).accuracy
print(f"{frozen} tensors frozen and unchanged, {len(after) - len(kept)} trained")
print(f"accuracy on the new task: {accuracy:.3f}")
assert sorted(kept) == sorted(trunk)
assert accuracy > 0.75
