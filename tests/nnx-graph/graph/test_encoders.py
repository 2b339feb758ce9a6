"""Encoders of PyG's layers: formulas, residuals, norms, edge features, several kinds of nodes."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from made_graphs import adam, karate, random_edges
from nnx import (
    Checkpoints,
    Losses,
    NNCheckpoint,
    NNModel,
    NNModelParams,
    NNTrainParams,
    TaskSpec,
    set_seed,
)
from nnx.graph import (
    EncoderSpec,
    GraphEncoder,
    NeighborBatches,
    hetero_node_classifier_spec,
    infer_nodes,
    node_classifier_spec,
)
from torch import nn
from torch.nn import functional as F
from torch_geometric.data import Data, HeteroData
from torch_geometric.datasets import FakeHeteroDataset
from torch_geometric.nn import GIN
from torch_geometric.nn.models import GAT

KINDS = ("graph_conv", "graph_sage", "graph_att", "gin", "gatv2", "transformer")


def model(**changes) -> NNModel:
    spec = node_classifier_spec(
        **{"input_dim": 34, "num_classes": 4, "hidden_dims": (8,), **changes}
    )
    return NNModel(params=NNModelParams(
        net=spec, loss=Losses.CROSS_ENTROPY, task=TaskSpec.categorical(4, ignore_index=-100)))  # fmt: skip


def attention_weights(score: torch.Tensor, edges: torch.Tensor, n: int) -> torch.Tensor:
    """The softmax of ``score`` over the edges into each node, one edge at a time."""
    weights = torch.zeros_like(score)
    for node in range(n):
        into = (edges[1] == node).nonzero().flatten()
        if len(into):
            weights[into] = score[into].softmax(0)
    return weights


# -- formulas -----------------------------------------------------------------------------


def test_gin_is_a_network_of_the_node_and_the_sum_of_its_neighbours():
    x, edges = torch.randn(9, 5), random_edges(9, 20)
    layer = GraphEncoder(EncoderSpec(kind="gin"), [5, 3]).layers[0]
    with torch.no_grad():
        layer.eps.fill_(0.3)
    adjacency = torch.zeros(9, 9).index_put_((edges[1], edges[0]), torch.ones(20), True)
    torch.testing.assert_close(layer(x, edges), layer.nn(1.3 * x + adjacency @ x))


def test_gine_adds_edge_features_before_a_relu():
    x, edges, attributes = torch.randn(9, 5), random_edges(9, 20), torch.randn(20, 2)
    layer = GraphEncoder(EncoderSpec(kind="gin", edge_dim=2), [5, 3]).layers[0]
    message = F.relu(x[edges[0]] + layer.lin(attributes))
    expected = layer.nn(x + torch.zeros(9, 5).index_add_(0, edges[1], message))
    torch.testing.assert_close(layer(x, edges, attributes), expected)


def test_gatv2_scores_after_the_nonlinearity():
    x = torch.randn(6, 5)
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 2], [1, 2, 3, 4, 5, 0, 3, 5]])  # no loops
    layer = GraphEncoder(EncoderSpec(kind="gatv2", heads=2), [5, 3]).layers[0]
    both = torch.cat([edges, torch.arange(6).repeat(2, 1)], dim=1)
    left, right = layer.lin_l(x).view(6, 2, 3), layer.lin_r(x).view(6, 2, 3)
    score = (F.leaky_relu(left[both[0]] + right[both[1]], 0.2) * layer.att).sum(-1)
    weighted = attention_weights(score, both, 6)[..., None] * left[both[0]]
    expected = torch.zeros(6, 2, 3).index_add_(0, both[1], weighted).mean(1) + layer.bias
    torch.testing.assert_close(layer(x, edges), expected)


def test_transformer_convolution_is_scaled_dot_product_attention_with_edges():
    x, attributes = torch.randn(6, 5), torch.randn(8, 2)
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 2], [1, 2, 3, 4, 5, 0, 3, 5]])
    layer = GraphEncoder(EncoderSpec(kind="transformer", edge_dim=2), [5, 4]).layers[0]
    edge = layer.lin_edge(attributes)
    query, key, value = layer.lin_query(x), layer.lin_key(x), layer.lin_value(x)
    score = (query[edges[1]] * (key[edges[0]] + edge)).sum(1) / 2
    weighted = attention_weights(score, edges, 6)[:, None] * (value[edges[0]] + edge)
    expected = torch.zeros(6, 4).index_add_(0, edges[1], weighted) + layer.lin_skip(x)
    torch.testing.assert_close(layer(x, edges, attributes), expected)


@pytest.mark.parametrize(
    ("spec", "dims", "theirs", "names"),
    [
        (EncoderSpec(kind="gatv2", heads=2), [34, 8, 4],
         lambda: GAT(34, 16, 2, 4, v2=True, heads=2), {}),
        (EncoderSpec(kind="gin"), [34, 8, 8], lambda: GIN(34, 8, 2, train_eps=True, norm=None),
         {"nn.lins.0": "nn.0", "nn.lins.1": "nn.2"}),
    ],
)  # fmt: skip
def test_with_pyg_s_weights_an_encoder_gives_pyg_s_outputs(spec, dims, theirs, names):
    graph, ours, theirs = karate(), GraphEncoder(spec, dims), theirs()
    state = {}
    for name, value in theirs.state_dict().items():
        for old, new in {"convs.": "layers.", **names}.items():
            name = name.replace(old, new)
        state[name] = value
    ours.load_state_dict(state)
    torch.testing.assert_close(
        ours(graph.x, graph.edge_index), theirs(graph.x, graph.edge_index), rtol=0, atol=1e-6
    )


def test_residuals_norms_and_dropout_are_where_they_are_said_to_be():
    graph = karate()
    spec = EncoderSpec(kind="graph_sage", norm="layer", residual=True)
    net = GraphEncoder(spec, [34, 8, 8, 4], activation="tanh", dropout=0.5).eval()
    assert isinstance(net.skips[0], nn.Linear)
    assert isinstance(net.skips[1], nn.Identity)
    x = graph.x
    for i in range(2):
        x = torch.tanh(
            F.layer_norm(net.layers[i](x, graph.edge_index), (8,), *net.norms[i].parameters())
            + (net.skips[0](x) if i == 0 else x)
        )
    expected = net.layers[2](x, graph.edge_index)
    torch.testing.assert_close(net(graph.x, graph.edge_index), expected)
    torch.manual_seed(0)
    assert not torch.equal(net.train()(graph.x, graph.edge_index), expected)


def test_batch_normalization_of_one_row_is_that_of_evaluation():
    encoder = GraphEncoder(EncoderSpec(kind="graph_sage", norm="batch"), [3, 4, 2])
    one = Data(x=torch.randn(1, 3), edge_index=torch.empty(2, 0, dtype=torch.int64))
    before = {k: v.clone() for k, v in encoder.state_dict().items()}
    trained = encoder.train()(one.x, one.edge_index)
    assert all(torch.equal(v, before[k]) for k, v in encoder.state_dict().items())
    torch.testing.assert_close(trained, encoder.eval()(one.x, one.edge_index))
    two = torch.randn(2, 3)
    encoder.train()(two, one.edge_index)
    assert not torch.equal(encoder.norms[0].running_mean, before["norms.0.running_mean"])


def test_an_output_on_another_graph_is_not_normalized_by_the_first():
    net, other = model().net.eval(), random_edges(34, 50)
    fresh = copy.deepcopy(net)
    net(karate().x, karate().edge_index)
    assert torch.equal(net(karate().x, other), fresh(karate().x, other))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EncoderSpec(kind="gcn"), "kind must be one of"),
        (lambda: EncoderSpec(kind="gin", heads=2), "1 for 'gin', which has no heads"),
        (lambda: EncoderSpec(kind="graph_conv", edge_dim=2), "graph_conv layers take no edge features"),
        (lambda: EncoderSpec(norm="graph"), "norm must be one of batch, layer"),
        (lambda: node_classifier_spec(input_dim=1, num_classes=2, encoder=3), "EncoderSpec"),
    ],
)  # fmt: skip
def test_an_encoder_that_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_spec_s_state_omits_its_defaults_and_comes_back():
    assert EncoderSpec().state() == {"kind": "graph_conv"}
    full = EncoderSpec(kind="gatv2", heads=2, edge_dim=3, norm="batch", residual=True)
    assert EncoderSpec.from_state(full.state()) == full
    spec = node_classifier_spec(input_dim=1, num_classes=2, encoder=EncoderSpec(kind="gin"))
    assert spec.config["encoder"] == "gin"


# -- nodes --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_trains_on_sampled_nodes_and_comes_back(kind):
    graph = karate()
    heads = 2 if kind in ("graph_att", "gatv2", "transformer") else 1
    trained = model(encoder=EncoderSpec(kind=kind, heads=heads, norm="batch", residual=True))
    run = trained.train(NNTrainParams(
        n_epochs=30, train_loader=NeighborBatches(graph, [4, 4], batch_size=8, seed=0),
        val_loader=[graph], optim=adam(),
    ))  # fmt: skip
    assert run.idps[-1].val_edp.accuracy > 0.9
    again = NNModel.from_checkpoint(NNCheckpoint.load(run.id, Checkpoints.LAST))
    assert (again.predict([graph]).logits == trained.predict([graph]).logits).all()


def test_edge_features_of_a_sample_are_those_of_its_edges():
    graph = karate()
    graph.edge_attr = torch.randn(graph.num_edges, 3, generator=torch.Generator().manual_seed(0))
    net = model(encoder=EncoderSpec(kind="gatv2", edge_dim=3))
    batches = NeighborBatches(graph, [-1, -1], batch_size=7, shuffle=False)
    whole, sampled = net.predict([graph]).logits, net.predict(batches).logits
    torch.testing.assert_close(torch.as_tensor(sampled), torch.as_tensor(whole))
    with pytest.raises(ValueError, match="the graph has no edge_attr"):
        net.predict([karate()])


# -- layer by layer -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_size", [1, 5, 34, 1000])
def test_inference_layer_by_layer_is_the_full_forward(kind, batch_size):
    graph = karate()
    loops = torch.tensor([[0, 3, 3], [0, 3, 4]])  # self-loops and a repeated edge
    graph.edge_index = torch.cat([graph.edge_index, loops], dim=1)
    net = model(encoder=EncoderSpec(kind=kind, norm="batch", residual=True), hidden_dims=(8, 6))
    net.net.train()
    net.net(graph.x, graph.edge_index)  # moves the running statistics
    with torch.no_grad():
        expected = net.net.eval()(graph.x, graph.edge_index)
    net.net.train()
    state = torch.get_rng_state()
    found = infer_nodes(net, graph, batch_size)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert net.net.training
    assert torch.equal(torch.get_rng_state(), state)


def test_inference_reads_edge_features_and_nets_of_the_enum():
    from nnx import Activations, Nets, NNParams

    graph = karate()
    graph.edge_attr = torch.randn(graph.num_edges, 3)
    net = model(encoder=EncoderSpec(kind="transformer", edge_dim=3))
    torch.testing.assert_close(
        infer_nodes(net, graph, 6), torch.as_tensor(net.predict([graph]).logits), rtol=0, atol=1e-6
    )
    for kind in (Nets.GRAPH_CONV, Nets.GRAPH_SAGE, Nets.GRAPH_ATT):
        shape = NNParams(input_dim=34, output_dim=4, hidden_dims=[8, 8], dropout_prob=0.5,
                         activation=Activations.RELU)  # fmt: skip
        net = NNModel(net_params=shape, params=NNModelParams(net=kind, loss=Losses.CROSS_ENTROPY))
        found = infer_nodes(net, graph, 6)
        torch.testing.assert_close(
            found, torch.as_tensor(net.predict([graph]).logits), rtol=0, atol=1e-6
        )
    plain = NNModel(module=nn.Linear(34, 4), params=NNModelParams(loss=Losses.CROSS_ENTROPY))
    with pytest.raises(TypeError, match="needs a graph net .*not Linear"):
        infer_nodes(plain, graph, 6)
    graph.edge_index = torch.tensor([[0], [34]])
    with pytest.raises(ValueError, match="edge 0 goes from node 0 to node 34"):
        infer_nodes(net, graph, 6)


# -- several kinds of nodes ---------------------------------------------------------------


def papers() -> HeteroData:
    torch.manual_seed(0)
    data = HeteroData()
    data["paper"].x, data["author"].x = torch.randn(20, 4), torch.randn(8, 3)
    written = torch.stack([torch.randint(0, 8, (40,)), torch.randint(0, 20, (40,))])
    data["author", "writes", "paper"].edge_index = written
    data["paper", "by", "author"].edge_index = written.flip(0)
    data["paper"].y = (data["paper"].x[:, 0] > 0).long()
    return data


def hetero_model(**changes) -> NNModel:
    spec = hetero_node_classifier_spec(**{
        "node_dims": {"paper": 4, "author": 3}, "target": "paper", "num_classes": 2,
        "edge_types": [("author", "writes", "paper"), ("paper", "by", "author")],
        "hidden_dims": (8,), **changes,
    })  # fmt: skip
    return NNModel(params=NNModelParams(
        net=spec, loss=Losses.CROSS_ENTROPY, task=TaskSpec.categorical(2, ignore_index=-100)))  # fmt: skip


def test_several_kinds_of_nodes_train_and_come_back():
    data, trained = papers(), hetero_model()
    hidden = data.clone()
    hidden["paper"].y = torch.where(torch.arange(20) < 15, hidden["paper"].y, -100)
    run = trained.train(NNTrainParams(
        n_epochs=60, train_loader=[hidden], val_loader=[data], optim=adam(3e-2)))  # fmt: skip
    assert run.idps[-1].train_edp.count == 15
    assert run.idps[-1].val_edp.count == 20
    assert run.idps[-1].train_edp.accuracy > 0.9
    again = NNModel.from_checkpoint(NNCheckpoint.load(run.id, Checkpoints.LAST))
    assert (again.predict([data]).logits == trained.predict([data]).logits).all()


def test_a_hetero_layer_sums_what_each_kind_of_edge_brings():
    """Beside the sum of plain PyG layers, one per kind of edge."""
    data, net = papers(), hetero_model(hidden_dims=(8,)).net.eval()
    rows = {k: net.inputs[k](data[k].x).relu() for k in ("paper", "author")}
    first = net.encoder.layers[0]
    paper = first["author__writes__paper"]((rows["author"], rows["paper"]),
                                           data["author", "writes", "paper"].edge_index).relu()  # fmt: skip
    author = first["paper__by__author"]((rows["paper"], rows["author"]),
                                        data["paper", "by", "author"].edge_index).relu()  # fmt: skip
    last = net.encoder.layers[1]["author__writes__paper"]
    expected = last((author, paper), data["author", "writes", "paper"].edge_index)
    torch.testing.assert_close(net(data.x_dict, data.edge_index_dict), expected)


def test_a_hetero_net_drops_in_training_alone():
    """A trace could have fixed the mode in which it was made."""
    data = papers()
    encoder = EncoderSpec(kind="graph_sage", norm="batch", residual=True)
    net = hetero_model(dropout=0.5, hidden_dims=(8, 8), encoder=encoder).net

    def outputs():
        return net(data.x_dict, data.edge_index_dict)

    net.train()
    assert not torch.equal(outputs(), outputs())
    net.eval()
    assert torch.equal(outputs(), outputs())


@pytest.mark.parametrize("encoder", ["graph_sage", "gin", "transformer"])
def test_pyg_s_made_up_hetero_graphs_are_classified(encoder):
    torch.manual_seed(0)
    data = FakeHeteroDataset(num_node_types=3, num_edge_types=8, avg_num_nodes=30, num_classes=3)[0]
    ends = {kind[2] for kind in data.edge_types}
    node_dims = {k: data[k].num_features for k in data.node_types if k in ends}
    target = next(k for k in node_dims if hasattr(data[k], "y"))
    net = NNModel(params=NNModelParams(loss=Losses.CROSS_ENTROPY, net=hetero_node_classifier_spec(
        node_dims=node_dims, target=target, num_classes=3, encoder=encoder,
        edge_types=[k for k in data.edge_types if k[0] in node_dims],
    )))  # fmt: skip
    assert net.net(
        {k: data[k].x for k in node_dims},
        {k: v for k, v in data.edge_index_dict.items() if k[0] in node_dims},
    ).shape == (data[target].num_nodes, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder": "graph_conv"}, "graph_conv layers take one kind of node"),
        ({"target": "venue"}, "target must be one of paper, author"),
        ({"edge_types": [("author", "writes", "paper")]}, "no edge leads to 'author' nodes.*ToUndirected"),
        ({"edge_types": [("author", "in", "venue")]}, "with kinds of node_dims"),
        ({"node_dims": {"paper": 0, "author": 3}}, "node_dims"),
    ],
)  # fmt: skip
def test_a_hetero_recipe_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        hetero_model(**changes)
    with pytest.raises(ValueError, match="reads HeteroData, not Data"):
        hetero_model().predict([karate()])


# -- determinism --------------------------------------------------------------------------


@pytest.fixture
def strict():
    yield
    torch.use_deterministic_algorithms(False)


def test_a_net_built_before_strict_determinism_is_refused_and_the_run_records_it(strict):
    """PyG's layers read the flag when they are built."""
    early = model()
    set_seed(0, strict=True)
    with pytest.raises(ValueError, match="built before torch's deterministic algorithms"):
        early.evaluate([karate()])
    params = NNTrainParams(n_epochs=1, train_loader=[karate()], optim=adam())
    with pytest.raises(ValueError, match="build the model after set_seed"):
        early.train(params)
    late = model()
    assert all(
        part._deterministic for part in late.net.modules() if hasattr(part, "_deterministic")
    )
    run = late.train(params)
    assert "deterministic_algorithms: 'on'" in Path("runs", run.id, "metadata.yaml").read_text()
