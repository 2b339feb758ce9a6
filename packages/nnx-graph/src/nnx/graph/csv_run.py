"""A run on a graph of two tables: its training, and how a stored run finds it again."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from nnx.callbacks import EarlyStopping
from nnx.cli.kept import Keep, continuing, read_kept, write_predictions
from nnx.cli.output import check_output
from nnx.cli.preparation import Preparation
from nnx.cli.screen import sections
from nnx.cli.table import Table, TableError, read_table
from nnx.cli.table_run import load_model
from nnx.enums import Devices, Losses
from nnx.graph.classifier import node_classifier_spec
from nnx.graph.csv_graph import CsvGraph, GraphSource, filled, fit, node_parts, positions
from nnx.graph.dataset import seeds_first
from nnx.graph.loading import NeighborBatches
from nnx.link_tasks.predictor import link_predictor_spec
from nnx.link_tasks.split import split_links
from nnx.link_tasks.task import LinkTask
from nnx.nn_model import NNModel
from nnx.params import (
    ModelSpec,
    MonitorSpec,
    NNModelParams,
    NNOptimParams,
    NNTrainParams,
    TaskSpec,
)
from nnx.prediction.batches import inference_context
from nnx.store.paths import RunPaths
from nnx.store.pointer import resolve_run_id
from nnx.store.predictions import save_predictions
from nnx.store.run import NNRun
from nnx.utils.modes import eval_mode
from torch_geometric.data import Data

FORMAT = "nnx.graph-run/1"
FILE = "graph.json"


class _Batches(list[Any]):
    """Batches that can say what they are of (``data_id``)."""


@dataclass(frozen=True, slots=True)
class GraphJob:
    """Two tables that are ready to train on."""

    source: GraphSource
    graph: CsvGraph
    preparation: Preparation
    parts: Mapping[str, Sequence[int]]  # rows of NODES.csv in each split; of a link task, none
    links: LinkTask | None

    @staticmethod
    def open(source: GraphSource, stored: Preparation | None = None) -> GraphJob:
        """Read, split and prepare; every refusal of the data happens here."""
        graph = CsvGraph.read(source)
        if source.task == "link":
            split = split_links(
                graph.edge_index, len(graph.ids), val=source.validation, test=source.test,
                seed=source.split_seed, directed=source.directed,
            )  # fmt: skip
            fitted = stored or fit(source, graph, range(len(graph.ids)))
            return GraphJob(source, graph, fitted, {}, LinkTask(split))
        parts = node_parts(source, graph.table)
        fitted = stored or fit(source, graph, parts["train"])
        return GraphJob(source, graph, fitted, parts, None)

    def configure(
        self, *, encoder: str, hidden: str, dropout: float, epochs: int, learning_rate: float,
        seed: int, device: str,
    ) -> tuple[NNModel, NNTrainParams]:  # fmt: skip
        """The model and training of the command's options."""
        if device not in [member.value for member in Devices]:
            raise ValueError(f"--device is auto, cpu, cuda or mps, not {device!r}")
        words = hidden.split(",")
        if not all(word.strip().isdigit() and int(word) for word in words):
            raise ValueError(f"--hidden is widths such as 64,32; not {hidden!r}")
        shape: dict[str, Any] = {
            "input_dim": self.preparation.width, "hidden_dims": [int(word) for word in words],
            "encoder": encoder, "dropout": dropout, "seed": seed,
        }  # fmt: skip
        labels = self.preparation.target.labels or ()
        net: ModelSpec
        task: TaskSpec | None
        if self.links is None:
            net = node_classifier_spec(num_classes=len(labels), **shape)
            loss, task = Losses.CROSS_ENTROPY, TaskSpec.categorical(labels=labels)
        else:
            net = link_predictor_spec(**shape)
            loss, task = Losses.BINARY_CROSS_ENTROPY, None
        model = NNModel(params=NNModelParams(net=net, device=Devices(device), loss=loss, task=task))
        optim = NNOptimParams.builder().adam(max_lr=learning_rate).build()
        params = NNTrainParams(n_epochs=epochs, optim=optim, seed=seed)
        if self.links is not None and self.links.split.val:
            params = dataclasses.replace(
                params, metrics=tuple(self.links.metric_specs()), monitor=MonitorSpec("auroc")
            )
        return model, params

    def data(self) -> Data:
        """The whole graph, with targets where there are some (0 elsewhere)."""
        y = None
        if self.links is None:
            y = torch.zeros(len(self.graph.ids), dtype=torch.int64)
            known = [row for rows in self.parts.values() for row in rows]
            y[known] = self.preparation.target.encode(self._filled())[known]
        return Data(
            x=self.preparation.inputs(self.graph.table), y=y,
            edge_index=self.graph.messages(self.source.directed),
        )  # fmt: skip

    def loaders(self, seed: int) -> dict[str, Any]:
        """Training, validation and test loaders; ``None`` where a split is empty."""
        data, source = self.data(), self.source
        if self.links is not None:
            links, named = self.links, {"train": "train", "validation": "val", "test": "test"}
            return {
                split: links.loader(name, data.x, source.batch_size, seed=seed)
                if links.split.positives(name) else None
                for split, name in named.items()
            }  # fmt: skip
        masks = {}
        for split, rows in self.parts.items():
            masks[split] = torch.zeros(len(data.x), dtype=torch.bool)
            masks[split][list(rows)] = True
        full: dict[str, Any] = {
            s: _Batches([seeds_first(data, m)]) if bool(m.any()) else None for s, m in masks.items()
        }
        if source.fanouts is not None:
            full["train"] = NeighborBatches(
                data, source.fanouts, nodes=masks["train"], batch_size=source.batch_size, seed=seed
            )
        return full

    def train(
        self, model: NNModel, params: NNTrainParams, *, salt: str | None = None,
        overwrite: bool = False,
    ) -> str:  # fmt: skip
        """Train, test, and say where everything is; the run's id."""
        loaders = self.loaders(params.seed or 0)
        if loaders["validation"] is not None:
            loaders["validation"].data_id = self.source.held_out(self.graph)
        params = dataclasses.replace(
            params, train_loader=loaders["train"], val_loader=loaders["validation"],
            data_id=self.source.identity(self.graph), overwrite_existing=overwrite,
        )  # fmt: skip
        callbacks: list[Any] = [Keep(FILE, self.state())]
        if self.source.patience is not None:
            callbacks.append(EarlyStopping(patience=self.source.patience))
            salt = salt or f"patience={self.source.patience}"
        more: dict[str, Any] = {}
        if self.links is not None:
            more = {"objective": self.links.objective()}
            if loaders["validation"] is not None:
                more["eval_step_fn"] = self.links.eval_step()
        run = model.train(params, callbacks=callbacks, salt=salt, **more)
        self._report(run, loaders)
        return str(run.id)

    def state(self) -> dict[str, Any]:
        """What ``graph.json`` holds."""
        where = {name: os.path.abspath(getattr(self.source, name)) for name in ("nodes", "edges")}
        return {
            "format": FORMAT,
            "source": {**self.source.state(), **where},
            "content": self.graph.content,
            "preparation": self.preparation.state(),
        }

    def _report(self, run: NNRun, loaders: Mapping[str, Any]) -> None:
        tag = "best" if loaders["validation"] is not None else "last"
        model = load_model(run.id, tag)
        scores = self._test_links(run, model, loaders) if self.links else self._test_nodes(
            run, model, loaders)  # fmt: skip
        counts = (
            ", ".join(f"{len(rows)} {name}" for name, rows in self.parts.items())
            if self.links is None
            else ", ".join(
                f"{len(self.links.split.positives(name))} {name}"
                for name in ("train", "val", "test")
            )
        )
        what = "links" if self.links else "nodes"
        report = {
            "data": [
                ("nodes", f"{len(self.graph.ids)} of {self.source.nodes}"),
                ("edges", f"{self.graph.edge_index.shape[1]} of {self.source.edges}"),
                (what, counts),
            ],
            f"test, {tag} checkpoint": scores,
            "where": [
                ("run", run.id),
                ("folder", RunPaths.of(run.id).dir),
                ("history", f"nnx show {run.id[:8]}"),
                ("predict", f"nnx graph predict {run.id[:8]}"),
            ],
        }
        sections({title: rows for title, rows in report.items() if rows})

    def _test_nodes(
        self, run: NNRun, model: NNModel, loaders: Mapping[str, Any]
    ) -> list[tuple[str, str]]:
        names = np.array(self.preparation.target.labels, dtype=object)
        for split in ("validation", "test"):
            if loaders[split] is None:
                continue
            batch = loaders[split][0]
            targets = batch.y[: batch.batch_size].numpy()
            predicted = model.predict(loaders[split]).logits.argmax(axis=1)
            save_predictions(
                run.id, split, targets=list(names[targets]), predicted=list(names[predicted]),
                sample_ids=[self.graph.ids[row] for row in batch.seed_id.tolist()],
            )  # fmt: skip
        if loaders["test"] is None:
            return []
        record = model.evaluate(loaders["test"])
        named = ("accuracy", "f1", "precision", "recall", "loss")
        return [(name, f"{getattr(record, name):.4f}") for name in named]

    def _test_links(
        self, run: NNRun, model: NNModel, loaders: Mapping[str, Any]
    ) -> list[tuple[str, str]]:
        links = self.links
        assert links is not None
        scores = []
        for split in ("validation", "test"):
            if loaders[split] is None:
                continue
            found = links.predict(model, loaders[split])
            save_predictions(
                run.id, split, targets=found.targets.tolist(),
                predicted=(found.logits >= 0).astype(int).tolist(),
                sample_ids=[" ".join(self.graph.ids[n] for n in p) for p in found.pairs.tolist()],
            )  # fmt: skip
            if split == "test":
                for scorer, figures in links.report(found, k=(10,)).items():
                    values = (
                        f"{n} {v.value:.4f}" for n, v in figures.items() if v.value is not None
                    )
                    scores.append((scorer.replace("_", " "), "  ".join(values)))
        return scores

    def _filled(self) -> Table:
        return filled(self.graph.table, str(self.source.target))


def predict_with(
    run: str,
    nodes: str | None,
    edges: str | None,
    *,
    pairs: str | None,
    checkpoint: str,
    output: str | None,
) -> None:
    """Write a CSV of predictions for each node, or for each row of ``pairs``."""
    run_id = resolve_run_id(run)
    source, stored = _stored(run_id)
    if (nodes is None) != (edges is None):
        raise ValueError("give both NODES.csv and EDGES.csv, or neither")
    if nodes is not None and edges is not None:
        source = dataclasses.replace(source, nodes=nodes, edges=edges)
    if output is not None:
        check_output(output, inputs=[source.nodes, source.edges, *([pairs] if pairs else [])])
    fitted = Preparation.from_state(stored["preparation"])
    model = load_model(run_id, checkpoint)
    if source.task == "node":
        if pairs is not None:
            raise ValueError(f"run {run_id} classifies nodes; --pairs is for a link run")
        header, rows = _predicted_nodes(model, CsvGraph.read(source), source, fitted)
    else:
        if pairs is None or nodes is not None:
            raise ValueError(
                f"run {run_id} predicts links of the graph that it learned: pass the pairs to "
                "score as --pairs PAIRS.csv, and no other nodes"
            )
        job = _same_data(run_id, source, stored)
        header, rows = _predicted_pairs(model, job, pairs)
    write_predictions(output, header, rows)
    if output is not None:
        print(f"{len(rows)} predictions in {output}")


def resume_run(run: str, *, epochs: int | None = None) -> str:
    """Train on from a run's LAST checkpoint as a new run; its id."""
    run_id = resolve_run_id(run)
    source, stored = _stored(run_id)
    job = _same_data(run_id, source, stored)
    found = NNRun.load(run_id)
    params = continuing(found.train, run_id, epochs)
    return job.train(NNModel(params=found.model), params, salt=found.salt)


def _stored(run_id: str) -> tuple[GraphSource, dict[str, Any]]:
    state = read_kept(run_id, FILE, (FORMAT,), command="nnx graph train")
    return GraphSource.from_state(state["source"]), state


def _same_data(run_id: str, source: GraphSource, stored: Mapping[str, Any]) -> GraphJob:
    """The job of a stored run, whose files must be what they were."""
    job = GraphJob.open(source, Preparation.from_state(stored["preparation"]))
    if job.graph.content != stored["content"]:
        raise ValueError(
            f"{source.nodes} or {source.edges} is not what run {run_id} was trained on (the "
            "content changed); train a new run on it"
        )
    return job


def _predicted_nodes(
    model: NNModel, graph: CsvGraph, source: GraphSource, fitted: Preparation
) -> tuple[list[str], list[list[Any]]]:
    labels = fitted.target.labels or ()
    data = Data(x=fitted.inputs(graph.table), edge_index=graph.messages(source.directed))
    chances = torch.from_numpy(model.predict([data]).logits).softmax(dim=1)
    header = [graph.id, f"predicted {fitted.target.name}", *(f"probability {n}" for n in labels)]
    best = chances.argmax(dim=1).tolist()
    return header, [
        [node, labels[index], *(f"{p:.6f}" for p in row)]
        for node, index, row in zip(graph.ids, best, chances.tolist())
    ]


def _predicted_pairs(
    model: NNModel, job: GraphJob, pairs: str
) -> tuple[list[str], list[list[Any]]]:
    assert job.links is not None
    table = read_table(pairs, delimiter=job.source.delimiter)
    if len(table.columns) < 2:
        raise TableError(f"{pairs} needs two columns, the ends of each pair")
    names = tuple(table.columns)[:2]
    place = {node: row for row, node in enumerate(job.graph.ids)}
    both = torch.tensor([positions(table, n, place, job.source.nodes) for n in names])
    inputs = job.preparation.inputs(job.graph.table), job.links.topology, both
    with eval_mode(model.net), inference_context(model):
        logits = model.net(*(part.to(model.device) for part in inputs)).cpu().double()
    ends = zip(*(table.columns[name] for name in names))
    return [*names, "probability"], [
        [u, v, f"{p:.6f}"] for (u, v), p in zip(ends, logits.sigmoid().tolist())
    ]
