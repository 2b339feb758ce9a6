"""A link task from loader to prediction: what it draws, checks, records and refuses."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
import torch
from made_graphs import adam, karate, random_edges, small_graphs
from nnx import (
    Checkpoints,
    ComponentRestoreError,
    Losses,
    MonitorSpec,
    NNCheckpoint,
    NNModel,
    NNModelParams,
    NNTrainerParams,
    NNTrainParams,
    Trainer,
)
from nnx.graph_tasks import GraphCollection
from nnx.link_tasks import (
    FACTORY_ID,
    LinkPredictor,
    LinkSplit,
    LinkTask,
    LinkTaskError,
    is_link_batch,
    link_metrics,
    link_predictor_spec,
    split_links,
)
from nnx.link_tasks.baselines import common_neighbours
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import nn
from torch.nn import functional as F

GRAPH = karate()


def task(**changes) -> LinkTask:
    given = {"val": 0.15, "test": 0.15, "seed": 1}
    split = {k: changes.pop(k) for k in list(changes) if k in (*given, "directed", "self_loops")}
    return LinkTask(split_links(GRAPH.edge_index, 34, **{**given, **split}), **changes)


def label_task(**changes) -> LinkTask:
    edges = GRAPH.edge_index
    labels = ((edges[0] + edges[1]) % 3).tolist()
    return LinkTask(split_links(edges, 34, val=0.2, test=0.2, seed=1, edge_labels=labels,
                                categories=("a", "b", "c"), **changes))  # fmt: skip


def model(**changes) -> NNModel:
    loss = Losses.CROSS_ENTROPY if "num_categories" in changes else Losses.BINARY_CROSS_ENTROPY
    spec = link_predictor_spec(**{"input_dim": 34, "hidden_dims": (16, 8), **changes})
    return NNModel(params=NNModelParams(net=spec, loss=loss))


def train(net: NNModel, links: LinkTask, *, objective=None, loader=None, **params):
    params = {"n_epochs": 2, "seed": 0, "optim": adam(),
              "train_loader": loader or links.loader("train", GRAPH.x, 32),
              "val_loader": links.loader("val", GRAPH.x, 7),
              "metrics": tuple(links.metric_specs()), **params}  # fmt: skip
    return net.train(
        NNTrainParams(**params), objective=objective or links.objective(),
        eval_step_fn=links.eval_step(),
    )  # fmt: skip


def rows(loader) -> list[tuple[tuple[int, int], float, int]]:
    return [
        (tuple(pair), float(target), int(i))
        for b in loader
        for pair, target, i in zip(b.edge_label_index.T.tolist(), b.edge_label, b.candidate_id)
    ]


# -- loaders ------------------------------------------------------------------------------


def test_held_out_candidates_are_the_manifest_s_in_every_pass():
    links = task()
    loader = links.loader("val", GRAPH.x, 5)
    wanted = [
        (edge, 1.0 if edge in links.split.val else 0.0, i)
        for edge, i in links.split.candidate_ids("val").items()
    ]
    assert rows(loader) == wanted == rows(loader)
    assert len(loader) == -(-len(wanted) // 5) == len(list(loader))
    for batch in loader:
        assert is_link_batch(batch)
        assert torch.equal(batch.edge_index, links.split.message_edge_index())


def test_each_epoch_draws_its_own_negatives_from_the_complement():
    links = task(train_negatives=2)
    loader, split = links.loader("train", GRAPH.x, 16), links.split
    fixed = {*split.train, *split.val, *split.test, *split.val_negatives, *split.test_negatives}
    seen = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        passed = rows(loader)
        assert rows(loader) == passed  # another iteration changes nothing
        negatives = [pair for pair, target, _ in passed if target == 0]
        assert len(negatives) == 2 * len(split.train) == len(set(negatives))
        assert not set(negatives) & fixed
        assert all(u < v for u, v in negatives)
        assert sorted(pair for pair, target, _ in passed if target == 1) == list(split.train)
        assert len({i for _, _, i in passed}) == len(passed)
        seen.append(passed)
    assert seen[0] != seen[1] != seen[2]
    again = links.loader("train", GRAPH.x, 16)
    assert [rows(again), rows(again)] == seen[:2]  # without an announcement, by its own passes
    other = links.loader("train", GRAPH.x, 16, seed=99)
    assert rows(other) != seen[0]


def test_drawing_moves_no_global_stream():
    state = torch.get_rng_state(), np.random.get_state()[1].copy()
    rows(task().loader("train", GRAPH.x, 16))
    assert torch.equal(torch.get_rng_state(), state[0])
    assert (np.random.get_state()[1] == state[1]).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinkTask("x"), "must be a LinkSplit"),
        (lambda: task(mode="edge_label"), "mode is 'edge_label', but the split is one of 'binary'"),
        (lambda: task(train_negatives=1000), "training negatives are asked for, but only"),
        (lambda: task(train_negatives=-1), "train_negatives"),
        (lambda: task(max_candidates=0), "max_candidates"),
        (lambda: LinkTask(label_task().split, train_negatives=1), "a non-edge has no category"),
        (lambda: task().loader("valid", GRAPH.x, 4), "a split is one of train, val, test"),
        (lambda: task().loader("val", GRAPH.x[1:], 4), r"x must be a tensor \(34, features\)"),
        (lambda: task().loader("val", GRAPH.x, 0), "batch_size"),
        (lambda: task(val=0).loader("val", GRAPH.x, 4), "the split has no val edge"),
    ],
)
def test_a_task_that_cannot_be_is_refused(make, message):
    with pytest.raises(LinkTaskError, match=message):
        make()


# -- training -----------------------------------------------------------------------------


def test_training_is_a_plain_loop_over_the_candidates():
    links, net = task(), model()
    plain = copy.deepcopy(net.net)
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-2)
    loader, losses = links.loader("train", GRAPH.x, 32), []
    for epoch in range(2):
        loader.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            out = plain(batch.x, batch.edge_index, batch.edge_label_index)
            loss = F.binary_cross_entropy_with_logits(out, batch.edge_label)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    run = train(net, links)
    assert [p.train_edp.loss for p in run.idps] == pytest.approx(losses, abs=1e-6)
    for ours, theirs in zip(net.net.parameters(), plain.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_the_validation_record_is_exact_over_all_candidates():
    links, net = task(), model()
    run = train(net, links, monitor=MonitorSpec("auroc"))
    record = run.idps[-1].val_edp
    batch = next(iter(links.loader("val", GRAPH.x, 1000)))
    with torch.no_grad():
        out = net.net.eval()(batch.x, batch.edge_index, batch.edge_label_index).double()
    wanted = {
        "auroc": roc_auc_score(batch.edge_label, out),
        "ap": average_precision_score(batch.edge_label, out),
        "bce": F.binary_cross_entropy_with_logits(out, batch.edge_label.double()).item(),
    }
    assert record.metrics == pytest.approx(wanted)
    assert (record.loss, record.count) == (pytest.approx(wanted["bce"]), len(out))
    again = NNModel.from_checkpoint(NNCheckpoint.load(run.id, Checkpoints.LAST))
    one, other = (links.predict(m, links.loader("test", GRAPH.x, 5)) for m in (net, again))
    assert (one.logits == other.logits).all()


def test_a_resumed_run_draws_what_the_uninterrupted_one_would_have():
    links = task()
    whole, half, rest = model(), model(), model()
    train(whole, links, n_epochs=4, data_id="whole")
    first = train(half, links, data_id="half")
    train(rest, links, data_id="half", resume_from_run_id=first.id)
    for ours, theirs in zip(rest.net.parameters(), whole.net.parameters()):
        assert torch.equal(ours, theirs)


def test_a_callback_that_reads_the_training_loader_changes_nothing():
    links = task()
    alone, watched = model(), model()
    train(alone, links, data_id="alone")
    loader = links.loader("train", GRAPH.x, 32)

    def read(ctx):
        rows(loader)

    watched.train(
        NNTrainParams(n_epochs=2, seed=0, train_loader=loader, optim=adam(), data_id="watched"),
        objective=links.objective(), callbacks=[read],
    )  # fmt: skip
    for ours, theirs in zip(watched.net.parameters(), alone.net.parameters()):
        assert torch.equal(ours, theirs)


def test_a_resume_on_another_split_task_or_seed_is_refused():
    links = task()
    first = train(model(), links)
    resume = {"resume_from_run_id": first.id}
    for other in (task(seed=2), task(train_negatives=2)):
        with pytest.raises(ComponentRestoreError, match="link.task: the run was trained with"):
            train(model(), other, **resume)
    with pytest.raises(LinkTaskError, match="draws its training rows from seed 1, but the loader"):
        train(model(), links, loader=links.loader("train", GRAPH.x, 32, seed=7), **resume)
    train(model(), task(seed=2), **resume, resume_mode="weights_only")


def test_a_trainer_trains_links_too():
    links, net = task(), model()
    alone = copy.deepcopy(net)
    train(alone, links, n_epochs=1)
    Trainer(net).train(
        NNTrainerParams(n_epochs=1, seed=0, optims={"all": adam()},
                        train_loader=links.loader("train", GRAPH.x, 32)),
        objective=links.objective(),
    )  # fmt: skip
    for ours, theirs in zip(net.net.parameters(), alone.net.parameters()):
        assert torch.equal(ours, theirs)


def test_a_one_class_validation_set_is_never_best():
    split = LinkSplit(num_nodes=34, train=((0, 1), (1, 2)), val=((2, 3),))
    links = LinkTask(split)
    run = train(model(), links, monitor=MonitorSpec("auroc"))
    assert set(run.idps[-1].val_edp.metrics) == {"bce"}
    assert NNCheckpoint.load(run.id, Checkpoints.BEST) is None
    assert NNCheckpoint.load(run.id, Checkpoints.LAST) is not None


def test_edge_categories_train_and_predict():
    links, net = label_task(), model(decoder="mlp", num_categories=3)
    run = train(net, links, monitor=MonitorSpec("accuracy"))
    found = links.predict(net, links.loader("test", GRAPH.x, 4))
    assert found.logits.shape == (len(links.split.test), 3)
    assert found.targets.tolist() == [links.split.labels()[e] for e in links.split.test]
    np.testing.assert_allclose(found.probabilities.sum(1), 1)
    figures = link_metrics(found.logits, found.targets, from_logits=True)
    assert figures["accuracy"].value == (found.logits.argmax(1) == found.targets).mean()
    record = run.idps[-1].val_edp
    assert record.accuracy == record.metrics["accuracy"] == 1 - record.error


# -- predictions --------------------------------------------------------------------------


def test_predictions_are_aligned_and_in_the_order_of_candidates():
    links, net = task(), model()
    batches = list(links.loader("test", GRAPH.x, 4))
    found = links.predict(net, reversed(batches))
    ids = links.split.candidate_ids("test")
    assert found.ids.tolist() == sorted(ids.values())
    assert [ids[tuple(p)] for p in found.pairs.tolist()] == found.ids.tolist()
    assert found.logits.dtype == found.probabilities.dtype == np.float64
    assert (found.split, found.targets.sum()) == ("test", len(links.split.test))
    assert net.net.training


def test_predictions_of_a_mixture_or_of_too_much_are_refused():
    links, net = task(), model()
    val, test = (list(links.loader(n, GRAPH.x, 4)) for n in ("val", "test"))
    for batches, message in (
        ([val[0], test[0]], "of several splits: test, val"),
        ([val[0], val[0]], "is there twice"),
        ([], "no batch to predict"),
        (val[0], "reads a loader or a list of batches"),
    ):
        with pytest.raises(LinkTaskError, match=message):
            links.predict(net, batches)
    with pytest.raises(LinkTaskError, match="more than max_candidates=3"):
        task(max_candidates=3).predict(net, val)
    with torch.no_grad():
        next(net.net.parameters()).fill_(float("nan"))
    with pytest.raises(LinkTaskError, match="not finite"):
        links.predict(net, val)


# -- checks of batches --------------------------------------------------------------------


def changed(name: str, **changes):
    batch = next(iter(task().loader(name, GRAPH.x, 8)))
    for field, value in changes.items():
        batch[field] = value(batch) if callable(value) else value
    return batch


def with_pair(pair):
    def put(batch):
        pairs = batch.edge_label_index.clone()
        pairs[:, 0] = torch.tensor(pair)
        return pairs

    return put


def with_message(pair):
    return lambda batch: torch.cat([batch.edge_index, torch.tensor(pair)[:, None]], dim=1)


SPLIT = task().split


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (changed("train", edge_index=with_message(SPLIT.val[0])),
         "not in the training topology: it is a held-out positive of val"),
        (changed("train", edge_index=with_message(SPLIT.test[0][::-1])),
         "it is a held-out positive of test"),
        (changed("train", edge_index=with_message(SPLIT.val_negatives[0])),
         "is not in the training topology$"),
        (changed("train", edge_index=with_message((40, 2))), "message edge 40 -> 2"),
        (changed("train", edge_label_index=with_pair((3, 3))), r"\(3, 3\) is a barred self-loop"),
        (changed("train", edge_label_index=with_pair(SPLIT.val[0])), "is an edge of val"),
        (changed("train", edge_label_index=with_pair(SPLIT.test_negatives[0])),
         "is a fixed negative of test"),
        (changed("val", edge_label_index=with_pair(SPLIT.train[0])), "is an edge of train"),
        (changed("val", edge_label_index=with_pair((50, 2))), "names a node outside 0 to 33"),
        (changed("val", edge_label=lambda b: 1 - b.edge_label), "of val has the wrong target"),
        (changed("train", edge_label=lambda b: 1 - b.edge_label), "of train has the wrong target"),
        (changed("val", candidate_id=lambda b: b.candidate_id + 1), "of val has the wrong id"),
        (changed("train", candidate_id=lambda b: b.candidate_id + 1), "of train has the wrong id"),
        (changed("train", x=GRAPH.x[:5]), "has 5 nodes, but the split 34"),
        (changed("val", link_split="train"), "candidate .* of a train batch is"),
        (changed("val", link_split=None), "no batch of a link task"),
        (changed("val", candidate_id=lambda b: b.candidate_id[1:]), "do not fit"),
        (GRAPH, "no batch of a link task"),
    ],
)  # fmt: skip
def test_a_batch_that_is_not_the_split_s_is_refused_before_any_update(batch, message):
    links, net = task(), model()
    before = copy.deepcopy(net.net.state_dict())
    with pytest.raises(LinkTaskError, match=message):
        links.check_batch(batch)
    with pytest.raises(LinkTaskError):
        train(net, links, loader=[batch])
    assert all(torch.equal(before[k], v) for k, v in net.net.state_dict().items())
    assert not list(Path().glob("runs/*/run.yaml"))


def test_a_topology_that_is_written_to_after_a_check_is_checked_again():
    links = task()
    batch = next(iter(links.loader("train", GRAPH.x, 8)))
    batch.edge_index = batch.edge_index.clone()
    links.check_batch(batch)
    links.check_batch(batch)
    batch.edge_index[:, 0] = torch.tensor(links.split.test[0])
    with pytest.raises(LinkTaskError, match="held-out positive of test"):
        links.check_batch(batch)


def test_batches_keep_to_their_role():
    links = task()
    with pytest.raises(LinkTaskError, match="trains on train batches, but this is one of 'val'"):
        train(model(), links, loader=links.loader("val", GRAPH.x, 4))
    with pytest.raises(LinkTaskError, match="evaluator reads the val split, not 'test'"):
        train(model(), links, val_loader=links.loader("test", GRAPH.x, 4))
    with pytest.raises(LinkTaskError, match="the val loader gave 4 of"):
        train(model(), links, val_loader=list(links.loader("val", GRAPH.x, 4))[:1])


def test_the_default_paths_refuse_link_batches():
    links, net = task(), model()
    loader = links.loader("val", GRAPH.x, 4)
    for use in (
        lambda: net.predict(loader),
        lambda: net.evaluate(loader),
        lambda: list(net.iter_predict(loader)),
        lambda: net.train(NNTrainParams(n_epochs=1, train_loader=loader)),
    ):
        with pytest.raises((LinkTaskError, ValueError), match="checked against its split|no task"):
            use()
    graphs = GraphCollection(small_graphs(3), range(3), targets=[0] * 3)
    with pytest.raises(LinkTaskError, match="reads batches of LinkTask.loader.*whole graphs"):
        net.predict(graphs.loader(2))


# -- models -------------------------------------------------------------------------------


def test_the_dot_decoder_is_the_inner_product_and_symmetric():
    net, edges = model().net.eval(), task().split.message_edge_index()
    pairs = random_edges(34, 20, seed=5)
    nodes = net.encoder(GRAPH.x, edges)
    out = net(GRAPH.x, edges, pairs)
    torch.testing.assert_close(out, (nodes[pairs[0]] * nodes[pairs[1]]).sum(1))
    torch.testing.assert_close(out, net(GRAPH.x, edges, pairs.flip(0)))
    assert (out < 0).any()  # no activation after the encoder's last layer
    mlp = model(decoder="mlp").net.eval()
    assert mlp(GRAPH.x, edges, pairs).shape == (20,)
    torch.testing.assert_close(mlp(GRAPH.x, edges, pairs), mlp(GRAPH.x, edges, pairs.flip(0)))


def test_a_module_of_one_s_own_tells_directions_apart():
    class Directed(nn.Module):
        def __init__(self):
            super().__init__()
            self.source, self.target = nn.Linear(34, 4), nn.Linear(34, 4)

        def forward(self, x, edge_index, pairs):
            return (self.source(x)[pairs[0]] * self.target(x)[pairs[1]]).sum(1)

    links = task(directed=True)
    net = NNModel(module=Directed(), params=NNModelParams(loss=Losses.BINARY_CROSS_ENTROPY))
    run = train(net, links)
    assert run.idps[-1].val_edp.metrics["auroc"] > 0

    class Wide(Directed):
        def forward(self, x, edge_index, pairs):
            return self.source(x)[pairs[0]]

    wide = NNModel(module=Wide(), params=NNModelParams(loss=Losses.BINARY_CROSS_ENTROPY))
    with pytest.raises(LinkTaskError, match=r"logits of shape \(32,\), not \(32, 4\)"):
        train(wide, links)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: link_predictor_spec(input_dim=3, decoder="cosine"), "decoder must be one of dot, mlp"),
        (lambda: link_predictor_spec(input_dim=3, num_categories=3), 'need decoder="mlp"'),
        (lambda: link_predictor_spec(input_dim=3, encoder={"kind": "gin", "edge_dim": 2}), "no edge features"),
        (lambda: LinkPredictor(nn.Identity(), "mlp"), "width"),
        (lambda: LinkPredictor(nn.Identity(), outputs=2), "1 for the dot decoder"),
    ],
)  # fmt: skip
def test_a_recipe_that_cannot_be_built_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
    assert FACTORY_ID == "nnx.link_predictor"


# -- beside what learns nothing -----------------------------------------------------------


def test_common_neighbours_are_networkx_s():
    links = task()
    graph = nx.Graph()
    graph.add_nodes_from(range(34))
    graph.add_edges_from(links.split.train)
    pairs = np.array(list(itertools.combinations(range(34), 2)))
    found = common_neighbours(links.topology, pairs)
    assert found.tolist() == [len(list(nx.common_neighbors(graph, u, v))) for u, v in pairs]


def test_the_report_sets_a_model_beside_scorers_that_learn_nothing():
    links, net = task(), model()
    prediction = links.predict(net, links.loader("test", GRAPH.x, 9))
    report = links.report(prediction, k=(3,))
    assert set(report) == {"model", "common_neighbours", "constant"}
    assert set(report["model"]) == {"auroc", "ap", "hits@3", "mrr"}
    figures = link_metrics(prediction.logits, prediction.targets, from_logits=True)
    assert report["model"]["auroc"] == figures["auroc"]
    constant = {name: found.value for name, found in report["constant"].items()}
    n = len(links.split.test)
    assert constant == {"auroc": 0.5, "ap": 0.5, "hits@3": 0.0, "mrr": pytest.approx(1 / (n + 1))}
    shared = common_neighbours(links.topology, prediction.pairs)
    assert report["common_neighbours"]["auroc"].value == pytest.approx(
        roc_auc_score(prediction.targets, shared)
    )
    with pytest.raises(LinkTaskError, match="only binary candidates"):
        label_task().report(prediction)
