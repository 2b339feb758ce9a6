"""Shows: a small net of 100 digits learns more from a trained net than from their labels."""

from __future__ import annotations

import torch
from nnx import (
    Losses,
    Nets,
    NNModel,
    NNModelParams,
    NNOptimParams,
    NNParams,
    NNTrainParams,
    kd_objective,
    set_seed,
)
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

found = load_digits()
order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
X = torch.tensor(found.data / 16, dtype=torch.float32)[order]
Y = torch.tensor(found.target)[order]
HELD = DataLoader(TensorDataset(X[1000:], Y[1000:]), batch_size=400)


def classifier(hidden: int, seed: int, dropout: float = 0.0) -> NNModel:
    set_seed(seed)
    return NNModel(
        net_params=NNParams(
            input_dim=64, output_dim=10, hidden_dims=[hidden], dropout_prob=dropout
        ),
        params=NNModelParams(net=Nets.FEED_FWD, loss=Losses.CROSS_ENTROPY),
    )


def params(rows: int, epochs: int, seed: int, data_id: str) -> NNTrainParams:
    return NNTrainParams(
        n_epochs=epochs,
        seed=seed,
        data_id=data_id,
        train_loader=DataLoader(TensorDataset(X[:rows], Y[:rows]), batch_size=32, shuffle=True),
        optim=NNOptimParams.builder().adamw(max_lr=3e-3).build(),
        save_phase_checkpoints=False,
    )


teacher = classifier(256, 100, dropout=0.5)
run = teacher.train(params(1000, 15, 100, "teacher"))

alone, taught = classifier(32, 0), classifier(32, 0)
alone.train(params(100, 100, 0, "alone"))
objective = kd_objective(teacher, alpha=0.9, temperature=6.0, teacher_run=run.id)
taught.train(params(100, 100, 0, "taught"), objective=objective)
scores = [student.evaluate(HELD).accuracy for student in (alone, taught)]
print(f"accuracy alone {scores[0]:.3f}, taught {scores[1]:.3f}")
assert scores[1] > scores[0] + 0.01
