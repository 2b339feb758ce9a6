"""Shows: an encoder that never saw a label is read by a linear probe far better than before."""

from __future__ import annotations

import torch
from nnx import Losses, NNModel, NNModelParams, NNOptimParams, NNTrainParams, set_seed
from nnx.paradigms import EmbeddingProbe, simclr_objective
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

found = load_digits()
order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
X = torch.tensor(found.images / 16, dtype=torch.float32)[order]
Y = torch.tensor(found.target)[order]


class Views:
    """Two looks at every image: brighter or darker, noisy, with holes."""

    def __init__(self, images: torch.Tensor, size: int) -> None:
        self.images, self.size = images, size
        self.generator = torch.Generator().manual_seed(0)  # saved and resumed with the run

    def __len__(self) -> int:
        return len(self.images) // self.size

    def __iter__(self):
        rows = torch.randperm(len(self.images), generator=self.generator)
        for batch in rows.split(self.size):
            yield self.seen(self.images[batch]), self.seen(self.images[batch])

    def seen(self, images: torch.Tensor) -> torch.Tensor:
        draw = self.generator
        bright = 0.7 + 0.6 * torch.rand(len(images), 1, 1, generator=draw)
        noisy = bright * images + 0.1 * torch.randn(images.shape, generator=draw)
        return noisy * (torch.rand(images.shape, generator=draw) > 0.15)


class Encoder(nn.Module):
    """The body is what we want; the head is for the comparison alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))

    def unpack_batch(self, batch):
        return (batch[0],), batch[1]


set_seed(0)
model = NNModel(module=Encoder(), params=NNModelParams(loss=Losses.CROSS_ENTROPY))
labelled = DataLoader(TensorDataset(X[:1000], Y[:1000]), batch_size=500)
probe = EmbeddingProbe(labelled, embed=lambda net, x: net.body(x).relu())


def params(epochs: int, lr: float) -> NNTrainParams:
    return NNTrainParams(
        n_epochs=epochs,
        seed=0,
        train_loader=Views(X[:1000], 100),
        val_loader=DataLoader(TensorDataset(X[1000:], Y[1000:]), batch_size=400),
        metrics=probe.metric_specs(),
        optim=NNOptimParams.builder().adamw(max_lr=lr).build(),
        data_id=f"digits, {epochs} epochs",
        save_phase_checkpoints=False,
    )


scores = []
for epochs, lr in ((1, 1e-9), (8, 3e-3)):  # as good as untrained, and trained
    run = model.train(
        params(epochs, lr), objective=simclr_objective(temperature=0.2), eval_step_fn=probe
    )
    scores.append(run.idps[-1].val_edp.metrics)
for name, score in zip(("untrained", "trained"), scores):
    print(
        f"{name}: linear probe {score['linear_accuracy']:.3f}, neighbours {score['knn_accuracy']:.3f}"
    )
assert scores[1]["linear_accuracy"] > scores[0]["linear_accuracy"] + 0.1
