"""Whole graphs: the collection, the batches, the classifier, its recipe and its refusals."""

from __future__ import annotations

import copy

import pytest
import torch
from made_graphs import adam, karate, small_graphs
from nnx import (
    Checkpoints,
    Losses,
    NNCheckpoint,
    NNModel,
    NNModelParams,
    NNRun,
    NNTrainParams,
    TaskSpec,
)
from nnx.graph import EncoderSpec
from nnx.graph_tasks import (
    FACTORY_ID,
    IGNORE,
    POOLS,
    GraphClassifier,
    GraphCollection,
    GraphPool,
    GraphTaskError,
    check_graph_batch,
    graph_classifier_spec,
    is_graph_collection_batch,
)
from nnx.link_tasks import LinkTask, split_links
from torch.nn import functional as F
from torch_geometric.data import Batch, Data

TARGETS = [i % 3 if i % 5 else None for i in range(12)]
UNLABELED = [100, 105, 110]


def collection(**changes) -> GraphCollection:
    given = {"targets": TARGETS, "unlabeled": UNLABELED, "num_classes": 3, **changes}
    return GraphCollection(small_graphs(), range(100, 112), **given)


def model(**changes) -> NNModel:
    spec = graph_classifier_spec(
        **{"input_dim": 5, "num_classes": 3, "hidden_dims": (8,), **changes}
    )
    return NNModel(params=NNModelParams(
        net=spec, loss=Losses.CROSS_ENTROPY, task=TaskSpec.categorical(3, ignore_index=IGNORE)
    ))  # fmt: skip


def batch(**changes) -> Batch:
    made = next(iter(collection().loader(4)))
    for name, value in changes.items():
        made[name] = value
    return made


# -- the collection -----------------------------------------------------------------------


def test_a_collection_knows_its_graphs_by_id():
    graphs = collection()
    assert len(graphs) == 12
    assert graphs.labeled == tuple(i for i in range(100, 112) if i not in UNLABELED)
    part = graphs.subset([107, 105])
    assert part.ids == (107, 105)
    assert [int(g.y) for g in part] == [TARGETS[7], IGNORE]
    assert part.labeled == (107,)
    assert torch.equal(part[0].x, small_graphs()[7].x)
    assert (FACTORY_ID, POOLS, IGNORE) == ("nnx.graph_classifier", ("mean", "sum"), -100)


def test_targets_are_read_from_the_graphs_when_none_are_given():
    graphs = small_graphs(3)
    for i, graph in enumerate(graphs):
        graph.y = torch.tensor([i])
    assert [int(g.y) for g in GraphCollection(graphs, [1, 2, 3])] == [0, 1, 2]


def test_a_shuffling_loader_follows_its_seed_and_keeps_every_graph():
    def order(**kw):
        return [i for b in collection().loader(5, shuffle=True, **kw) for i in b.graph_id.tolist()]

    assert order(seed=1) == order(seed=1) != order(seed=2)
    assert sorted(order(seed=1)) == list(range(100, 112))
    torch.manual_seed(3)
    drawn = order()
    torch.manual_seed(3)
    assert order() == drawn


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GraphCollection([], []), "at least one graph"),
        (lambda: GraphCollection(small_graphs(2), [1]), "1 ids do not fit 2 graphs"),
        (lambda: GraphCollection(small_graphs(2), [1, 1], targets=[0, 0]), "id 1 is there twice"),
        (lambda: GraphCollection(small_graphs(1), [-1], targets=[0]), "non-negative integers, not -1"),
        (lambda: GraphCollection(small_graphs(1), [True], targets=[0]), "not True"),
        (lambda: GraphCollection(small_graphs(1), [1.0], targets=[0]), "not 1.0"),
        (lambda: GraphCollection(small_graphs(2), [1, 2], targets=[0]), "1 targets do not fit 2"),
        (lambda: GraphCollection(small_graphs(2), [1, 2], targets=[0, None]), "graph 2 has no target"),
        (lambda: GraphCollection(small_graphs(2), [1, 2]), "graph 1 has no target"),
        (lambda: GraphCollection(small_graphs(1), [1], targets=[0], unlabeled=[9]), "names graph 9"),
        (lambda: GraphCollection(small_graphs(1), [1], targets=[3], num_classes=3), "below num_classes=3"),
        (lambda: GraphCollection(small_graphs(1), [1], targets=[0.5]), "one class index, not 0.5"),
        (lambda: GraphCollection([Data(x=torch.empty(0, 5), edge_index=torch.empty(2, 0).long())],
                                 [4], targets=[0]), "graph 4 has no node"),
        (lambda: GraphCollection([Data(x=torch.randn(2, 5), edge_index=torch.tensor([[0], [2]]))],
                                 [4], targets=[0]), "graph 4: edge 0 goes from node 0 to node 2"),
        (lambda: GraphCollection([Data(x=torch.randn(2, 5))], [4], targets=[0]), "graph 4 has no edge_index"),
        (lambda: GraphCollection([Data(edge_index=torch.empty(2, 0).long())], [4], targets=[0]),
         "graph 4: x must be"),
        (lambda: GraphCollection([*small_graphs(1), *small_graphs(1, 6)], [1, 2], targets=[0, 0]),
         "different feature widths"),
        (lambda: collection().subset([7]), "no graph 7"),
    ],
)  # fmt: skip
def test_a_collection_that_cannot_be_classified_is_refused(make, message):
    with pytest.raises(GraphTaskError, match=message):
        make()


# -- batches ------------------------------------------------------------------------------


def crossing() -> torch.Tensor:
    made = batch()
    return torch.cat([made.edge_index, torch.tensor([[0], [made.num_nodes - 1]])], dim=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda b: {"graph_id": None}, "which carry graph_id"),
        (lambda b: {"graph_id": torch.tensor([1, 1, 2, 3])}, "must be distinct"),
        (lambda b: {"ptr": b.ptr + 1}, "does not divide"),
        (lambda b: {"ptr": b.ptr[:-1]}, "does not divide"),
        (lambda b: {"ptr": torch.tensor([0, 3, 3, 9, int(b.ptr[-1])])}, "graph 101 has no node"),
        (lambda b: {"batch": b.batch.flip(0)}, "says other graphs"),
        (lambda b: {"edge_index": crossing()}, "leads from one graph to another"),
        (lambda b: {"edge_index": b.edge_index + b.num_nodes}, "a node outside 0 to"),
        (lambda b: {"y": torch.zeros(3, dtype=torch.int64)}, "4 graphs needs 4 targets"),
        (lambda b: {"x": None}, "no tensor 'x'"),
    ],
)
def test_a_batch_is_checked_before_any_forward(changes, message):
    broken, net = batch(), model()
    for name, value in changes(broken).items():
        broken[name] = value
    for use in (net.predict, net.evaluate):
        with pytest.raises(GraphTaskError, match=message):
            use([broken])


def test_the_checked_parts_come_back():
    made = batch()
    x, edges, of_node, ptr = check_graph_batch(made)
    assert x is made.x
    assert edges is made.edge_index
    assert of_node.tolist() == made.batch.tolist()
    assert ptr.tolist() == made.ptr.tolist()
    assert is_graph_collection_batch(made)
    assert not is_graph_collection_batch(karate())


def test_batches_of_nodes_and_links_are_refused():
    graph, net = karate(), model(input_dim=34)
    with pytest.raises(GraphTaskError, match="reads batches of GraphCollection"):
        net.predict([graph])
    links = LinkTask(split_links(graph.edge_index, 34, seed=0)).loader("val", graph.x, 4)
    with pytest.raises(GraphTaskError, match="asks about links"):
        net.predict(links)
    with pytest.raises(GraphTaskError, match="reads 34 features per node.*5"):
        net.predict(collection().loader(4))


# -- pooling ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "by_hand"),
    [("mean", lambda rows: rows.mean(0)), ("sum", lambda rows: rows.sum(0)),
     ("max", lambda rows: rows.max(0).values)],
)  # fmt: skip
def test_pooling_is_graph_by_graph_and_does_not_mind_the_order(mode, by_hand):
    x, of_node = torch.randn(7, 4), torch.tensor([0, 0, 0, 1, 2, 2, 2])
    pooled = GraphPool(mode)(x, of_node, 3)
    torch.testing.assert_close(pooled, torch.stack([by_hand(x[of_node == g]) for g in range(3)]))
    order = torch.randperm(7, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(GraphPool(mode)(x[order], of_node[order], 3), pooled)
    with pytest.raises(ValueError, match="mode must be one of mean, sum, max"):
        GraphPool("median")


def test_attention_pooling_is_a_softmax_mean_within_each_graph():
    net, made = model(pool="attention").net.eval(), batch()
    rows = net.encoder(made.x, made.edge_index)
    score = net.pool.attention.gate_nn(rows)
    expected = torch.stack([
        (score[made.batch == g].softmax(0) * rows[made.batch == g]).sum(0) for g in range(4)
    ])  # fmt: skip
    torch.testing.assert_close(net.pool(rows, made.batch, 4), expected)


# -- training -----------------------------------------------------------------------------


def test_loss_is_a_mean_over_labeled_graphs_whatever_the_batches():
    """Losses 1, 2, 3 in batches of two and one give 2, not 2.25."""

    class Fixed(torch.nn.Module):
        """An encoder whose rows are the features; the head is the identity."""

        def forward(self, x, edge_index):
            return x

    def logits_of_loss(loss):
        p = float(torch.exp(torch.tensor(-loss, dtype=torch.float64)))
        return [float(torch.logit(torch.tensor(p))), 0.0]

    graphs = [Data(x=torch.tensor([logits_of_loss(v)]), edge_index=torch.empty(2, 0).long())
              for v in (1.0, 2.0, 3.0, 9.0)]  # fmt: skip
    graphs = GraphCollection(graphs, range(4), targets=[0, 0, 0, None], unlabeled=[3])
    net = NNModel(module=GraphClassifier(Fixed(), "sum"), params=NNModelParams(
        loss=Losses.CROSS_ENTROPY, task=TaskSpec.categorical(2, ignore_index=IGNORE)))  # fmt: skip
    record = net.evaluate(graphs.loader(2))
    assert record.loss == pytest.approx(2, abs=1e-5)
    assert record.count == 3


def test_training_is_a_plain_loop_and_records_count_labeled_graphs():
    trained, graphs = model(), collection()
    plain = copy.deepcopy(trained.net)
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        for made in graphs.loader(5):
            optimizer.zero_grad()
            out = plain(made.x, made.edge_index, made.batch, made.ptr)
            loss = F.cross_entropy(out, made.y, ignore_index=IGNORE)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    run = trained.train(NNTrainParams(
        n_epochs=3, train_loader=graphs.loader(5), val_loader=graphs.loader(7), optim=adam()
    ))  # fmt: skip
    assert [p.train_edp.loss for p in run.idps] == pytest.approx(losses, abs=1e-6)
    assert [p.train_edp.count for p in run.idps][:3] == [4, 4, 1]
    assert run.idps[-1].val_edp.count == 9
    again = NNModel.from_checkpoint(NNCheckpoint.load(run.id, Checkpoints.LAST))
    assert torch.equal(
        torch.as_tensor(again.predict(graphs.loader(4)).logits),
        torch.as_tensor(trained.predict(graphs.loader(4)).logits),
    )
    assert NNRun.load(run.id).model.net == graph_classifier_spec(
        input_dim=5, num_classes=3, hidden_dims=(8,)
    )


def test_rows_are_named_by_graph_id_through_shuffling_and_streaming():
    net, graphs = model(), collection()
    whole = net.predict_proba(graphs.loader(5))
    assert whole.sample_ids.tolist() == list(range(100, 112))
    shuffled = net.predict_proba(graphs.loader(4, shuffle=True, seed=0))
    order = shuffled.sample_ids.argsort()
    assert shuffled.sample_ids.tolist() != whole.sample_ids.tolist()
    torch.testing.assert_close(
        torch.as_tensor(shuffled.probabilities[order]), torch.as_tensor(whole.probabilities)
    )
    with net.iter_predict(graphs.loader(5), rich=True) as stream:
        assert [i for part in stream for i in part.sample_ids] == list(range(100, 112))


# -- recipe, encoders, export -------------------------------------------------------------


@pytest.mark.parametrize("encoder", ["graph_conv", "graph_sage", "graph_att", "gin", "gatv2", "transformer"])  # fmt: skip
@pytest.mark.parametrize("pool", ["mean", "sum", "max", "attention"])
def test_the_recipe_builds_equal_weights_and_moves_no_stream(encoder, pool):
    state = torch.get_rng_state()
    a, b = (model(encoder=encoder, pool=pool, seed=4).net for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters()))
    other = model(encoder=encoder, pool=pool, seed=5).net
    assert not all(torch.equal(x, y) for x, y in zip(a.parameters(), other.parameters()))


def test_edge_features_reach_the_layers_that_take_them():
    graphs = small_graphs()
    for graph in graphs:
        graph.edge_attr = torch.randn(graph.num_edges, 2)
    graphs = GraphCollection(graphs, range(12), targets=[0] * 12)
    for kind in ("gin", "graph_att", "gatv2", "transformer"):
        net = model(encoder=EncoderSpec(kind=kind, edge_dim=2))
        before = net.predict(graphs.loader(4)).logits
        changed = copy.deepcopy(graphs)
        for graph in changed:
            graph.edge_attr = graph.edge_attr + 1
        assert not (before == net.predict(changed.loader(4)).logits).all()
        with pytest.raises(GraphTaskError, match="reads edge features, but the batch has none"):
            net.predict(collection().loader(4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder": "gcn"}, "kind must be one of graph_conv"),
        ({"pool": "median"}, "pool must be one of mean, sum, max, attention"),
        ({"hidden_dims": ()}, "at least one width"),
        ({"hidden_dims": (0,)}, r"hidden_dims\[0\]"),
        ({"dropout": 1.0}, "dropout"),
        ({"activation": "rely"}, "activation"),
        ({"input_dim": 0}, "input_dim"),
        ({"num_classes": 0}, "num_classes"),
    ],
)
def test_a_recipe_that_cannot_be_built_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        graph_classifier_spec(**{"input_dim": 5, "num_classes": 3, **changes})


def test_onnx_is_refused_before_anything_is_written(tmp_path):
    net, made = model(), batch()
    inputs = (made.x, made.edge_index, made.batch, made.ptr)
    with pytest.raises(TypeError, match="GraphClassifier cannot be exported to ONNX"):
        net.to_onnx(str(tmp_path / "m.onnx"), inputs)
    assert list(tmp_path.iterdir()) == []
    assert torch.load(net.export_state_dict(str(tmp_path / "w.pt")), weights_only=True).keys()


def test_an_encoder_that_drops_rows_is_refused():
    class Half(torch.nn.Module):
        def forward(self, x, edge_index):
            return x[::2]

    net = NNModel(module=GraphClassifier(Half()), params=NNModelParams(loss=Losses.CROSS_ENTROPY))
    with pytest.raises(GraphTaskError, match="must keep one per node"):
        net.predict(collection().loader(4))
