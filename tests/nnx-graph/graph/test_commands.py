"""``nnx graph``: two tables in, runs and predictions out."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pytest
import torch
from made_graphs import karate
from nnx import NNRun
from nnx.cli.app import build
from nnx.store.election import standings
from nnx.store.predictions import load_predictions
from torch_geometric.data import Data
from typer.testing import CliRunner

NAMES = [f"member {i}" for i in range(34)]


@pytest.fixture
def files():
    """Karate club in two tables: names with spaces, a number, a category, a class."""
    graph = karate()
    degree = torch.bincount(graph.edge_index[0]).tolist()
    with open("nodes.csv", "w", encoding="utf-8") as stream:
        stream.write("name,friends,side,club\n")
        for i in range(34):
            club = "" if i in (4, 20) else "abcd"[int(graph.y[i])]
            stream.write(f"{NAMES[i]},{degree[i]},{'left' if i < 17 else 'right'},{club}\n")
    with open("edges.csv", "w", encoding="utf-8") as stream:
        stream.write("from,to,year\n")
        for u, v in graph.edge_index.T.tolist():
            if u < v:
                stream.write(f"{NAMES[u]},{NAMES[v]},1977\n")


def nnx(*arguments, fails=False):
    result = CliRunner().invoke(build(), [str(a) for a in arguments])
    assert (result.exit_code != 0) == fails, result.output
    return result.output


def train(*more, fails=False):
    return nnx("graph", "train", "nodes.csv", "edges.csv", "--quiet", *more, fails=fails)


def run_of(output: str) -> str:
    return re.search(r"run\s+([0-9a-f]{32})", output).group(1)


def test_nodes_are_trained_tested_stored_shown_and_predicted(files):
    out = train("--target", "club", "--epochs", 40)
    run_id = run_of(out)
    assert "34 of nodes.csv" in out
    assert "78 of edges.csv" in out
    stored = {p.split: p for p in load_predictions(run_id)}
    assert set(stored) == {"validation", "test"}
    assert set(stored["test"].sample_ids) <= set(NAMES)
    right = [a == b for a, b in zip(stored["test"].targets, stored["test"].predicted)]
    accuracy = float(re.search(r"accuracy\s+([\d.]+)", out).group(1))
    assert accuracy == pytest.approx(sum(right) / len(right), abs=1e-4)
    run = NNRun.load(run_id)
    assert len(run.idps) == 40
    assert run.train.data_id.startswith("nodes.csv+edges.csv@")
    (standing,) = standings("runs").values()  # in whatever batches, it is judged on these rows
    assert standing.data.startswith("nodes.csv+edges.csv@")
    assert standing.data != run.train.data_id
    shown = nnx("show", run_id[:8])
    assert run_id in shown
    rows = list(csv.DictReader(io.StringIO(nnx("graph", "predict", run_id[:8]))))
    assert [row["name"] for row in rows] == NAMES
    assert {row["predicted club"] for row in rows} <= set("abcd")
    assert sum(float(rows[0][f"probability {c}"]) for c in "abcd") == pytest.approx(1, abs=1e-5)
    by_id = {row["name"]: row["predicted club"] for row in rows}
    best = zip(stored["test"].sample_ids, stored["test"].predicted)
    assert all(by_id[name] == predicted for name, predicted in best)


def test_a_run_of_a_graph_has_a_report(files):
    pytest.importorskip("nnx.viz.report", exc_type=ImportError)
    run_id = run_of(train("--target", "club", "--epochs", 2))
    nnx("report", run_id[:8], "--output", "report.html")
    assert "test" in Path("report.html").read_text(encoding="utf-8")


def test_a_node_without_a_class_passes_messages_and_is_in_no_split(files):
    run_id = run_of(train("--target", "club", "--epochs", 2))
    seen = {i for part in load_predictions(run_id) for i in part.sample_ids}
    assert not seen & {NAMES[4], NAMES[20]}
    from nnx.graph.csv_graph import GraphSource
    from nnx.graph.csv_run import GraphJob

    job = GraphJob.open(GraphSource(nodes="nodes.csv", edges="edges.csv", target="club"))
    assert sum(map(len, job.parts.values())) == 32
    data = job.data()
    graph = karate()
    assert isinstance(data, Data)
    assert sorted(data.edge_index.T.tolist()) == sorted(graph.edge_index.T.tolist())
    assert data.y[0] == graph.y[0]
    rows = torch.tensor(job.parts["train"])
    standardized = data.x[rows][:, 0]
    assert standardized.mean().item() == pytest.approx(0, abs=1e-5)


def test_sampled_training_and_other_encoders(files):
    out = train("--target", "club", "--epochs", 3, "--neighbours", "5,5", "--batch-size", 8,
                "--encoder", "gatv2", "--hidden", "8")  # fmt: skip
    assert len(NNRun.load(run_of(out)).idps) == 3 * 3


def test_links_are_trained_and_reported_beside_what_learns_nothing(files):
    out = train("--task", "link", "--drop", "club", "--epochs", 5, "--encoder", "graph_conv")
    for scorer in ("model", "common neighbours", "constant"):
        assert re.search(rf"{scorer}\s+auroc 0\.\d+  ap", out), out
    run_id = run_of(out)
    run = NNRun.load(run_id)
    assert set(run.idps[-1].val_edp.metrics) == {"auroc", "ap", "bce"}
    Path("pairs.csv").write_text("a,b\nmember 0,member 33\nmember 33,member 0\n", encoding="utf-8")
    rows = list(csv.DictReader(io.StringIO(
        nnx("graph", "predict", run_id, "--pairs", "pairs.csv"))))  # fmt: skip
    assert [row["a"] for row in rows] == ["member 0", "member 33"]
    assert rows[0]["probability"] == rows[1]["probability"]
    nnx("graph", "predict", run_id, "--pairs", "pairs.csv", "-o", "out.csv")
    assert Path("out.csv").read_text(encoding="utf-8").startswith("a,b,probability\n")


@pytest.mark.parametrize("task", [("--target", "club"), ("--task", "link", "--drop", "club")])
def test_a_resumed_run_is_the_uninterrupted_one(files, task):
    whole = run_of(train(*task, "--epochs", 6))
    half = run_of(train(*task, "--epochs", 3))
    rest = run_of(nnx("graph", "resume", half, "--epochs", 3, "--quiet"))
    losses = [p.val_edp.loss for p in NNRun.load(whole).idps if p.val_edp]
    again = [p.val_edp.loss for p in NNRun.load(rest).idps if p.val_edp]
    assert again == losses[3:]
    assert NNRun.load(rest).train.parent_run_id == half or NNRun.load(rest).id != half


def test_a_run_cannot_go_on_with_other_files(files):
    run_id = run_of(train("--target", "club", "--epochs", 1))
    state = json.loads(Path("runs", run_id, "graph.json").read_text(encoding="utf-8"))
    assert state["format"] == "nnx.graph-run/1"
    with open("edges.csv", "a", encoding="utf-8") as stream:
        stream.write("member 4,member 9,1978\n")
    assert "the content changed" in nnx("graph", "resume", run_id, "--epochs", 1, fails=True)
    rows = nnx("graph", "predict", run_id, "nodes.csv", "edges.csv").splitlines()
    assert len(rows) == 35  # nodes may be predicted on a graph that grew


def test_ids_may_be_numbers_in_any_column_and_edges_may_have_a_direction():
    Path("nodes.csv").write_text(
        "x,key,y\n" + "".join(f"{i % 5},{9000000000 + i},{i % 2}\n" for i in range(20)),
        encoding="utf-8",
    )
    edges = "".join(f"1,{9000000000 + i},{9000000000 + (i + 2) % 20}\n" for i in range(20))
    Path("edges.csv").write_text("w,b,e\n" + edges, encoding="utf-8")
    out = train("--target", "y", "--id", "key", "--ends", "b,e", "--directed", "--epochs", 2)
    rows = nnx("graph", "predict", run_of(out)).splitlines()
    assert rows[0].startswith("key,predicted y,")
    assert rows[1].startswith("9000000000,")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--target names the column to predict; for links, pass --task link"),
        (("--target", "clubs"), "no column 'clubs'"),
        (("--task", "link", "--target", "club"), "--target is for --task node"),
        (("--task", "link", "--drop", "friends", "--drop", "side", "--drop", "club"),
         "has no column beside the id 'name' to learn from"),
        (("--task", "edges"), "--task is node or link, not 'edges'"),
        (("--target", "club", "--validation", "0.6", "--test", "0.6"), "leave nothing"),
        (("--target", "club", "--neighbours", "a"), "--neighbours is counts such as 10,10"),
        (("--target", "club", "--ends", "from"), "--ends is two columns"),
        (("--target", "club", "--encoder", "gcn"), "kind must be one of graph_conv"),
        (("--target", "club", "--hidden", "x"), "--hidden is widths such as 64,32"),
        (("--target", "club", "--device", "tpu"), "--device is auto, cpu, cuda or mps"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_leaves_nothing(files, arguments, message):
    assert message in train(*arguments, fails=True)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("nodes", "edges", "message"),
    [
        ("a,x,y\n1,2,0\n1,3,1\n", "u,v\n1,1\n", "row 2 (line 3), column 'a': the node '1' is in row 1 already"),
        ("a,x,y\n1,2,0\n,3,1\n", "u,v\n1,1\n", "row 2 (line 3), column 'a': a node needs an id"),
        ("a,x,y\n1,2,0\n2,3,1\n", "u,v\n1,2\n2,7\n", "row 2 (line 3), column 'v': there is no node '7' in nodes.csv"),
        ("a,x,y\n1,2,0\n2,3,1\n", "u\n1\n", "edges.csv needs two columns"),
        ("a,x,y\n1,2,\n2,3,\n", "u,v\n1,2\n", "no node has a 'y'"),
    ],
)  # fmt: skip
def test_tables_that_are_no_graph_are_refused_with_the_row(nodes, edges, message):
    Path("nodes.csv").write_text(nodes, encoding="utf-8")
    Path("edges.csv").write_text(edges, encoding="utf-8")
    assert message in " ".join(train("--target", "y", fails=True).split())
    assert not Path("runs").exists()


def test_a_run_of_another_kind_is_refused(files):
    Path("data.csv").write_text("x,y\n" + "1,a\n2,b\n" * 20, encoding="utf-8")
    out = nnx("train", "data.csv", "--target", "y", "--epochs", 1, "--quiet")
    assert "was not made by nnx graph train" in nnx("graph", "predict", run_of(out), fails=True)
    run_id = run_of(train("--target", "club", "--epochs", 1))
    assert "--pairs is for a link run" in nnx(
        "graph", "predict", run_id, "--pairs", "x.csv", fails=True
    )
    assert "give both NODES.csv and EDGES.csv" in nnx(
        "graph", "predict", run_id, "nodes.csv", fails=True
    )
    edges = Path("edges.csv").read_bytes()
    said = nnx("graph", "predict", run_id, "--output", "edges.csv", fails=True)
    assert "which it would replace" in " ".join(said.split())
    assert Path("edges.csv").read_bytes() == edges
