"""What the original system computed: weights, outputs, a training, two splits."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from nnx import (
    Activations,
    Losses,
    Nets,
    NNModel,
    NNModelParams,
    NNParams,
    NNTrainParams,
    set_seed,
)
from nnx.link_tasks import LinkSplit, split_links
from torch_geometric.data import Data

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "data" / "graph_behaviour.json").read_text(encoding="utf-8")
)
X = torch.randn(7, 6, generator=torch.Generator().manual_seed(4))
E = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 2], [1, 2, 3, 4, 5, 6, 0, 3, 5]])


def model(net: Nets, *, dropout: float = 0.3, **more) -> NNModel:
    set_seed(11)
    params = NNParams(
        input_dim=6, output_dim=3, hidden_dims=[8], dropout_prob=dropout,
        activation=Activations.RELU, **more,
    )  # fmt: skip
    return NNModel(net_params=params, params=NNModelParams(net=net, loss=Losses.CROSS_ENTROPY))


@pytest.mark.parametrize(
    ("case", "net", "more"),
    [
        ("nets_graph_conv", Nets.GRAPH_CONV, {}),
        ("nets_graph_sage", Nets.GRAPH_SAGE, {}),
        ("nets_graph_att", Nets.GRAPH_ATT, {"n_heads": 2}),
    ],
)
def test_a_net_has_the_weights_and_gives_the_outputs_of_the_original(case, net, more):
    wanted, made = GOLDEN[case], model(net, **more).net
    state = made.state_dict()
    assert list(state) == sorted(wanted["weights"], key=list(state).index)
    for name, (shape, total) in wanted["weights"].items():
        assert list(state[name].shape) == shape
        assert float(state[name].double().sum()) == pytest.approx(total, abs=2e-5)
    evaluated = made.eval()(X, E)
    assert list(evaluated.shape) == wanted["shape"]
    assert evaluated.flatten()[:12].tolist() == pytest.approx(wanted["eval"], abs=2e-5)
    made.train()
    set_seed(5)
    assert made(X, E).flatten()[:12].tolist() == pytest.approx(wanted["train"], abs=2e-5)


def test_a_training_on_nodes_is_the_original_s():
    wanted, trained = GOLDEN["graph_train_nodes"], model(Nets.GRAPH_CONV, dropout=0.2)
    graph = Data(x=X, edge_index=E, y=torch.tensor([0, 1, 2, 0, 1, 2, 0]))
    run = trained.train(NNTrainParams(n_epochs=3, seed=3, train_loader=[graph], val_loader=[graph]))
    assert [p.train_edp.loss for p in run.idps] == pytest.approx(wanted["loss"], abs=2e-5)
    assert [p.train_edp.error for p in run.idps] == pytest.approx(wanted["error"], abs=2e-5)
    assert [p.val_edp.loss for p in run.idps] == pytest.approx(wanted["val"], abs=2e-5)
    weight = sum(float(p.detach().double().abs().sum()) for p in trained.net.parameters())
    assert math.isclose(weight, wanted["weight"], rel_tol=2e-4)


def test_the_split_of_a_seed_is_the_original_s():
    wanted = GOLDEN["graph_link_split"]
    edges = torch.randint(0, 14, (2, 40), generator=torch.Generator().manual_seed(71))
    split = split_links(edges, 14, val=0.2, test=0.2, seed=3)
    assert (split.state(), split.digest()) == (wanted["state"], wanted["digest"])
    loaded = LinkSplit.from_state(wanted["state"])
    assert loaded == split
    assert loaded.digest() == wanted["digest"]
    assert loaded.replay(edges) == split


def test_a_split_written_by_hand_has_the_original_s_ids_and_topology():
    wanted = GOLDEN["graph_link_explicit"]
    split = LinkSplit(
        num_nodes=6, train=((0, 1), (1, 2), (2, 3)), val=((3, 4),), test=((4, 5),),
        val_negatives=((0, 5),), test_negatives=((0, 4),), seed=1,
    )  # fmt: skip
    assert (split.digest(), split.state()) == (wanted["digest"], wanted["state"])
    ids = {n: {str(e): i for e, i in split.candidate_ids(n).items()} for n in ("val", "test")}
    assert ids == wanted["ids"]
    assert split.message_edge_index().tolist() == wanted["msg"]
