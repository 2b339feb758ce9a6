"""Shows: whole graphs are told apart by their shape, and a copy between splits is found."""

from __future__ import annotations

import networkx
import torch
from nnx import (
    Checkpoints,
    Losses,
    NNCheckpoint,
    NNModel,
    NNModelParams,
    NNOptimParams,
    NNTrainParams,
    TaskSpec,
)
from nnx.graph_tasks import IGNORE, GraphCollection, graph_classifier_spec
from torch_geometric.data import Data


def drawn(kind: int, seed: int) -> Data:
    """A random tree, or a graph of as many nodes with many triangles."""
    nodes = 10 + seed % 7
    shape = (
        networkx.random_labeled_tree(nodes, seed=seed)
        if kind == 0
        else networkx.watts_strogatz_graph(nodes, 4, 0.1, seed=seed)
    )
    edges = torch.tensor(list(shape.edges)).T
    return Data(x=torch.ones(nodes, 1), edge_index=torch.cat([edges, edges.flip(0)], dim=1))


kinds = [i % 2 for i in range(120)]
graphs = [drawn(kind, seed) for seed, kind in enumerate(kinds)]
targets = [None if i % 10 == 0 else kind for i, kind in enumerate(kinds)]
everything = GraphCollection(
    graphs, range(120), targets=targets, unlabeled=range(0, 120, 10), num_classes=2
)
train, test = everything.subset(range(80)), everything.subset(range(80, 120))

spec = graph_classifier_spec(
    input_dim=1, num_classes=2, hidden_dims=(16, 16), encoder="gin", pool="sum"
)
model = NNModel(
    params=NNModelParams(
        net=spec, loss=Losses.CROSS_ENTROPY, task=TaskSpec.categorical(2, ignore_index=IGNORE)
    )
)
run = model.train(
    NNTrainParams(
        n_epochs=20, seed=0, train_loader=train.loader(16, shuffle=True, seed=1),
        val_loader=test.loader(40), optim=NNOptimParams.builder().adam(max_lr=0.01).build(),
    )
)  # fmt: skip
record = model.evaluate(test.loader(7))
again = NNModel.from_checkpoint(NNCheckpoint.load(run.id, Checkpoints.LAST))
ids = again.predict_proba(test.loader(9, shuffle=True, seed=2)).sample_ids

order = torch.randperm(graphs[3].num_nodes)
copied = Data(x=graphs[3].x, edge_index=torch.argsort(order)[graphs[3].edge_index])
leak = GraphCollection([copied, graphs[99]], [7, 8], targets=[1, 1])
print(f"{record.count} labelled graphs of {len(test)}: accuracy {record.accuracy:.3f}")
print(f"found in both splits: {train.overlap(leak)}")
assert sorted(ids.tolist()) == list(range(80, 120))
assert (3, 7) in train.overlap(leak)
