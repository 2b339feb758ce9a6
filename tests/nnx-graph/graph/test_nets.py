"""The three node nets: their formulas, their batches, and training beside a plain loop."""

from __future__ import annotations

import copy

import pytest
import torch
from made_graphs import adam, karate, small_graphs
from nnx import (
    Activations,
    Checkpoints,
    GraphAttNN,
    GraphConvNN,
    GraphNNBase,
    GraphSageNN,
    Losses,
    Nets,
    NNCheckpoint,
    NNModel,
    NNModelParams,
    NNParams,
    NNTrainParams,
    ProbabilitySpec,
    TaskSpec,
    set_seed,
)
from nnx.graph import NeighborBatches
from nnx.graph_tasks import GraphCollection
from nnx.link_tasks import LinkTask, split_links
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, GraphSAGE


def params(**changes) -> NNParams:
    given = {"input_dim": 34, "output_dim": 4, "hidden_dims": [16], "dropout_prob": 0.0,
             "activation": Activations.RELU, **changes}  # fmt: skip
    return NNParams(**given)


def model(net: Nets = Nets.GRAPH_CONV, *, task: TaskSpec | None = None, **changes) -> NNModel:
    set_seed(0)
    return NNModel(
        net_params=params(**changes),
        params=NNModelParams(net=net, loss=Losses.CROSS_ENTROPY, task=task),
    )


def with_isolated_node_and_loops() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
    edges = torch.tensor([[0, 1, 1, 2, 3, 4, 4, 0, 0], [1, 0, 2, 1, 3, 0, 2, 1, 4]])
    return x, edges  # a repeated edge 0 -> 1, a self-loop at 3, node 5 alone


def dense(edges: torch.Tensor, n: int) -> torch.Tensor:
    """``A[v, u]``: how many edges lead from u to v."""
    return torch.zeros(n, n).index_put_((edges[1], edges[0]), torch.ones(edges.shape[1]), True)


def test_graph_convolution_is_the_normalized_adjacency_times_features():
    x, edges = with_isolated_node_and_loops()
    net = GraphConvNN(params(input_dim=3, output_dim=2, hidden_dims=[]))
    a = dense(edges, 6)
    a = a + torch.diag((a.diagonal() == 0).float())  # a node with a self-loop keeps its own
    scale = a.sum(1).rsqrt()
    layer = net.layers[0]
    expected = (scale[:, None] * a * scale) @ x @ layer.lin.weight.T + layer.bias
    torch.testing.assert_close(net(x, edges), expected)


def test_graphsage_is_a_linear_map_of_the_node_and_of_its_neighbours_mean():
    x, edges = with_isolated_node_and_loops()
    net = GraphSageNN(params(input_dim=3, output_dim=2, hidden_dims=[]))
    a = dense(edges, 6)
    mean = a @ x / a.sum(1, keepdim=True).clamp(min=1)
    layer = net.layers[0]
    expected = mean @ layer.lin_l.weight.T + layer.lin_l.bias + x @ layer.lin_r.weight.T
    torch.testing.assert_close(net(x, edges), expected)


def test_graph_attention_is_a_softmax_over_each_node_s_neighbours_and_itself():
    x, edges = with_isolated_node_and_loops()
    net = GraphAttNN(params(input_dim=3, output_dim=2, hidden_dims=[], n_heads=3))
    layer = net.layers[0]
    a = dense(edges, 6)
    a = a.fill_diagonal_(1)
    outputs = []
    for head in range(3):
        h = (x @ layer.lin.weight.T).view(6, 3, 2)[:, head]
        source, target = h @ layer.att_src[0, head], h @ layer.att_dst[0, head]
        score = F.leaky_relu(target[:, None] + source[None], 0.2)
        weight = a * torch.exp(score)  # a repeated edge counts as often as it is there
        outputs.append(weight / weight.sum(1, keepdim=True) @ h)
    torch.testing.assert_close(net(x, edges), torch.stack(outputs).mean(0) + layer.bias)


@pytest.mark.parametrize(
    ("net", "theirs", "more"),
    [
        (Nets.GRAPH_CONV, lambda: GCN(34, 16, 2, 4), {}),
        (Nets.GRAPH_SAGE, lambda: GraphSAGE(34, 16, 2, 4), {}),
        (Nets.GRAPH_ATT, lambda: GAT(34, 16, 2, 4), {}),
    ],
)
def test_with_pyg_s_weights_a_net_gives_pyg_s_outputs(net, theirs, more):
    graph, theirs = karate(), theirs()
    ours = net(params=params(**more))
    weights = {k.replace("convs.", "layers."): v for k, v in theirs.state_dict().items()}
    ours.load_state_dict(weights)
    torch.testing.assert_close(
        ours(graph.x, graph.edge_index), theirs(graph.x, graph.edge_index), rtol=0, atol=1e-6
    )


def test_training_is_a_plain_loop_on_the_same_graph():
    graph, trained = karate(), model()
    plain = copy.deepcopy(trained.net)
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = F.cross_entropy(plain(graph.x, graph.edge_index), graph.y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    run = trained.train(NNTrainParams(n_epochs=5, train_loader=[graph], optim=adam()))
    assert [p.train_edp.loss for p in run.idps] == losses
    for ours, theirs in zip(trained.net.parameters(), plain.parameters()):
        assert torch.equal(ours, theirs)


def test_a_stored_run_gives_the_model_back():
    graph, trained = karate(), model(Nets.GRAPH_ATT, n_heads=2)
    run = trained.train(NNTrainParams(n_epochs=2, train_loader=[graph], optim=adam()))
    again = NNModel.from_checkpoint(NNCheckpoint.load(run.id, Checkpoints.LAST))
    assert (again.predict([graph]).logits == trained.predict([graph]).logits).all()


# -- seed rows ----------------------------------------------------------------------------


def subgraphs(**more) -> NeighborBatches:
    graph = karate()
    return NeighborBatches(
        graph, [3, 3], batch_size=5, nodes=graph.train_mask, shuffle=False, **more
    )


def test_loss_and_scores_are_of_seed_rows_alone():
    """A neighbour's label may change at will: nothing that is reported moves."""
    batch, trained = next(iter(subgraphs())), model()
    assert trained.net.seed_count(batch) == batch.batch_size < batch.num_nodes
    honest = trained.evaluate([batch])
    batch.y[batch.batch_size :] = (batch.y[batch.batch_size :] + 1) % 4
    assert trained.evaluate([batch]) == honest
    logits = trained.net.eval()(batch.x, batch.edge_index)[: batch.batch_size]
    expected = F.cross_entropy(logits, batch.y[: batch.batch_size])
    assert honest.loss == pytest.approx(float(expected), abs=1e-6)


def test_predictions_name_the_nodes_and_streaming_is_the_same():
    trained, nodes = model(task=TaskSpec.categorical(4)), karate().train_mask.nonzero().flatten()
    whole = trained.predict_proba(subgraphs())
    assert whole.sample_ids.tolist() == nodes.tolist()
    with trained.iter_predict(subgraphs(), ProbabilitySpec("categorical")) as stream:
        parts = list(stream)
    assert [i for part in parts for i in part.sample_ids] == nodes.tolist()
    for name in ("logits", "probabilities"):
        joined = torch.cat([torch.as_tensor(getattr(part, name)) for part in parts])
        assert torch.equal(joined, torch.as_tensor(getattr(whole, name)))
    assert len(trained.predict(subgraphs()).logits) == len(nodes)


def test_a_whole_graph_has_no_seeds_and_its_rows_are_its_nodes():
    graph, trained = karate(), model(task=TaskSpec.categorical(4))
    assert trained.net.seed_count(graph) is None
    assert trained.predict_proba([graph]).sample_ids.tolist() == list(range(34))
    collated = next(iter(GraphCollection(small_graphs(4), range(4), targets=[0] * 4).loader(2)))
    assert trained.net.seed_count(collated) is None  # its batch_size counts graphs


def test_a_subgraph_whose_seeds_are_not_first_is_refused():
    batch, trained = next(iter(subgraphs())), model()
    order = torch.arange(batch.num_nodes - 1, -1, -1)
    for name in ("x", "y", "n_id"):
        batch[name] = batch[name][order]
    with pytest.raises(ValueError, match="seeds of this subgraph are not its first rows"):
        trained.evaluate([batch])
    batch.batch_size = batch.num_nodes + 1
    with pytest.raises(ValueError, match="cannot have 35 seeds|cannot have \\d+ seeds"):
        trained.evaluate([batch])


# -- refusals -----------------------------------------------------------------------------


def test_batches_of_graphs_and_of_links_are_refused():
    trained = model(input_dim=5)
    graphs = GraphCollection(small_graphs(4), range(4), targets=[0] * 4).loader(4)
    with pytest.raises(ValueError, match="one output row per node.*whole graphs"):
        trained.predict(graphs)
    graph = karate()
    links = LinkTask(split_links(graph.edge_index, 34, seed=0)).loader("val", graph.x, 4)
    with pytest.raises(ValueError, match="one output row per node.*asks about links"):
        model().evaluate(links)
    with pytest.raises(ValueError, match="expects PyTorch Geometric Data .*not tuple"):
        trained.predict([(graph.x, graph.y)])


def test_the_base_says_what_a_subclass_owes():
    with pytest.raises(NotImplementedError, match="GraphNNBase must define _build_layers"):
        GraphNNBase(params())


def test_an_isolated_node_and_a_graph_without_edges_have_outputs():
    empty = Data(x=torch.randn(3, 34), edge_index=torch.empty(2, 0, dtype=torch.int64),
                 y=torch.tensor([0, 1, 2]))  # fmt: skip
    for net in (Nets.GRAPH_CONV, Nets.GRAPH_SAGE, Nets.GRAPH_ATT):
        assert model(net).evaluate([empty]).loss > 0
