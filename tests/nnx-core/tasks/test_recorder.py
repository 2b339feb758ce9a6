"""Records made many at a time are the records of each batch."""

from __future__ import annotations

import math
import subprocess
import sys

import nnx.tasks.recorder as recorder_module
import pytest
import torch
from nnx import MetricSpec, NNEvaluationDataPoint, TaskSpec, register_metric, unregister_metric
from nnx.tasks.losses import supervised_terms
from nnx.tasks.recorder import EpochRecorder, score_batch
from sklearn.metrics import accuracy_score, f1_score, precision_score, recall_score
from torch import nn

NAN = math.nan


def batches(sizes, classes=5, seed=0, ignored=0.0):
    generator = torch.Generator().manual_seed(seed)
    for size in sizes:
        output = torch.randn(size, classes, generator=generator)
        target = torch.randint(0, classes, (size,), generator=generator)
        target[torch.rand(size, generator=generator) < ignored] = -100
        yield output, target


def record(recorder, model, output, target, loss=0.5):
    terms = supervised_terms(model.loss_fn, model.task_adapter, output, target)
    masked = terms.masked
    recorder.add(
        terms.output, terms.target, terms.valid,
        loss=None if masked else loss, denominator=terms.denominator,
    )  # fmt: skip


@pytest.mark.parametrize("ignored", [0.0, 0.4, 1.0])
def test_every_record_has_scikit_learns_scores(make_model, ignored):
    model = make_model()
    recorder = EpochRecorder(model)
    data = list(batches([16, 1, 7, 300, 16, 3], ignored=ignored))
    for output, target in data:
        record(recorder, model, output, target)
    records = recorder.take()
    assert len(records) == len(data)
    macro = {"average": "macro", "zero_division": 0}
    for made, (output, target) in zip(records, data):
        kept = (target != -100).numpy()
        if not kept.any():
            assert made == NNEvaluationDataPoint()
            continue
        truth, guess = target.numpy()[kept], output.argmax(1).numpy()[kept]
        assert made.accuracy == accuracy_score(truth, guess)
        assert made.error == 1 - made.accuracy
        assert made.f1 == pytest.approx(f1_score(truth, guess, **macro), rel=1e-15)
        assert made.recall == pytest.approx(recall_score(truth, guess, **macro), rel=1e-15)
        assert made.precision == pytest.approx(precision_score(truth, guess, **macro), rel=1e-15)
        assert (made.kind, made.count, made.status, made.loss) == (None, None, None, 0.5)


@pytest.mark.parametrize(
    ("task", "loss_fn", "make"),
    [
        (TaskSpec.categorical(4, ignore_index=-100), nn.CrossEntropyLoss(),
         lambda n: (torch.randn(n, 4), torch.randint(0, 4, (n,)))),
        (TaskSpec.multilabel(3, threshold=0.4), nn.BCEWithLogitsLoss(),
         lambda n: (torch.randn(n, 3), torch.randint(0, 2, (n, 3)).float())),
        (TaskSpec.regression(2), nn.MSELoss(), lambda n: (torch.randn(n, 2), torch.randn(n, 2))),
    ],
    ids=["categorical", "multilabel", "regression"],
)  # fmt: skip
@pytest.mark.parametrize("masking", [0.0, 0.5])
def test_task_records_made_together_equal_the_adapters_own(
    make_model, task, loss_fn, make, masking
):
    torch.manual_seed(3)
    model = make_model(loss_fn, task)
    recorder = EpochRecorder(model, summarize=True)
    data = [make(n) for n in (8, 1, 5, 8)]
    for _, target in data:
        target[torch.rand(target.shape) < masking] = -100 if task.kind == "categorical" else NAN
    data[1][1][:] = -100 if task.kind == "categorical" else NAN
    for output, target in data:
        record(recorder, model, output, target)
    for made, (output, target) in zip(recorder.take(), data):
        own = model.task_adapter.record(output, target, loss=0.5)
        assert made.kind == own.kind
        assert (made.count, made.status) == (own.count, own.status)
        for field in ("f1", "recall", "accuracy", "precision", "error", "loss"):
            assert getattr(made, field) == pytest.approx(getattr(own, field)), field
        assert made.metrics == pytest.approx(own.metrics)
        assert made.metrics.keys() == own.metrics.keys()


def test_a_models_binary_loss_is_thresholded_row_by_row(make_model):
    model = make_model(nn.BCEWithLogitsLoss())
    output = torch.tensor([[1.0, -1.0], [1.0, 1.0], [-1.0, -1.0]])
    target = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    made = score_batch(model, supervised_terms(model.loss_fn, None, output, target), loss=1.0)
    assert made.accuracy == accuracy_score(target.numpy(), (output >= 0).numpy())
    assert made.f1 == pytest.approx(
        f1_score(target.numpy(), (output >= 0).numpy(), average="macro")
    )
    single = score_batch(
        model, supervised_terms(model.loss_fn, None, output[:, :1], target[:, :1]), loss=1.0
    )
    assert single.f1 == pytest.approx(
        f1_score(target[:, 0].numpy(), (output[:, 0] >= 0).numpy(), average="macro")
    )


def test_soft_binary_targets_are_scored_by_what_they_decide(make_model):
    model = make_model(nn.BCEWithLogitsLoss())
    recorder = EpochRecorder(model)
    hard = (torch.ones(2, 3), torch.ones(2, 3))
    beyond = (torch.ones(2, 3), torch.full((2, 3), 1.5))
    record(recorder, model, *hard)
    record(
        recorder,
        model,
        torch.tensor([[1.0, -1.0], [1.0, 1.0]]),
        torch.tensor([[0.9, 0.2], [0.6, 0.1]]),
    )
    record(recorder, model, *beyond)  # no probabilities: a loss, and nothing to score
    record(recorder, model, *hard)
    first, soft, unscored, last = recorder.take()
    assert (soft.accuracy, soft.error) == (0.5, 0.5)
    assert unscored == NNEvaluationDataPoint(loss=0.5)
    assert (first.accuracy, first.f1) == (1.0, 1.0)
    assert first == last


def test_a_regression_loss_without_a_task_records_the_loss_alone(make_model):
    model = make_model(nn.MSELoss())
    recorder = EpochRecorder(model)
    record(recorder, model, torch.randn(4, 1), torch.randn(4, 1), loss=0.75)
    assert recorder.take() == [NNEvaluationDataPoint(loss=0.75)]


def test_class_probabilities_as_targets_are_scored_by_their_likeliest_class(make_model):
    model = make_model()
    recorder = EpochRecorder(model, summarize=True)
    output, soft = torch.eye(3), torch.tensor([[0.6, 0.4, 0], [0.1, 0.9, 0], [0, 0.8, 0.2]])
    record(recorder, model, output, soft)
    record(recorder, model, output, torch.tensor([0, 1, 2]))  # a hard batch beside it
    soft, hard = recorder.take()
    assert (soft.accuracy, soft.error) == (pytest.approx(2 / 3), pytest.approx(1 / 3))
    assert soft.f1 == pytest.approx(
        f1_score([0, 1, 1], [0, 1, 2], average="macro", zero_division=0)
    )
    assert hard.accuracy == 1.0
    assert recorder.summary().error == pytest.approx(1 / 6)


@pytest.mark.parametrize("loss_fn", [nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss(), nn.MSELoss()])
def test_a_loader_may_overwrite_its_buffers_after_a_step(make_model, loss_fn):
    model = make_model(loss_fn, TaskSpec.regression(3) if isinstance(loss_fn, nn.MSELoss) else None)
    output = torch.randn(6, 3)
    target = output.argmax(1) if isinstance(loss_fn, nn.CrossEntropyLoss) else (output > 0).float()
    expected = score_batch(
        model, supervised_terms(loss_fn, model.task_adapter, output, target.clone()), loss=0.5
    )
    recorder = EpochRecorder(model)
    record(recorder, model, output, target)
    output.zero_()
    target.zero_()
    assert recorder.take() == [expected]


def test_records_come_in_order_and_only_once(make_model):
    model = make_model()
    recorder = EpochRecorder(model)
    for index, (output, target) in enumerate(batches([4] * 5)):
        record(recorder, model, output, target, loss=float(index))
        if index == 2:
            recorder.add_record(NNEvaluationDataPoint(loss=99.0), n_samples=4)
    assert [r.loss for r in recorder.take()] == [0, 1, 2, 99, 3, 4]
    assert recorder.take() == []


def test_pending_batches_are_bounded(make_model, monkeypatch):
    monkeypatch.setattr(recorder_module, "PENDING_ELEMENTS", 100)
    model = make_model()
    recorder = EpochRecorder(model)
    data = list(batches([16] * 50))
    for output, target in data:
        record(recorder, model, output, target)
        assert sum(len(entry[0]) for entry in recorder._pending) <= 116
    assert len(recorder.take()) == 50


def test_extra_metrics_are_called_once_per_batch_on_valid_rows(make_model):
    model = make_model()
    calls = []
    recorder = EpochRecorder(
        model, extra_metrics={"n": lambda y, p: calls.append((y, p)) or len(y)}
    )
    record(recorder, model, torch.eye(3), torch.tensor([0, -100, 1]))
    record(recorder, model, torch.eye(3)[:1], torch.tensor([0]))
    assert [r.extra for r in recorder.take()] == [{"n": 2.0}, {"n": 1.0}]
    assert calls[0][0].tolist() == [0, 1]
    assert calls[0][1].tolist() == [0, 2]


def test_the_summary_weighs_each_batch_by_its_own_denominators(make_model):
    weight = torch.tensor([1.0, 2.0, 4.0, 1.0, 1.0])
    model = make_model(nn.CrossEntropyLoss(weight=weight))
    recorder = EpochRecorder(model, summarize=True)
    data = list(batches([16, 5, 16], ignored=0.3))
    for output, target in data:
        terms = supervised_terms(model.loss_fn, None, output, target)
        recorder.add(terms.output, target, loss=terms.loss.item(), denominator=terms.denominator)
    recorder.take()
    output, target = (torch.cat(side) for side in zip(*data))
    kept = target != -100
    summary = recorder.summary()
    assert summary.loss == pytest.approx(model.loss_fn(output, target).item(), rel=1e-6)
    assert summary.error == pytest.approx((output.argmax(1) != target)[kept].float().mean().item())
    assert (summary.accuracy, summary.f1, summary.kind) == (None, None, None)
    recorder.begin_epoch()
    assert recorder.summary() == NNEvaluationDataPoint()


def test_a_summed_loss_stays_a_total(make_model):
    recorder = EpochRecorder(make_model(nn.CrossEntropyLoss(reduction="sum")), summarize=True)
    for loss in (3.0, 4.0):
        recorder.add(torch.eye(3), torch.tensor([0, 1, 2]), loss=loss, denominator=None)
    assert recorder.summary().loss == 7.0


def test_custom_records_are_weighted_by_their_count_or_the_batch(make_model):
    recorder = EpochRecorder(make_model(), summarize=True)
    recorder.add_record(NNEvaluationDataPoint(loss=1.0, error=0.5), n_samples=30)
    recorder.add_record(NNEvaluationDataPoint(loss=4.0, error=1.0, count=10), n_samples=999)
    recorder.add_record(NNEvaluationDataPoint(), n_samples=50)
    assert recorder.summary().loss == (1.0 * 30 + 4.0 * 10) / 40
    assert recorder.summary().error == (0.5 * 30 + 1.0 * 10) / 40
    assert recorder.summary(loss=9.0).loss == 9.0


def test_declared_metrics_cover_the_whole_epoch_not_a_mean_of_batches(make_model):
    model = make_model()
    metrics = (MetricSpec("nll"), MetricSpec("accuracy"), MetricSpec("f1"), MetricSpec("brier"))
    recorder = EpochRecorder(model, metrics=metrics)
    data = list(batches([16, 3, 9], ignored=0.2))
    for output, target in data:
        record(recorder, model, output, target)
    output, target = (torch.cat(side) for side in zip(*data))
    kept = target != -100
    output, target = output[kept], target[kept]
    values = recorder.summary().metrics
    probabilities = output.double().softmax(1)
    assert values["nll"] == pytest.approx(
        nn.functional.cross_entropy(output.double(), target).item()
    )
    assert values["accuracy"] == pytest.approx(accuracy_score(target, output.argmax(1)))
    assert values["f1"] == pytest.approx(f1_score(target, output.argmax(1), average="macro"))
    one_hot = nn.functional.one_hot(target, 5)
    assert values["brier"] == pytest.approx(((probabilities - one_hot) ** 2).sum(1).mean().item())


@pytest.mark.parametrize("kind", ["classes", "regression"])
def test_an_epochs_sums_continue_from_their_state(make_model, kind):
    if kind == "classes":
        model = make_model()
        metrics = [MetricSpec("f1"), MetricSpec("nll")]
        data = list(batches([8, 8, 8]))
    else:
        model = make_model(nn.MSELoss(), TaskSpec.regression(2))
        metrics = [MetricSpec("mae")]
        data = [(torch.randn(4, 2), torch.randn(4, 2)) for _ in range(3)]
    whole, first, second = (EpochRecorder(model, metrics=metrics) for _ in range(3))
    for output, target in data:
        record(whole, model, output, target)
    record(first, model, *data[0])
    state = first.state()
    torch.save(state, buffer := __import__("io").BytesIO())
    buffer.seek(0)
    second.load_state(torch.load(buffer, weights_only=True))
    for output, target in data[1:]:
        record(second, model, output, target)
    assert second.summary() == whole.summary()


class Stateless:
    def update(self, target, prediction):
        pass

    def result(self):
        return None


def test_a_metric_without_state_cannot_be_continued_mid_epoch(make_model):
    register_metric("test.stateless", 1, lambda c: Stateless(), input="labels", mode="max")
    try:
        recorder = EpochRecorder(make_model(), metrics=[MetricSpec("test.stateless")])
        with pytest.raises(ValueError, match=r"'test.stateless' cannot be continued in the middle"):
            recorder.state()
    finally:
        unregister_metric("test.stateless", 1)


def test_scoring_imports_no_scikit_learn_or_pandas():
    code = (
        "import sys, torch, nnx.tasks.recorder, nnx.prediction.inference, nnx.streaming.metrics;"
        "print([m for m in ('sklearn', 'pandas', 'scipy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_room_and_its_scores_load_no_torch():
    code = "import sys, nnx.tasks, nnx.tasks.scores, nnx.monitors.registry; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_extra_metrics_of_masked_tasks_get_flat_valid_values(make_model):
    seen = []
    metrics = {"n": lambda y, p: seen.append((y.tolist(), p.tolist())) or len(y)}
    for loss_fn, task, output, target in (
        (nn.MSELoss(), TaskSpec.regression(2), [[1.0, 2.0]], [[0.5, NAN]]),
        (nn.BCEWithLogitsLoss(), TaskSpec.multilabel(2), [[1.0, -2.0]], [[NAN, 1.0]]),
        (nn.BCEWithLogitsLoss(), None, [[1.0, -2.0]], [[1.0, 1.0]]),
        (nn.MSELoss(), None, [[1.0, 2.0]], [[0.5, 0.5]]),
    ):
        model = make_model(loss_fn, task)
        recorder = EpochRecorder(model, extra_metrics=metrics)
        record(recorder, model, torch.tensor(output), torch.tensor(target))
        recorder.take()
    # without a task, indicators keep their rows, and plain regression has nothing to score
    assert seen == [([0.5], [1.0]), ([1], [0]), ([[1, 1]], [[1, 0]])]
