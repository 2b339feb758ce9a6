"""What an output means is said in one place, and everything reads it there."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from nnx import (
    Losses,
    MetricSpec,
    Nets,
    NNModel,
    NNModelParams,
    NNOptimParams,
    NNParams,
    NNTrainParams,
    TaskAdapter,
    TaskSpec,
    TaskValidationError,
    task_adapter,
)
from nnx.monitors import check_metrics
from nnx.prediction.inference import decide
from nnx.streaming import StreamingMetrics
from nnx.tasks.decoding import CLASSES, ERRORS, INDICATORS, decode_batch
from nnx.tasks.losses import supervised_terms
from nnx.tasks.semantics import Semantics
from torch import nn

LOGITS = torch.tensor([[0.3, -2.0, 1.0], [-0.1, 0.0, -0.2]])
ARGMAX, SIGNS = [2, 1], [[1, 0, 1], [0, 1, 0]]

MEANINGS = [
    # task or loss, kind, what metrics can read, decisions
    (TaskSpec.categorical(3), "categorical", ("labels", "probabilities"), ARGMAX),
    (TaskSpec.multilabel(3), "bernoulli", ("labels", "probabilities"), SIGNS),
    (TaskSpec.multilabel(3, threshold=0.6), "bernoulli", ("labels", "probabilities"),
     [[0, 0, 1], [0, 0, 0]]),
    (TaskSpec.regression(3), "continuous", ("continuous",), LOGITS.tolist()),
    (nn.CrossEntropyLoss(), "categorical", ("labels", "probabilities"), ARGMAX),
    (nn.NLLLoss(), "categorical", ("labels", "probabilities"), ARGMAX),
    (nn.BCEWithLogitsLoss(), "bernoulli", ("labels", "probabilities"), SIGNS),
    (nn.MSELoss(), "continuous", ("continuous",), ARGMAX),
    (nn.HuberLoss(), "continuous", ("continuous",), ARGMAX),
    (nn.MultiMarginLoss(), "decoded", ("labels",), ARGMAX),
]  # fmt: skip


@pytest.mark.parametrize(("said_by", "kind", "reads", "decisions"), MEANINGS)
def test_a_task_or_a_loss_says_what_outputs_mean(make_model, said_by, kind, reads, decisions):
    said = {"task" if isinstance(said_by, TaskSpec) else "loss_fn": said_by}
    model = make_model(**said)
    semantics = Semantics.of(model)
    assert (semantics.kind, semantics.reads) == (kind, reads)
    assert semantics.decide(LOGITS).tolist() == decisions
    # a prediction decides the same, and a metric is refused exactly where it cannot read
    assert decide(model, LOGITS.numpy()).tolist() == decisions
    for id, reading in (("accuracy", "labels"), ("nll", "probabilities"), ("mae", "continuous")):
        if reading in reads:
            check_metrics(model, [MetricSpec(id)])
        else:
            with pytest.raises(ValueError, match=f"reads {reading}"):
                check_metrics(model, [MetricSpec(id)])


def test_probabilities_are_those_of_the_kind_in_double_precision():
    softmax = Semantics("categorical").probabilities(LOGITS)
    assert torch.equal(softmax, LOGITS.double().softmax(1))
    assert torch.equal(Semantics("bernoulli").probabilities(LOGITS), LOGITS.double().sigmoid())
    for kind in ("continuous", "decoded"):
        with pytest.raises(ValueError, match=f"{kind} outputs have no probabilities"):
            Semantics(kind).probabilities(LOGITS)


@pytest.mark.parametrize(
    ("spec", "loss_fn", "target", "mode"),
    [
        (TaskSpec.categorical(3), nn.CrossEntropyLoss(), torch.tensor([2, 0]), CLASSES),
        (TaskSpec.multilabel(3), nn.BCEWithLogitsLoss(), torch.tensor(SIGNS), INDICATORS),
        (TaskSpec.regression(3), nn.MSELoss(), torch.zeros(2, 3), ERRORS),
    ],
)
def test_an_adapter_decodes_its_own_batches(spec, loss_fn, target, mode):
    adapter = task_adapter(spec)
    prepared = adapter.prepare(LOGITS, target)
    decoded = adapter.decoded(*prepared)
    assert decoded.mode == mode
    assert decode_batch(loss_fn, adapter, *prepared).mode == mode
    assert decoded.predicted.tolist() == adapter.decode(LOGITS).tolist()


def test_a_stream_takes_its_semantics_from_the_task():
    for task, kind in (
        (TaskSpec.categorical(3), "categorical"),
        (TaskSpec.multilabel(3), "bernoulli"),
        (TaskSpec.regression(3), "continuous"),
    ):
        assert StreamingMetrics.for_task([], task).semantics == kind


def test_an_adapter_remembers_nothing_between_two_batches():
    adapter = task_adapter(TaskSpec.regression(2))
    output = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    half = torch.tensor([[1.0, math.nan], [2.0, math.nan], [0.5, math.nan]])
    masked, whole = adapter.prepare(output, half), adapter.prepare(output, torch.zeros(3, 2))
    assert vars(adapter) == {"spec": adapter.spec}
    # Scored in the other order, and with equal masks that are other tensors.
    loss_fn = nn.MSELoss()
    assert adapter.terms(loss_fn, whole).denominator == 6
    assert adapter.terms(loss_fn, masked).denominator == 3
    loss, numerator, denominator = adapter.loss_terms(loss_fn, *masked)
    expected = ((output[:, 0] - half[:, 0]) ** 2).mean()
    assert (loss.item(), denominator) == (pytest.approx(expected.item()), 3)
    assert numerator.item() == pytest.approx(3 * expected.item())


# An adapter of another author's ---------------------------------------------------------


class OrdinalAdapter(TaskAdapter):
    """K ordered classes from K - 1 cumulative logits, with nothing but the public methods."""

    suitable = ("binary_cross_entropy",)

    def prepare(self, output, target):
        if target.is_floating_point():
            raise TaskValidationError("ordinal targets must be integers")
        return output, target, target >= 0

    def loss_terms(self, loss_fn, output, target, valid):
        steps = (target.unsqueeze(1) > torch.arange(output.shape[1])).to(output)
        each = nn.functional.binary_cross_entropy_with_logits(output, steps, reduction="none")
        numerator = (each.mean(1) * valid).sum()
        return numerator / valid.sum(), numerator, float(valid.sum())

    def decode(self, output):
        return (output >= 0).sum(1)


class OrdinalModel(NNModel):
    @property
    def task_adapter(self):
        return OrdinalAdapter(self.params.task)


def test_an_adapter_of_another_author_trains_scores_and_predicts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = OrdinalModel(
        NNParams(input_dim=2, output_dim=3, hidden_dims=[], dropout_prob=0.0),
        NNModelParams(
            net=Nets.FEED_FWD, loss=Losses.BINARY_CROSS_ENTROPY, task=TaskSpec.multilabel(3)
        ),
    )
    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(1))
    y = torch.randint(0, 4, (20,), generator=torch.Generator().manual_seed(2))
    y[3] = -1  # masked
    plain = {name: value.clone() for name, value in model.net.state_dict().items()}
    run = model.train(
        NNTrainParams(
            n_epochs=1, train_loader=[(x, y)], val_loader=[(x, y)],
            optim=NNOptimParams.builder().sgd(max_lr=0.5, momentum=0.0).build(),
        )
    )  # fmt: skip

    # The update is that of a plain loop over the adapter's own loss.
    reference = nn.Sequential(nn.Linear(2, 3))
    reference.load_state_dict({f"0.{n.rpartition('.')[2]}": v for n, v in plain.items()})
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    loss = OrdinalAdapter(model.params.task).loss_terms(None, reference(x), y, y >= 0)[0]
    loss.backward()
    optimizer.step()
    for mine, theirs in zip(model.net.parameters(), reference.parameters()):
        assert torch.allclose(mine, theirs, atol=1e-7)
    assert run.idps[-1].train_edp.loss == pytest.approx(loss.item())

    decided = (reference(x) >= 0).sum(1)
    record, kept = run.idps[-1].val_edp, y >= 0
    assert record.count == 19
    assert record.accuracy == pytest.approx((decided == y)[kept].double().mean().item())
    assert np.array_equal(model.predict(x).classes, decided.numpy())
    with pytest.raises(TaskValidationError, match="must be integers"):
        supervised_terms(model.loss_fn, model.task_adapter, reference(x), y.float())
