"""Shows: a long training keeps a bounded history in memory and all of it on disk."""

from __future__ import annotations

import torch
from nnx import Callback, Nets, NNModel, NNModelParams, NNParams, NNRun, NNTrainParams
from nnx.history import HistoryJournal, export_history_csv, iter_history
from torch.utils.data import DataLoader, TensorDataset


class Watch(Callback):
    most = 0

    def on_epoch_end(self, ctx):
        self.most = max(self.most, len(ctx.idps))


torch.manual_seed(0)
X = torch.randn(400, 4)
model = NNModel(
    NNParams(input_dim=4, output_dim=2, hidden_dims=[8], dropout_prob=0.0),
    NNModelParams(net=Nets.FEED_FWD),
)
watch = Watch()
run = model.train(
    NNTrainParams(
        n_epochs=10,
        seed=0,
        train_loader=DataLoader(TensorDataset(X, (X[:, 0] > 0).long()), batch_size=10),
    ),
    callbacks=[watch],
    history=HistoryJournal(retention=60, chunk_size=50),
)

losses = [record.train_edp.loss for record in iter_history(run.id)]
export_history_csv(run.id, "history.csv")
with open("history.csv", encoding="utf-8") as table:
    rows = sum(1 for _ in table) - 1
print(f"{len(losses)} records on disk, at most {watch.most} in memory, {rows} rows exported")
assert len(losses) == rows == 400
assert watch.most <= 60
assert len(NNRun.load(run.id).idps) <= 60
assert sum(losses[-40:]) < sum(losses[:40])
