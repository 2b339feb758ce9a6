"""The split of edges: what it may hold, how it is drawn, and that it comes again."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_graphs import random_edges
from nnx.link_tasks import FORMAT, LinkSplit, LinkTaskError, split_links
from nnx.link_tasks.codes import Pairs, as_array

NAMES = ("a", "b", "c")


def everything(split: LinkSplit) -> list[tuple[int, int]]:
    parts = (split.train, split.val, split.test, split.val_negatives, split.test_negatives)
    return [edge for part in parts for edge in part]


@st.composite
def graphs(draw):
    nodes = draw(st.integers(3, 12))
    ends = st.integers(0, nodes - 1)
    edges = draw(st.lists(st.tuples(ends, ends), min_size=2, max_size=40))
    return nodes, edges


@given(graphs(), st.booleans(), st.sampled_from(["bar", "allow"]), st.integers(0, 50))
def test_a_split_is_a_partition_and_its_negatives_are_no_edges(graph, directed, loops, seed):
    nodes, edges = graph
    canonical = {e if directed else (min(e), max(e)) for e in edges
                 if loops == "allow" or e[0] != e[1]}  # fmt: skip
    index = torch.tensor(edges).T
    try:
        split = split_links(index, nodes, val=0.2, test=0.2, seed=seed, directed=directed,
                            self_loops=loops)  # fmt: skip
    except LinkTaskError as error:
        assert "none is left to train on" in str(error) or "pairs of nodes are not linked" in str(
            error
        )
        return
    positives = [*split.train, *split.val, *split.test]
    assert sorted(positives) == sorted(canonical)
    assert len(split.val) == len(split.test) == round(0.2 * len(canonical))
    negatives = {*split.val_negatives, *split.test_negatives}
    assert len(negatives) == 2 * len(split.val)
    assert not negatives & canonical
    assert all(loops == "allow" or u != v for u, v in negatives)
    assert all(directed or u <= v for u, v in negatives)
    assert LinkSplit.from_state(json.loads(json.dumps(split.state()))) == split
    assert split.replay(index.flip(1)) == split  # the order of edges does not matter
    if not directed:
        assert split.replay(index.flip(0)) == split  # nor the direction they are written in


@given(st.integers(1, 9), st.booleans(), st.booleans(), st.data())
def test_the_complement_is_every_pair_that_is_no_edge(nodes, directed, loops, data):
    """Beside a list of all pairs."""
    pairs = Pairs(nodes, directed, loops)
    every = [(u, v) for u, v in itertools.product(range(nodes), repeat=2)
             if (loops or u != v) and (directed or u <= v)]  # fmt: skip
    assert pairs.count == len(every)
    if not every:
        return
    codes = pairs.codes(as_array(every))
    assert pairs.ranks(codes).tolist() == list(range(len(every)))
    assert pairs.at(np.arange(len(every))).tolist() == codes.tolist()
    taken = sorted(data.draw(st.sets(st.sampled_from(every))))
    free = [pair for pair in every if pair not in taken]
    absent = pairs.absent(np.arange(len(free)), pairs.codes(as_array(taken)))
    assert [tuple(edge) for edge in pairs.edges(absent).tolist()] == free


def test_pairs_of_a_graph_beyond_32_bits_are_exact():
    n = 3_000_000
    for directed, loops in itertools.product((True, False), repeat=2):
        pairs = Pairs(n, directed, loops)
        ranks = np.array([0, 1, n - 2, n + 5, pairs.count // 3, pairs.count - 1])
        assert pairs.ranks(pairs.at(ranks)).tolist() == ranks.tolist()


def test_every_non_edge_is_as_likely_a_negative_as_any_other():
    edges = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
    seen: dict[tuple[int, int], int] = {}
    for seed in range(3000):
        for edge in split_links(edges, 5, val=1, test=1, seed=seed).val_negatives:
            seen[edge] = seen.get(edge, 0) + 1
    assert set(seen) == {(0, 2), (0, 3), (0, 4), (1, 3), (1, 4), (2, 4)}
    assert all(abs(count - 500) < 110 for count in seen.values())


def test_a_duplicate_or_a_reverse_is_in_one_split_only():
    edges = random_edges(20, 60)
    doubled = torch.cat([edges, edges.flip(0), edges[:, :5]], dim=1)
    assert split_links(doubled, 20, seed=1) == split_links(edges, 20, seed=1)
    apart = split_links(doubled, 20, seed=1, directed=True)
    assert len([*apart.train, *apart.val, *apart.test]) == len({*map(tuple, doubled.T.tolist())}
                                                               - {(i, i) for i in range(20)})  # fmt: skip


def test_no_held_out_edge_is_ever_a_message_edge():
    for val, test in ((0.2, 0.2), (0, 0.3), (0.3, 0), (0, 0)):
        split = split_links(random_edges(20, 60), 20, val=val, test=test, seed=1)
        messages = set(map(tuple, split.message_edge_index().T.tolist()))
        assert messages == {*split.train, *((v, u) for u, v in split.train)}
        assert not messages & {*split.val, *split.test}
        assert not messages & {(v, u) for u, v in (*split.val, *split.test)}


def test_directed_messages_have_no_reverses_and_loops_are_not_doubled():
    directed = split_links(random_edges(20, 60), 20, seed=1, directed=True)
    assert directed.message_edge_index().T.tolist() == [list(e) for e in directed.train]
    looped = LinkSplit(num_nodes=3, train=((0, 0), (0, 1)), self_loops="allow")
    assert looped.message_edge_index().tolist() == [[0, 0, 1], [0, 1, 0]]


def test_counts_and_shares_and_negatives_per_edge():
    split = split_links(random_edges(30, 60), 30, val=3, test=0.1, seed=0, negatives=2)
    assert (len(split.val), len(split.val_negatives)) == (3, 6)
    assert len(split.test_negatives) == 2 * len(split.test)
    assert split.negatives("train") == ()
    assert split.negatives("val") == split.val_negatives


def test_deriving_and_replaying_move_no_global_stream():
    state = torch.get_rng_state(), np.random.get_state()[1].copy()
    edges = random_edges(20, 60)
    split_links(edges, 20, seed=4).replay(edges)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert (np.random.get_state()[1] == state[1]).all()


def test_another_graph_or_a_split_made_by_hand_is_not_replayed():
    edges = random_edges(20, 60)
    split = split_links(edges, 20, seed=4)
    with pytest.raises(LinkTaskError, match="edges, but the split holds"):
        split.replay(edges[:, 1:])
    moved = edges.clone()
    moved[:, 0] = torch.tensor(split.val_negatives[0])
    with pytest.raises(LinkTaskError, match="do not give this split"):
        split.replay(torch.cat([moved], dim=1))
    by_hand = LinkSplit(num_nodes=3, train=((0, 1),), val=((1, 2),))
    with pytest.raises(LinkTaskError, match="made by hand"):
        by_hand.replay(torch.tensor([[0, 1], [1, 2]]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"train": ((1, 0),)}, r"LinkSplit.train: \(1, 0\) is not canonical; write \(0, 1\)"),
        ({"train": ((0, 1), (0, 1))}, r"\(0, 1\) is there twice"),
        ({"train": ((0, 1),), "val": ((0, 1),)}, r"LinkSplit.val: \(0, 1\) is in another split"),
        ({"train": ((0, 1),), "val_negatives": ((0, 1),)}, "is in another split too"),
        ({"train": ((2, 2),)}, "the self-loop of node 2 is barred"),
        ({"train": ((0, 9),)}, r"\(0, 9\) names a node outside 0 to 4"),
        ({"train": ((0, 1, 2),)}, "an edge is two node ids"),
        ({"train": ((0, 0.5),)}, "an edge is two node ids"),
        ({"train": (), "self_loops": "maybe"}, "self_loops must be one of bar, allow"),
        ({"train": (), "num_nodes": 0}, "num_nodes"),
        ({"train": (), "version": 2}, "version"),
        ({"train": (), "edge_labels": (((0, 1), 0),)}, "edge_labels need categories="),
        ({"train": ((0, 1),), "categories": NAMES}, "must name each edge of the split once"),
        ({"train": ((0, 1),), "categories": ("a",), "edge_labels": (((0, 1), 0),)}, "two or more"),
        ({"train": ((0, 1),), "categories": NAMES, "edge_labels": (((0, 1), 3),)}, "none of the categories"),
        ({"train": ((0, 1),), "val": ((1, 2),), "val_negatives": ((0, 2),), "categories": NAMES,
          "edge_labels": (((0, 1), 0), ((1, 2), 1))}, "has no negatives"),
    ],
)  # fmt: skip
def test_a_split_made_by_hand_is_checked(fields, message):
    with pytest.raises(LinkTaskError, match=message):
        LinkSplit(**{"num_nodes": 5, **fields})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"val": 1.0}, "val must be"),
        ({"val": -1}, "val must be"),
        ({"val": True}, "val must be"),
        ({"val": 0.6, "test": 0.6}, "none is left to train on"),
        ({"seed": None}, "seed must be"),
        ({"negatives": 1000}, "negatives are asked for, but only"),
        ({"self_loops": "keep"}, "self_loops must be one of"),
        ({"categories": NAMES}, "needs both edge_labels= and categories="),
        ({"edge_labels": [0] * 60}, "needs both edge_labels= and categories="),
        ({"edge_labels": [0] * 3, "categories": NAMES}, "one per column of edge_index"),
        ({"num_nodes": 10}, "but there are 10 nodes"),
        ({"edge_index": torch.zeros(3)}, "edge_index must be"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused(changes, message):
    given = {"edge_index": random_edges(20, 60), "num_nodes": 20, "seed": 1, **changes}
    with pytest.raises(LinkTaskError, match=message):
        split_links(given.pop("edge_index"), given.pop("num_nodes"), **given)


def test_a_document_of_another_kind_is_refused():
    state = split_links(random_edges(20, 60), 20, seed=1).state()
    assert state["format"] == FORMAT == "nnx.link-split/1"
    for broken, message in (
        ({**state, "format": "nnx.split/1"}, "not a nnx.link-split/1 document"),
        ({**state, "more": 1}, "unknown key 'more'"),
        ({k: v for k, v in state.items() if k != "train"}, "lacks 'train'"),
        ({**state, "topology": "all_edges"}, "topology 'all_edges' is not that of"),
        ([], "not a nnx.link-split/1 document"),
    ):
        with pytest.raises(LinkTaskError, match=message):
            LinkSplit.from_state(broken)


# -- labelled edges -----------------------------------------------------------------------


def labelled(**changes) -> tuple[torch.Tensor, list[int], LinkSplit]:
    edges = random_edges(20, 60)
    labels = [(u * 7 + v * 7) % 3 for u, v in edges.T.tolist()]  # equal for a reverse
    given = {"seed": 1, "val": 0.2, "test": 0.2, "categories": NAMES, "edge_labels": labels}
    return edges, labels, split_links(edges, 20, **{**given, **changes})


def test_labels_go_with_their_edges_and_there_are_no_negatives():
    edges, labels, split = labelled()
    assert (split.mode, split.val_negatives, split.test_negatives) == ("edge_label", (), ())
    for (u, v), label in zip(edges.T.tolist(), labels):
        if u != v:
            assert split.labels()[min(u, v), max(u, v)] == label
    assert split.replay(edges, edge_labels=labels) == split
    assert LinkSplit.from_state(split.state()) == split
    with pytest.raises(LinkTaskError, match="needs edge_labels="):
        split.replay(edges)
    with pytest.raises(LinkTaskError, match="do not give this split"):
        split.replay(edges, edge_labels=[(label + 1) % 3 for label in labels])


def test_visible_edges_pass_messages_and_hidden_ones_do_not():
    _, _, hidden = labelled()
    _, _, visible = labelled(label_existence="visible")
    assert hidden.message_edge_index().shape[1] == 2 * len(hidden.train)
    assert visible.message_edge_index().shape[1] == 2 * len(visible.edge_labels)
    assert hidden.digest() != visible.digest()
    assert LinkSplit.from_state(visible.state()).digest() == visible.digest()


def test_one_edge_with_two_labels_is_refused():
    edges = torch.tensor([[0, 1, 2], [1, 0, 3]])
    with pytest.raises(LinkTaskError, match=r"edge \(0, 1\) is there twice, with different labels"):
        split_links(edges, 4, seed=0, edge_labels=[0, 1, 0], categories=NAMES)
