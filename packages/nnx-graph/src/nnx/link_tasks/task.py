"""A link task: loaders, objective, evaluator and prediction, all checked against one split."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from nnx.components import ComponentSpec
from nnx.graph.determinism import check_determinism
from nnx.link_tasks.baselines import common_neighbours
from nnx.link_tasks.checks import BatchCheck
from nnx.link_tasks.loading import LinkLoader
from nnx.link_tasks.metrics import MetricValue, link_metrics, link_ranking
from nnx.link_tasks.split import LinkSplit, LinkTaskError, split_name
from nnx.objectives import LossTerm, Objective, ObjectiveContext, ObjectiveResult
from nnx.params import MetricSpec
from nnx.prediction.batches import inference_context
from nnx.records import NNEvaluationDataPoint
from nnx.utils import validation as check
from nnx.utils.modes import eval_mode
from torch.nn import functional as F

MODES = ("binary", "edge_label")
_METRICS = {
    "binary": {"auroc": "nnx.link_auroc", "ap": "nnx.link_ap", "bce": "nll"},
    "edge_label": {"accuracy": "accuracy", "nll": "nll"},
}


@dataclass(frozen=True, slots=True)
class LinkPrediction:
    """Scored candidates in the order of their ids: ``ids`` ``(K,)``, ``pairs`` ``(K, 2)``.

    ``logits`` and ``probabilities`` are float64, ``(K,)``, or ``(K, categories)`` for edge
    labels; ``targets`` ``(K,)`` are 0 or 1, or category indices.
    """

    ids: np.ndarray
    pairs: np.ndarray
    logits: np.ndarray
    probabilities: np.ndarray
    targets: np.ndarray
    split: str


@dataclass(frozen=True)
class LinkTask:
    """What is done with a split: predict links (``mode="binary"``) or edge categories.

    ``mode=None`` takes the split's. ``train_negatives`` are drawn anew in each epoch, that
    many per training edge (1 by default; a split of edge labels has none). Evaluation and
    prediction hold all candidates in memory, at most ``max_candidates``.
    """

    split: LinkSplit
    mode: str | None = None
    train_negatives: int | None = None
    max_candidates: int = 1_000_000
    version: int = 1

    def __post_init__(self) -> None:
        owner = "LinkTask"
        if not isinstance(self.split, LinkSplit):
            raise LinkTaskError(f"{owner}.split must be a LinkSplit, not {self.split!r}")
        mode = self.split.mode if self.mode is None else self.mode
        if mode != self.split.mode:
            raise LinkTaskError(
                f"{owner}.mode is {mode!r}, but the split is one of {self.split.mode!r}"
            )
        object.__setattr__(self, "mode", mode)
        try:
            check.count(owner, "max_candidates", self.max_candidates)
            if check.count(owner, "version", self.version) != 1:
                check.refuse(owner, "version", self.version, "1")
            drawn = self.train_negatives
            if drawn is None:
                drawn = 1 if mode == "binary" else 0
            drawn = check.count(owner, "train_negatives", drawn, at_least=0)
        except ValueError as error:
            raise LinkTaskError(str(error)) from None
        if mode == "edge_label" and drawn:
            raise LinkTaskError("an edge-label task has no negatives: a non-edge has no category")
        object.__setattr__(self, "train_negatives", drawn)
        free = self.split.pairs.count - len(self._excluded)
        if drawn * len(self.split.train) > free:
            raise LinkTaskError(
                f"{drawn * len(self.split.train)} training negatives are asked for, but only "
                f"{free} pairs are neither an edge nor a fixed negative; lower train_negatives"
            )

    @cached_property
    def topology(self) -> torch.Tensor:
        """The split's message edges, one tensor for all batches."""
        return self.split.message_edge_index()

    @cached_property
    def _excluded(self) -> np.ndarray:
        """Sorted codes of what a training negative may not be."""
        arrays = self.split.arrays.values()
        return np.sort(np.concatenate([self.split.pairs.codes(edges) for edges in arrays]))

    @cached_property
    def _check(self) -> BatchCheck:
        return BatchCheck(self.split, self.topology)

    def state(self) -> dict[str, Any]:
        """What the task is, as JSON-like data."""
        return {
            "version": self.version,
            "mode": self.mode,
            "train_negatives": self.train_negatives,
            "max_candidates": self.max_candidates,
            "split": self.split.state(),
        }

    def loader(
        self, name: str, x: torch.Tensor, batch_size: int, *, seed: int | None = None
    ) -> LinkLoader:
        """Batches of the candidates of a split: ``"train"``, ``"val"`` or ``"test"``.

        ``x`` are the features ``(num_nodes, F)``. ``seed`` is that of the training
        negatives and order; the split's own by default (0 for one made by hand).
        """
        split_name(name)
        nodes = self.split.num_nodes
        if not isinstance(x, torch.Tensor) or x.ndim != 2 or len(x) != nodes:
            shape = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            raise LinkTaskError(f"x must be a tensor ({nodes}, features), not {shape}")
        if not self.split.positives(name):
            raise LinkTaskError(f"the split has no {name} edge")
        if seed is None:
            seed = self.split.seed or 0
        try:
            size = check.count("LinkTask.loader", "batch_size", batch_size)
            seed = check.integer("LinkTask.loader", "seed", seed)
        except ValueError as error:
            raise LinkTaskError(str(error)) from None
        return LinkLoader(
            self.split, name, x, size, topology=self.topology,
            negatives=self.train_negatives or 0, excluded=self._excluded, seed=seed,
        )  # fmt: skip

    def check_batch(self, batch: Any) -> None:
        """Raise :class:`LinkTaskError` for a batch that is not this split's."""
        self._check(batch)

    def objective(self, *, nonfinite: str = "fail") -> LinkObjective:
        """Cross-entropy over the candidates of training batches, binary or of categories."""
        return LinkObjective(self, nonfinite=nonfinite)

    def eval_step(self) -> LinkEval:
        """The validation of a run: exact figures over every validation candidate."""
        return LinkEval(self)

    def metric_specs(self) -> list[Any]:
        """The figures of :meth:`eval_step`, for ``NNTrainParams(metrics=...)``."""
        return [MetricSpec(id, 1, name=name) for name, id in _METRICS[str(self.mode)].items()]

    def logits(self, net: torch.nn.Module, batch: Any, device: torch.device) -> torch.Tensor:
        """The network's output for a checked batch, ``(K,)`` or ``(K, categories)``."""
        check_determinism(net)
        parts = (batch.x, batch.edge_index, batch.edge_label_index)
        output = net(*(part.to(device) for part in parts))
        count = len(batch.candidate_id)
        width = len(self.split.categories or ())
        wanted = (count, width) if self.mode == "edge_label" else (count,)
        if not isinstance(output, torch.Tensor) or tuple(output.shape) != wanted:
            shape = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output)
            raise LinkTaskError(f"the model must give logits of shape {wanted}, not {shape}")
        return output

    def losses(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        """The loss of each candidate, ``(K,)``."""
        targets = batch.edge_label.to(logits.device)
        if self.mode == "edge_label":
            return F.cross_entropy(logits, targets, reduction="none")
        return F.binary_cross_entropy_with_logits(
            logits, targets.to(logits.dtype), reduction="none"
        )

    def predict(self, model: Any, batches: Any) -> LinkPrediction:
        """Score the candidates of one split, batch by batch, in eval mode.

        Raises :class:`LinkTaskError` for batches of several splits, a candidate that is
        there twice, more than ``max_candidates``, or outputs that are not finite.
        """
        if not isinstance(batches, Iterable) or hasattr(batches, "edge_index"):
            raise LinkTaskError("predict reads a loader or a list of batches")
        parts: list[tuple[torch.Tensor, ...]] = []
        names: set[str] = set()
        total = 0
        with eval_mode(model.net), inference_context(model):
            for batch in batches:
                self.check_batch(batch)
                names.add(batch.link_split)
                total += len(batch.candidate_id)
                self._check_total(names, total)
                logits = self.logits(model.net, batch, model.device)
                kept = batch.candidate_id, batch.edge_label_index.T, batch.edge_label
                parts.append((*(part.cpu() for part in kept), logits.cpu().double()))
        if not parts:
            raise LinkTaskError("there is no batch to predict")
        ids, pairs, targets, logits = (torch.cat(part) for part in zip(*parts))
        if not bool(torch.isfinite(logits).all()):
            raise LinkTaskError("the model gave logits that are not finite")
        order = torch.argsort(ids)
        ids = ids[order]
        if len(repeated := ids[1:][ids[1:] == ids[:-1]]):
            raise LinkTaskError(f"candidate {int(repeated[0])} is there twice")
        logits = logits[order]
        chances = logits.sigmoid() if self.mode == "binary" else logits.softmax(1)
        return LinkPrediction(
            ids=ids.numpy(), pairs=pairs[order].numpy(), logits=logits.numpy(),
            probabilities=chances.numpy(), targets=targets[order].long().numpy(),
            split=names.pop(),
        )  # fmt: skip

    def report(
        self,
        prediction: LinkPrediction,
        *,
        k: Sequence[int] = (10, 50, 100),
        ties: str = "pessimistic",
    ) -> dict[str, dict[str, MetricValue]]:
        """The figures of a binary prediction beside those of scorers that learn nothing.

        ``"model"``, ``"common_neighbours"`` (how many neighbours a pair shares in the
        training topology; Liben-Nowell & Kleinberg, 2007) and ``"constant"``: each with
        AUROC, AP, hits@k and MRR over the same candidates. A model near the common
        neighbours learned little more; a constant that does well shows a leak or a wrong
        figure. ``ties`` is the policy of :func:`link_ranking`.
        """
        if self.mode != "binary":
            raise LinkTaskError("only binary candidates are compared with scorers of pairs")
        scorers = {
            "model": prediction.logits,
            "common_neighbours": common_neighbours(self.topology, prediction.pairs),
            "constant": np.zeros(len(prediction.pairs)),
        }
        report = {}
        for name, scores in scorers.items():
            found = link_metrics(scores, prediction.targets, from_logits=True)
            ranks = link_ranking(scores, prediction.targets, k=k, ties=ties)
            report[name] = {"auroc": found["auroc"], "ap": found["ap"], **ranks}
        return report

    def _check_total(self, names: set[str], total: int) -> None:
        if len(names) > 1:
            raise LinkTaskError(f"the batches are of several splits: {', '.join(sorted(names))}")
        if total > self.max_candidates:
            raise LinkTaskError(
                f"there are more than max_candidates={self.max_candidates} candidates, which "
                "exact figures hold in memory; raise it in the LinkTask"
            )


class LinkObjective(Objective):
    """The loss of a :class:`LinkTask` over the candidates of training batches.

    A component named ``"link.task"``: a resume with another split, other negatives or
    another seed of them is refused before any update.
    """

    def __init__(self, task: LinkTask, *, nonfinite: str = "fail") -> None:
        super().__init__(nonfinite=nonfinite)
        self.task = task
        self._seed: int | None = None  # of the negatives, once it is known

    def __call__(self, ctx: ObjectiveContext) -> ObjectiveResult:
        batch, task = ctx.batch, self.task
        task.check_batch(batch)
        if batch.link_split != "train":
            raise LinkTaskError(
                f"the objective trains on train batches, but this is one of {batch.link_split!r}"
            )
        self._check_seed(batch)
        logits = ctx.full_precision(task.logits(ctx.model.net, batch, ctx.model.device))
        losses = task.losses(logits, batch)
        term = LossTerm("link", losses.sum(), len(losses))
        record = NNEvaluationDataPoint(count=len(losses))
        return ObjectiveResult([term], record=record)

    def _check_seed(self, batch: Any) -> None:
        seed = int(batch.negatives_seed)
        if self._seed is None:
            self._seed = seed
        elif seed != self._seed:
            raise LinkTaskError(
                f"this run draws its training rows from seed {self._seed}, but the loader from "
                f"{seed}; make it with task.loader(..., seed={self._seed})"
            )

    def component_spec(self) -> ComponentSpec:
        return ComponentSpec("link.task", 1)

    def component_state(self) -> dict[str, Any]:
        split = self.task.split
        return {
            "split": split.digest(),
            "mode": str(self.task.mode),
            "train_negatives": int(self.task.train_negatives or 0),
            "topology": split.state()["topology"],
            "negatives_seed": self._seed,
        }

    def check_component_state(self, state: Mapping[str, Any], *, version: int) -> list[str]:
        mine = self.component_state()
        return [
            f"the run was trained with {name}={state.get(name)!r}, but this task has {mine[name]!r}"
            for name in ("split", "mode", "train_negatives", "topology")
            if state.get(name) != mine[name]
        ]

    def load_component_state(self, state: Mapping[str, Any], *, version: int) -> None:
        if problems := self.check_component_state(state, version=version):
            raise LinkTaskError(problems[0])
        self._seed = state["negatives_seed"]


class LinkEval:
    """The validation of a run: every candidate of the val split once, scored exactly."""

    def __init__(self, task: LinkTask) -> None:
        self.task = task

    def __call__(self, ctx: Any) -> Any:
        task = self.task
        prediction = task.predict(ctx.model, ctx.val_loader)
        if prediction.split != "val":
            raise LinkTaskError(
                f"the training evaluator reads the val split, not {prediction.split!r}; score "
                "another after training, with task.predict(...) and link_metrics(...)"
            )
        wanted = len(task.split.positives("val")) + len(task.split.negatives("val"))
        if len(prediction.ids) != wanted:
            raise LinkTaskError(
                f"the val loader gave {len(prediction.ids)} of {wanted} validation candidates"
            )
        found = link_metrics(prediction.logits, prediction.targets, from_logits=True)
        figures = {name: figure.value for name, figure in found.items() if figure.value is not None}
        loss = figures["bce" if task.mode == "binary" else "nll"]
        accuracy = figures.get("accuracy")
        return NNEvaluationDataPoint(
            loss=loss, accuracy=accuracy, error=None if accuracy is None else 1 - accuracy,
            count=wanted, metrics=figures,
        )  # fmt: skip
