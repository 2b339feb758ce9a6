"""One graph's nodes as three loaders."""

from __future__ import annotations

import functools

import pytest
import torch
from made_graphs import Karate, Several, adam, karate
from nnx import (
    Activations,
    Losses,
    Nets,
    NNGraphDataset,
    NNModel,
    NNModelParams,
    NNParams,
    NNTrainParams,
    TaskSpec,
    set_seed,
)
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.datasets import FakeDataset, KarateClub


class Made:
    """A dataset class of one graph that a test changes."""

    graph: Data

    def __len__(self):
        return 1

    def __getitem__(self, i):
        return self.graph


def made(**changes):
    graph = karate()
    for name, value in changes.items():
        graph[name] = value
    return type("Made", (Made,), {"graph": graph})


def model(dataset, net=Nets.GRAPH_SAGE) -> NNModel:
    set_seed(1)
    shape = NNParams(input_dim=dataset.input_dim, output_dim=dataset.output_dim, hidden_dims=[8],
                     dropout_prob=0.0, activation=Activations.RELU)  # fmt: skip
    return NNModel(net_params=shape, params=NNModelParams(
        net=net, loss=Losses.CROSS_ENTROPY, task=TaskSpec.categorical(dataset.output_dim)))  # fmt: skip


def test_a_class_that_downloads_is_opened_once_and_read_from_its_folder(tmp_path):
    Karate.downloads = 0
    for _ in range(2):
        dataset = NNGraphDataset(ds_class=Karate, sampler="full", root_dir=str(tmp_path / "d"))
    assert Karate.downloads == 1
    assert dataset.state() == {"name": "Karate", "input_dim": 34, "output_dim": 4}
    assert [len(loader) for loader in
            (dataset.train_loader, dataset.val_loader, dataset.test_loader)] == [1, 1, 1]  # fmt: skip


def test_a_class_without_root_and_arguments_of_its_own_are_taken():
    dataset = NNGraphDataset(ds_class=KarateClub, sampler="full")
    assert (dataset.name, dataset.val_loader, dataset.test_loader) == ("KarateClub", None, None)

    def masks(graph):
        graph.train_mask = torch.arange(graph.num_nodes) % 2 == 0
        return graph

    made_up = functools.partial(
        FakeDataset, num_graphs=1, avg_num_nodes=60, num_channels=4, num_classes=2
    )

    def without_root(transform):
        return made_up(transform=transform)

    dataset = NNGraphDataset(ds_class=without_root, transform=masks, n_neighbors=[-1], n_workers=0)
    assert (dataset.input_dim, dataset.output_dim) == (4, 2)
    assert next(iter(dataset.train_loader)).batch_size == (dataset.data.num_nodes + 1) // 2


def test_a_full_batch_trains_on_the_nodes_of_its_split_alone(tmp_path):
    """Beside a plain loop over the masked nodes of the graph as it lies."""
    dataset = NNGraphDataset(ds_class=Karate, sampler="full", root_dir=str(tmp_path))
    graph, trained = dataset.data, model(dataset, Nets.GRAPH_CONV)
    plain = model(dataset, Nets.GRAPH_CONV).net
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        out = plain(graph.x, graph.edge_index)
        loss = F.cross_entropy(out[graph.train_mask], graph.y[graph.train_mask])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    run = trained.train(NNTrainParams(
        n_epochs=5, train_loader=dataset.train_loader, val_loader=dataset.val_loader, optim=adam()
    ))  # fmt: skip
    assert [p.train_edp.loss for p in run.idps] == pytest.approx(losses, abs=1e-6)
    out = plain(graph.x, graph.edge_index)[graph.val_mask]
    record = run.idps[-1].val_edp
    assert record.count == int(graph.val_mask.sum())
    assert record.loss == pytest.approx(
        F.cross_entropy(out, graph.y[graph.val_mask]).item(), abs=1e-5
    )
    ids = trained.predict_proba(dataset.test_loader).sample_ids
    assert ids.tolist() == graph.test_mask.nonzero().flatten().tolist()


def test_all_neighbours_give_what_the_full_batch_gives(tmp_path):
    full = NNGraphDataset(ds_class=Karate, sampler="full", root_dir=str(tmp_path))
    sampled = NNGraphDataset(
        ds_class=Karate, n_neighbors=[-1, -1], root_dir=str(tmp_path), n_workers=0,
        batch_sizes=(4, 4, 3), seed=0,
    )  # fmt: skip
    trained = model(full)
    for ours, theirs in ((sampled.val_loader, full.val_loader),
                         (sampled.test_loader, full.test_loader)):  # fmt: skip
        a, b = trained.predict_proba(ours), trained.predict_proba(theirs)
        assert a.sample_ids.tolist() == b.sample_ids.tolist()
        torch.testing.assert_close(torch.as_tensor(a.logits), torch.as_tensor(b.logits))
        assert trained.evaluate(ours).loss == pytest.approx(trained.evaluate(theirs).loss)


def test_sampled_batches_have_the_asked_sizes_and_shuffle_by_seed(tmp_path):
    def seeds(seed):
        dataset = NNGraphDataset(
            ds_class=Karate, n_neighbors=[2, 2], root_dir=str(tmp_path), n_workers=0,
            batch_sizes=(6, None, 3), seed=seed,
        )  # fmt: skip
        assert [len(loader) for loader in
                (dataset.train_loader, dataset.val_loader, dataset.test_loader)] == [4, 1, 3]  # fmt: skip
        return [batch.seed_id.tolist() for batch in dataset.train_loader]

    first = seeds(3)
    order = [node for batch in first for node in batch]
    assert sorted(order) != order
    assert seeds(3) == first
    assert seeds(4) != first
    torch.manual_seed(0)
    drawn = seeds(None)
    torch.manual_seed(0)
    assert seeds(None) == drawn


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampler": "half"}, "sampler must be one of neighbor, full"),
        ({"n_neighbors": None}, 'sampler="neighbor" needs n_neighbors'),
        ({"n_neighbors": [0]}, r"n_neighbors\[0\]"),
        ({"n_neighbors": []}, "n_neighbors"),
        ({"batch_sizes": (0, 1, 1)}, r"batch_sizes\[0\]"),
        ({"n_workers": -1}, "n_workers"),
        ({"seed": 1.5}, "seed must be an integer"),
        ({"transform": abs, "ds_class": Several}, "Several takes no transform="),
        ({"ds_class": Several}, "the nodes of one graph, but this dataset has 2 graphs"),
    ],
)
def test_arguments_are_refused_before_anything_is_drawn(changes, message):
    state = torch.get_rng_state()
    given = {"ds_class": KarateClub, "n_neighbors": [2], "n_workers": 0, **changes}
    with pytest.raises(ValueError, match=message):
        NNGraphDataset(**given)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"edge_index": torch.tensor([[0, 1, 7], [1, 2, 34]])},
         "edge 2 goes from node 7 to node 34, but there are 34 nodes, 0 to 33"),
        ({"edge_index": torch.tensor([[0], [-1]])}, "edge 0 goes from node 0 to node -1"),
        ({"edge_index": torch.zeros(3, 2, dtype=torch.int64)}, r"edge_index must be \(2, edges\)"),
        ({"edge_index": torch.zeros(2, 2)}, "edge_index must hold integers"),
        ({"y": torch.zeros(3)}, "3 targets do not fit 34 nodes"),
        ({"y": None}, "the graph has no tensor y"),
        ({"train_mask": torch.zeros(34, dtype=torch.bool)}, "no training node.*RandomNodeSplit"),
        ({"train_mask": torch.ones(34, 10, dtype=torch.bool)}, "choose one column in a transform"),
        ({"val_mask": torch.ones(34, dtype=torch.bool)}, "node 0 is in both train and val"),
    ],
)  # fmt: skip
def test_a_graph_that_cannot_be_trained_on_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        NNGraphDataset(ds_class=made(**changes), sampler="full")


def test_ids_of_any_integer_width_are_taken():
    narrow = made(edge_index=karate().edge_index.to(torch.int32))
    dataset = NNGraphDataset(ds_class=narrow, sampler="full")
    assert dataset.train_loader[0].edge_index.dtype == torch.int64
