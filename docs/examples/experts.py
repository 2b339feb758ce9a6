"""Shows: a dense net becomes a mixture of experts that computes the same, and trains on evenly."""

from __future__ import annotations

import torch
from nnx import (
    Losses,
    Nets,
    NNCheckpoint,
    NNModel,
    NNModelParams,
    NNParams,
    NNTrainParams,
    set_seed,
)
from nnx.paradigms import RoutingProbe, expert_loads, moe_objective, upcycle
from torch.utils.data import DataLoader, TensorDataset

set_seed(0)
X = torch.randn(800, 8)
Y = (X[:, 0] * X[:, 1] > 0).long() + 2 * (X[:, 2] > X[:, 3]).long()
train = DataLoader(TensorDataset(X[:600], Y[:600]), batch_size=50, shuffle=True)
held = DataLoader(TensorDataset(X[600:], Y[600:]), batch_size=200)

model = NNModel(
    net_params=NNParams(input_dim=8, output_dim=4, hidden_dims=[32], dropout_prob=0.0),
    params=NNModelParams(net=Nets.FEED_FWD, loss=Losses.CROSS_ENTROPY),
)
params = NNTrainParams(n_epochs=5, seed=0, train_loader=train, val_loader=held)
model.train(params)
before = model.net(X[600:]).detach()

upcycle(model, "layers.0", num_experts=8, top_k=2)  # recorded: checkpoints rebuild it
change = float((model.net(X[600:]).detach() - before).abs().max())
run = model.train(
    params, objective=moe_objective(aux_loss_weight=0.05), eval_step_fn=RoutingProbe()
)

again = NNModel.from_checkpoint(NNCheckpoint.load(run.id, "last"))
assert torch.equal(again.net(X[600:]), model.net(X[600:]))
loads = expert_loads(model.net)["layers.0"]
print(f"changed by {change:.1e} when it became a mixture")
print("loads of the experts in even shares:", " ".join(f"{load:.2f}" for load in loads))
print(f"accuracy {run.idps[-1].val_edp.accuracy:.3f}")
assert change < 1e-5
assert max(loads) < 2.5
