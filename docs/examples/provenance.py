"""Shows: two runs that look alike are told apart by the data that they declare."""

from __future__ import annotations

import torch
from nnx import Nets, NNModel, NNModelParams, NNParams, NNTrainParams
from nnx.provenance import ExperimentManifest, compare, hash_bytes
from torch.utils.data import DataLoader, TensorDataset


def train(rows: torch.Tensor, salt: str) -> str:
    """One run, with a statement of what it is meant to be."""
    labels = (rows[:, 0] > 0).long()
    manifest = ExperimentManifest(
        task={"kind": "categorical"},
        labels=["negative", "positive"],
        model={"net": "feed_fwd", "hidden": [8]},
        data={"train": hash_bytes(rows.numpy().tobytes())},
        splits={"train": "all rows"},
        objective={"id": "cross-entropy"},
        config={"epochs": 2},
    )
    torch.manual_seed(0)
    model = NNModel(
        NNParams(input_dim=4, output_dim=2, hidden_dims=[8], dropout_prob=0.0),
        NNModelParams(net=Nets.FEED_FWD),
    )
    loader = DataLoader(TensorDataset(rows, labels), batch_size=16)
    params = NNTrainParams(n_epochs=2, seed=0, train_loader=loader)
    return model.train(params, salt=salt, provenance=manifest).id


torch.manual_seed(1)
rows = torch.randn(64, 4)
first, again = train(rows, "first"), train(rows, "again")
edited = rows.clone()
edited[7, 2] += 0.001
other = train(edited, "edited")

same, different = compare(first, again), compare(first, other)
paths = sorted({field.path for field in different.differences})
print(
    f"differences: {[f.path for f in same.differences]} with the same rows, {paths} with one cell edited"
)
assert not same.differences
assert paths
assert all(path.startswith("data.train") for path in paths)
