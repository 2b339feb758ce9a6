"""Graph results meet the rest: pictures, streaming records, exports."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import nnx
import pytest
import torch
from made_graphs import adam, karate, small_graphs
from nnx import (
    Activations,
    Checkpoints,
    Losses,
    MetricSpec,
    Nets,
    NNCheckpoint,
    NNModel,
    NNModelParams,
    NNParams,
    NNTrainParams,
    StreamingMetrics,
    TaskSpec,
    set_seed,
    streaming_eval_step,
)
from nnx.graph import NeighborBatches
from nnx.graph_tasks import IGNORE, GraphCollection, graph_classifier_spec


def nodes() -> tuple[NNModel, NeighborBatches]:
    set_seed(0)
    shape = NNParams(input_dim=34, output_dim=4, hidden_dims=[8], dropout_prob=0.0,
                     activation=Activations.RELU)  # fmt: skip
    model = NNModel(net_params=shape, params=NNModelParams(
        net=Nets.GRAPH_SAGE, loss=Losses.CROSS_ENTROPY, task=TaskSpec.categorical(4)))  # fmt: skip
    graph = karate()
    held_out = ~graph.train_mask
    return model, NeighborBatches(graph, [3, 3], batch_size=7, nodes=held_out, shuffle=False)


def graphs() -> tuple[NNModel, GraphCollection]:
    targets = [i % 3 if i % 4 else None for i in range(12)]
    collection = GraphCollection(small_graphs(), range(12), targets=targets, unlabeled=[0, 4, 8])
    spec = graph_classifier_spec(input_dim=5, num_classes=3, hidden_dims=(8,))
    return NNModel(params=NNModelParams(
        net=spec, loss=Losses.CROSS_ENTROPY, task=TaskSpec.categorical(3, ignore_index=IGNORE)
    )), collection  # fmt: skip


def test_streaming_records_of_seed_rows_and_of_graphs_are_those_of_evaluate():
    model, batches = nodes()
    classifier, collection = graphs()
    for net, loader in ((model, batches), (classifier, collection.loader(5))):
        params = {"n_epochs": 1, "train_loader": loader, "val_loader": loader, "optim": adam()}
        run = net.train(NNTrainParams(**params), eval_step_fn=streaming_eval_step)
        record, whole = run.idps[-1].val_edp, net.evaluate(loader)
        assert (record.count, record.accuracy) == (whole.count, whole.accuracy)
        assert record.loss == pytest.approx(whole.loss, abs=1e-6)


def test_streamed_metrics_of_seed_rows_count_the_seeds_alone():
    model, batches = nodes()
    metrics = StreamingMetrics.for_task([MetricSpec("accuracy")], TaskSpec.categorical(4))
    with model.iter_predict(batches, rich=True) as stream:
        for part, batch in zip(stream, batches):
            metrics.update_logits(batch.y[: batch.batch_size], torch.as_tensor(part.logits))
    found = metrics.finalize()
    assert found.count == len(batches.nodes) == 30
    assert found.values["accuracy"] == pytest.approx(model.evaluate(batches).accuracy)


def test_the_pictures_of_a_training_on_karate_club():
    report = pytest.importorskip("nnx.viz.report", exc_type=ImportError)
    model, batches = nodes()
    run = model.train(NNTrainParams(
        n_epochs=2, train_loader=batches, val_loader=batches, optim=adam()))  # fmt: skip
    page = Path(report.write_report([run.id], "report.html"))
    assert run.id in page.read_text(encoding="utf-8")
    checkpoint = NNCheckpoint.load(run.id, Checkpoints.LAST)
    dataset = SimpleNamespace(test_loader=batches)
    figure = nnx.VisUtils.two_dim_tsne_checkpoint_logits(checkpoint, dataset, n_samples=30)
    assert sum(len(trace.x) for trace in figure.data) == 30


def test_pictures_and_exports_refuse_whole_graphs(tmp_path):
    viz = pytest.importorskip("nnx.viz", exc_type=ImportError)
    model, collection = graphs()
    run = model.train(NNTrainParams(n_epochs=1, train_loader=collection.loader(4), optim=adam()))
    checkpoint = NNCheckpoint.load(run.id, Checkpoints.LAST)
    dataset = SimpleNamespace(test_loader=collection.loader(4))
    with pytest.raises(ValueError, match="gives batches of whole graphs"):
        nnx.VisUtils.two_dim_tsne_checkpoint_logits(checkpoint, dataset, n_samples=8)
    batch = next(iter(collection.loader(4)))
    inputs = (batch.x, batch.edge_index, batch.batch, batch.ptr)
    with pytest.raises(TypeError, match="GraphClassifier cannot be exported to ONNX"):
        viz.netron_export(model, str(tmp_path / "picture.onnx"), inputs)
    assert not (tmp_path / "picture.onnx").exists()
