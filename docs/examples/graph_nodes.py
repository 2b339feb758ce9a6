"""Shows: a graph net learns the clubs of Karate club from one member in eight, and draws it."""

from __future__ import annotations

import networkx
import torch
from nnx import (
    Activations,
    Losses,
    Nets,
    NNGraphDataset,
    NNModel,
    NNModelParams,
    NNOptimParams,
    NNParams,
    NNTrainParams,
    TaskSpec,
    set_seed,
)
from torch_geometric.datasets import KarateClub

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")


def with_test_nodes(graph):
    graph.test_mask = ~graph.train_mask
    return graph


def draw(path: str, edges: list[list[int]], panels: dict[str, list[int]]) -> None:
    """The same layout once per panel, each node in the colour of its class."""
    layout = networkx.spring_layout(networkx.Graph(edges), seed=3)
    at = {node: (130 + 110 * x, 140 + 110 * y) for node, (x, y) in layout.items()}
    parts = []
    for index, (title, classes) in enumerate(panels.items()):
        lines = "".join(
            "<path d='M{:.0f} {:.0f}L{:.0f} {:.0f}'/>".format(*at[u], *at[v])
            for u, v in edges if u < v
        )  # fmt: skip
        nodes = "".join(
            f"<circle cx='{at[n][0]:.0f}' cy='{at[n][1]:.0f}' r='6' fill='{COLOURS[c]}'/>"
            for n, c in enumerate(classes)
        )
        parts.append(
            f"<g transform='translate({270 * index} 0)'><g stroke='#bbb'>{lines}</g>{nodes}"
            f"<text x='130' y='20' text-anchor='middle'>{title}</text></g>"
        )
    with open(path, "w", encoding="utf-8") as stream:
        stream.write(
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {270 * len(panels)} 270' "
            f"font-family='sans-serif' font-size='13'>{''.join(parts)}</svg>\n"
        )


dataset = NNGraphDataset(ds_class=KarateClub, sampler="full", transform=with_test_nodes)
graph = dataset.data
set_seed(0)
model = NNModel(
    NNParams(
        input_dim=dataset.input_dim, output_dim=dataset.output_dim, hidden_dims=[16],
        dropout_prob=0.0, activation=Activations.TANH,
    ),
    NNModelParams(net=Nets.GRAPH_CONV, loss=Losses.CROSS_ENTROPY, task=TaskSpec.categorical(4)),
)  # fmt: skip
before = model.predict([graph]).classes
model.train(
    NNTrainParams(
        n_epochs=60, seed=0, train_loader=dataset.train_loader, val_loader=dataset.test_loader,
        optim=NNOptimParams.builder().adam(max_lr=0.02).build(),
    )
)  # fmt: skip
after = model.predict([graph]).classes
found = model.predict_proba(dataset.test_loader)
known, asked = int(graph.train_mask.sum()), int(graph.test_mask.sum())
accuracy = model.evaluate(dataset.test_loader).accuracy
draw(
    "karate.svg", graph.edge_index.T.tolist(),
    {"before training": before.tolist(), f"after, from {known} members": after.tolist(),
     "the clubs": graph.y.tolist()},
)  # fmt: skip
print(f"{known} members known, accuracy on the other {asked}: {accuracy:.3f}")
assert found.sample_ids.tolist() == graph.test_mask.nonzero().flatten().tolist()
assert (torch.as_tensor(found.class_indices) == torch.as_tensor(after[found.sample_ids])).all()
