"""Graph nets elsewhere: exported with any number of nodes and edges, or refused by name."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from made_graphs import adam, karate, small_graphs
from nnx import Activations, Losses, Nets, NNModel, NNModelParams, NNParams, NNTrainParams, set_seed
from nnx.bundles import export_bundle, reconstruct_bundle
from nnx.graph_tasks import GraphCollection, graph_classifier_spec

KINDS = [Nets.GRAPH_CONV, Nets.GRAPH_SAGE, Nets.GRAPH_ATT]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def model(kind):
    set_seed(0)
    shape = NNParams(input_dim=34, output_dim=4, hidden_dims=[8], dropout_prob=0.1,
                     activation=Activations.RELU)  # fmt: skip
    return NNModel(shape, NNModelParams(net=kind, loss=Losses.CROSS_ENTROPY))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.value)
def test_an_export_takes_other_graphs(kind):
    """Of three nodes for the exporter, and run on all of the club's."""
    pytest.importorskip("nnx.hub", exc_type=ImportError)
    onnxruntime = pytest.importorskip("onnxruntime")
    net, graph = model(kind), karate()
    small = (graph.x[:3], torch.tensor([[0, 1, 2, 1], [1, 0, 1, 2]]))
    net.to_onnx("m.onnx", small, input_names=["x", "edges"])
    net.export("m.pt2", "pt2", example_input=small)
    net.net.eval()
    with torch.no_grad():
        wanted = net.net(graph.x, graph.edge_index)
        program = torch.export.load("m.pt2").module()(graph.x, graph.edge_index)
    (found,) = onnxruntime.InferenceSession("m.onnx").run(
        None, {"x": graph.x.numpy(), "edges": graph.edge_index.numpy()}
    )
    torch.testing.assert_close(torch.from_numpy(found), wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(program, wanted, atol=1e-4, rtol=1e-4)


def test_what_an_exporter_cannot_write_is_named_and_leaves_nothing():
    pytest.importorskip("nnx.hub", exc_type=ImportError)
    pytest.importorskip("onnxruntime")
    made = model(Nets.GRAPH_ATT)
    inputs = (torch.randn(3, 34), torch.tensor([[0, 1], [1, 2]]))
    with pytest.raises(RuntimeError, match=r"torch.onnx cannot write GraphAttNN .*safetensors"):
        made.to_onnx("m.onnx", inputs, dynamo=True)
    assert os.listdir(".") == []


def test_a_classifier_of_whole_graphs_is_refused_by_every_runtime():
    pytest.importorskip("nnx.hub", exc_type=ImportError)
    set_seed(0)
    collection = GraphCollection(small_graphs(), range(12), targets=[i % 2 for i in range(12)])
    spec = graph_classifier_spec(input_dim=5, num_classes=2)
    made = NNModel(params=NNModelParams(net=spec, loss=Losses.CROSS_ENTROPY))
    batch = next(iter(collection.loader(4)))
    inputs = (batch.x, batch.edge_index, batch.batch, batch.ptr)
    for format in ("onnx", "pt2"):
        with pytest.raises(TypeError, match="GraphClassifier cannot be exported"):
            made.export("m", format, example_input=inputs)
    assert os.listdir(".") == []
    made.export("m.safetensors", "safetensors")
    made.save_pretrained("saved")
    again = NNModel.from_pretrained("saved").net
    made.net.eval()
    with torch.no_grad():
        assert torch.equal(again(*inputs), made.net(*inputs))


def test_a_run_on_a_graph_continues_from_its_bundle():
    from nnx.graph import NeighborBatches

    graph = karate()

    def params(epochs):
        loader = NeighborBatches(graph, [3, 3], batch_size=7, nodes=graph.train_mask)
        return NNTrainParams(n_epochs=epochs, seed=2, train_loader=loader, optim=adam())

    export_bundle(model(Nets.GRAPH_SAGE).train(params(2)).id, "bundle")
    whole = model(Nets.GRAPH_SAGE).train(params(3))
    shutil.rmtree("runs")
    found = reconstruct_bundle("bundle").resume(params(1))
    assert found.idps[-1].train_edp.loss == whole.idps[-1].train_edp.loss
