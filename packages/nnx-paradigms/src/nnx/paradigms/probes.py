"""What an embedding is good for, and whether it collapses, as a run's validation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from nnx.paradigms import monitored
from nnx.paradigms.collapse import embedding_metrics
from nnx.paradigms.gathering import gather_rows
from nnx.prediction.batches import forward_inputs, inference_context
from nnx.records import NNEvaluationDataPoint
from nnx.seeding import isolated_rng
from nnx.utils import validation as check
from nnx.utils.modes import eval_mode

if TYPE_CHECKING:
    from nnx.engine.contexts import EvalStepContext
    from nnx.models import Model
    from nnx.params import MetricSpec
    from torch import nn

Embed = Callable[["nn.Module", torch.Tensor], torch.Tensor]
"""``(net, inputs)`` to embeddings (B, D)."""

BLOCK = 1024


class EmbeddingProbe:
    """An ``eval_step_fn``: classes of the validation rows, told from those of labelled ``bank`` rows.

    ``bank`` and the validation loader give batches of (inputs, class indices). The net,
    in eval mode and without gradients, embeds both; ``embed`` says how when its output is
    not what should be probed. The record has ``knn_accuracy`` (:func:`knn_classes`),
    ``linear_accuracy`` (:func:`linear_classes`, fitted on the bank each time) and, of the
    validation rows, :func:`embedding_metrics`. The accuracy and error of the record, by
    which BEST is chosen, are those of the linear probe, or of the neighbours without it.

    In several processes every one reads the whole bank; validation rows are gathered.
    Nothing draws from the global streams. Raises ``ValueError`` for no probe at all.
    """

    def __init__(
        self,
        bank: Iterable[Any],
        *,
        neighbours: int | None = 20,
        temperature: float = 0.07,
        linear: bool = True,
        penalty: float = 1e-3,
        embed: Embed | None = None,
    ) -> None:
        owner = "EmbeddingProbe"
        self.bank, self.embed = bank, embed
        self.neighbours = neighbours
        if neighbours is not None:
            self.neighbours = check.count(owner, "neighbours", neighbours)
        self.temperature = float(check.real(owner, "temperature", temperature, above=0))
        self.linear = check.flag(owner, "linear", linear)
        self.penalty = float(check.real(owner, "penalty", penalty, above=0))
        if neighbours is None and not linear:
            raise ValueError(f"{owner} needs neighbours, linear=True or both")

    def metric_specs(self) -> list[MetricSpec]:
        """The figures, for ``NNTrainParams(metrics=...)`` and monitors."""
        left_out = {"knn_accuracy"} if self.neighbours is None else set()
        left_out |= set() if self.linear else {"linear_accuracy"}
        return monitored.specs(name for name in monitored.EMBEDDING if name not in left_out)

    def __call__(self, ctx: EvalStepContext) -> NNEvaluationDataPoint:
        with eval_mode(ctx.model.net), inference_context(ctx.model), isolated_rng():
            known, labels = self._rows(ctx.model, self.bank, "the bank")
            rows, targets = self._rows(ctx.model, ctx.val_loader, "the validation loader")
            rows, targets = gather_rows(rows)[0], gather_rows(targets)[0]
        metrics = {}
        if self.neighbours is not None:
            found = knn_classes(
                known, labels, rows, neighbours=self.neighbours, temperature=self.temperature
            )
            metrics["knn_accuracy"] = float((found == targets).double().mean())
        if self.linear:
            found = linear_classes(known, labels, rows, penalty=self.penalty)
            metrics["linear_accuracy"] = float((found == targets).double().mean())
        accuracy = metrics["linear_accuracy" if self.linear else "knn_accuracy"]
        metrics = {**metrics, **embedding_metrics(rows)}
        return NNEvaluationDataPoint(accuracy=accuracy, error=1.0 - accuracy, metrics=metrics)

    def _rows(
        self, model: Model, loader: Iterable[Any], what: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        outputs, targets = [], []
        for batch in loader:
            args, _, target = model.split_batch(batch)
            if (
                not isinstance(target, torch.Tensor)
                or target.dim() != 1
                or target.is_floating_point()
            ):
                raise ValueError(
                    f"EmbeddingProbe: {what} must give batches of (inputs, class indices (B,))"
                )
            if self.embed is None:
                output = forward_inputs(model, batch)
            else:
                output = self.embed(model.net, args[0].to(model.device))
            if output.dim() != 2:
                raise ValueError(
                    f"EmbeddingProbe: the net gives {tuple(output.shape)}, not embeddings (B, D); "
                    "say with embed= how to make one of a row"
                )
            outputs.append(output.detach().float())
            targets.append(target.to(output.device))
        if not outputs:
            raise ValueError(f"EmbeddingProbe: {what} yielded no batches")
        return torch.cat(outputs), torch.cat(targets)


@torch.no_grad()
def knn_classes(
    known: torch.Tensor,
    labels: torch.Tensor,
    rows: torch.Tensor,
    *,
    neighbours: int = 20,
    temperature: float = 0.07,
) -> torch.Tensor:
    """The class (N,) of each of ``rows`` (N, D), by vote of its nearest ``known`` rows (M, D).

    The ``neighbours`` most similar by cosine vote with exp(similarity / ``temperature``)
    (Wu et al. 2018, arXiv:1805.01978); of fewer known rows, all of them.
    """
    unit = F.normalize(known, dim=1)
    classes = int(labels.max()) + 1
    found = []
    for block in F.normalize(rows, dim=1).split(BLOCK):
        nearest, which = (block @ unit.t()).topk(min(neighbours, len(unit)), dim=1)
        votes = torch.exp((nearest - nearest[:, :1]) / temperature)
        scores = votes.new_zeros(len(block), classes).scatter_add(1, labels[which], votes)
        found.append(scores.argmax(dim=1))
    return torch.cat(found)


def linear_classes(
    known: torch.Tensor, labels: torch.Tensor, rows: torch.Tensor, *, penalty: float = 1e-3
) -> torch.Tensor:
    """The class (N,) of each of ``rows`` by logistic regression on the ``known`` ones.

    Features are standardized by the known rows. The mean cross-entropy plus ``penalty`` / 2
    times the squared weights (not the biases) is minimized from zero by L-BFGS in float64,
    so that nothing is drawn.
    """
    known, rows = known.detach().double(), rows.detach().double()
    mean, spread = known.mean(dim=0), known.std(dim=0, correction=0)
    spread = torch.where(spread > 1e-12, spread, 1.0)
    known, rows = (known - mean) / spread, (rows - mean) / spread
    classes = int(labels.max()) + 1
    with torch.enable_grad():
        weight = known.new_zeros(classes, known.shape[1], requires_grad=True)
        bias = known.new_zeros(classes, requires_grad=True)
        search = torch.optim.LBFGS(
            [weight, bias], max_iter=200, tolerance_grad=1e-6, line_search_fn="strong_wolfe"
        )

        def loss() -> torch.Tensor:
            search.zero_grad()
            value = F.cross_entropy(known @ weight.t() + bias, labels)
            value = value + penalty / 2 * weight.square().sum()
            value.backward()
            return value

        search.step(loss)
    return (rows @ weight.detach().t() + bias.detach()).argmax(dim=1)
