"""Graphs that the tests share."""

from __future__ import annotations

import torch
from nnx import NNOptimParams
from torch_geometric.data import Data, InMemoryDataset
from torch_geometric.datasets import KarateClub
from torch_geometric.transforms import RandomNodeSplit


def karate() -> Data:
    return KarateClub()[0]


class Karate(InMemoryDataset):
    """Karate club with validation and test nodes, made where others download."""

    downloads = 0

    def __init__(self, root, transform=None):
        super().__init__(root, transform)
        self.load(self.processed_paths[0])

    @property
    def raw_file_names(self):
        return "karate.txt"

    @property
    def processed_file_names(self):
        return "data.pt"

    def download(self):
        Karate.downloads += 1
        with open(self.raw_paths[0], "w") as stream:
            stream.write("a download stands in for itself")

    def process(self):
        torch.manual_seed(0)
        graph = RandomNodeSplit(num_val=6, num_test=8)(karate())
        self.save([graph], self.processed_paths[0])


class Several:
    """A dataset of more than one graph."""

    def __init__(self, root):
        self.graphs = [karate(), karate()]

    def __len__(self):
        return len(self.graphs)

    def __getitem__(self, i):
        return self.graphs[i]


def random_edges(nodes: int, edges: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, nodes, (2, edges), generator=torch.Generator().manual_seed(seed))


def adam(rate: float = 1e-2) -> NNOptimParams:
    return NNOptimParams.builder().adam(max_lr=rate).build()


def small_graphs(count: int = 12, width: int = 5) -> list[Data]:
    graphs = []
    for i in range(count):
        g, n = torch.Generator().manual_seed(100 + i), 3 + i % 4
        edges = torch.randint(0, n, (2, 2 * n), generator=g)
        graphs.append(Data(x=torch.randn(n, width, generator=g), edge_index=edges))
    return graphs
