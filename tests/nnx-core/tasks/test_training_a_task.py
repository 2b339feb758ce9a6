"""A declared task in a fit: the default step, validation, records and what is stored."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from nnx import (
    Checkpoints,
    Losses,
    MetricSpec,
    Nets,
    NNCheckpoint,
    NNEvaluationDataPoint,
    NNModel,
    NNModelParams,
    NNOptimParams,
    NNParams,
    NNRun,
    NNTrainParams,
    Optims,
    TaskSpec,
    TaskValidationError,
)
from torch import nn

NAN = math.nan


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NNX_TQDM_DISABLE", "1")


def built(task, loss, outputs, seed=0):
    torch.manual_seed(seed)
    return NNModel(
        NNParams(input_dim=4, output_dim=outputs, hidden_dims=[8], dropout_prob=0.0),
        NNModelParams(net=Nets.FEED_FWD, loss=loss, task=task),
    )


CATEGORICAL = TaskSpec.categorical(3, ignore_index=-100)
KINDS = {
    "categorical": (CATEGORICAL, Losses.CROSS_ENTROPY, 3),
    "nll": (CATEGORICAL, Losses.NEGATIVE_LOG_LIKELIHOOD, 3),
    "multilabel": (TaskSpec.multilabel(3), Losses.BINARY_CROSS_ENTROPY, 3),
    "regression": (TaskSpec.regression(3), Losses.MEAN_SQUARED_ERROR, 3),
}


def batches(kind, sizes=(8, 3, 5), masked=0.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for n in sizes:
        X = torch.randn(n, 4, generator=generator)
        if kind in ("categorical", "nll"):
            target = torch.randint(0, 3, (n,), generator=generator)
            hidden = -100
        else:
            target = torch.randn(n, 3, generator=generator)
            target = (target > 0).float() if kind == "multilabel" else target
            hidden = NAN
        target[torch.rand(target.shape, generator=generator) < masked] = hidden
        made.append((X, target))
    return made


def params(train, val=None, *, epochs=2, accumulate=1, **options):
    optim = NNOptimParams(
        name=Optims.SGD, max_lr=0.1, weight_decay=0.0, momentum=0.0,
        accumulate_grad_batches=accumulate,
    )  # fmt: skip
    return NNTrainParams(
        n_epochs=epochs, train_loader=train, val_loader=val, optim=optim, seed=1, **options
    )


def masked_mean(kind, output, target):
    """The loss of the valid targets, written by hand."""
    if kind in ("categorical", "nll"):
        return nn.functional.cross_entropy(output, target)
    kept = ~torch.isnan(target)
    loss = nn.functional.mse_loss if kind == "regression" else (
        nn.functional.binary_cross_entropy_with_logits)  # fmt: skip
    return loss(output[kept], target[kept])


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("masked", [0.0, 0.4])
def test_training_equals_a_hand_written_masked_loop(kind, masked):
    model = built(*KINDS[kind])
    twin = copy.deepcopy(model.net)
    data = batches(kind, masked=masked)
    run = model.train(params(data, data, epochs=2))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        for X, target in data:
            optimizer.zero_grad()
            loss = masked_mean(kind, twin(X), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    for mine, theirs in zip(model.net.parameters(), twin.parameters()):
        assert torch.allclose(mine, theirs, atol=1e-6)
    assert [r.train_edp.loss for r in run.idps] == pytest.approx(losses, rel=1e-5)
    for record, (_, target) in zip(run.idps[3:], data):
        assert record.train_edp.kind == model.params.task.kind
        expected = (target != -100) if target.ndim == 1 else ~torch.isnan(target)
        assert record.train_edp.count == int(expected.sum())
    assert run.idps[-1].val_edp == model.evaluate(data)


@pytest.mark.parametrize("kind", list(KINDS))
def test_an_accumulated_window_of_uneven_masked_batches_is_one_full_batch(kind):
    data = batches(kind, sizes=(8, 3, 5, 1), masked=0.4)
    whole = [tuple(torch.cat(side) for side in zip(*data))]
    split, full = built(*KINDS[kind]), built(*KINDS[kind])
    split.train(params(data, epochs=3, accumulate=4))
    full.train(params(whole, epochs=3))
    for mine, theirs in zip(split.net.parameters(), full.net.parameters()):
        assert torch.allclose(mine, theirs, atol=1e-6)
    assert split.evaluate(data).loss == pytest.approx(full.evaluate(whole).loss, rel=1e-5)


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_window_without_a_valid_target_takes_no_update(kind):
    model = built(*KINDS[kind])
    before = copy.deepcopy(model.net.state_dict())
    run = model.train(params(batches(kind, masked=1.1), epochs=1))
    assert all(torch.equal(v, before[k]) for k, v in model.net.state_dict().items())
    for record in run.idps:
        assert (record.train_edp.status, record.train_edp.count) == ("empty", 0)
        assert record.train_edp.loss is None


def test_an_empty_validation_epoch_is_no_signal_and_writes_no_best():
    model = built(*KINDS["regression"])
    run = model.train(params(batches("regression"), batches("regression", masked=1.1)))
    assert run.idps[-1].val_edp == NNEvaluationDataPoint(kind="regression", count=0, status="empty")
    assert NNCheckpoint.load(run.id, Checkpoints.BEST) is None
    assert NNCheckpoint.load(run.id, Checkpoints.LAST) is not None


@pytest.mark.parametrize(
    ("kind", "bad", "message"),
    [
        ("categorical", torch.tensor([0, 3]), "found 3"),
        ("categorical", torch.tensor([0.0, 1.0]), "integer class indices"),
        ("multilabel", torch.full((2, 3), 0.5), "0 or 1"),
        ("regression", torch.zeros(2, 1), "regression targets must have"),
        ("regression", torch.zeros(2), "only fits"),
    ],
)
def test_a_wrong_batch_fails_before_any_update(kind, bad, message):
    model = built(*KINDS[kind])
    before = copy.deepcopy(model.net.state_dict())
    with pytest.raises(TaskValidationError, match=message):
        model.train(params([(torch.randn(2, 4), bad)]))
    assert all(torch.equal(v, before[k]) for k, v in model.net.state_dict().items())


def test_a_model_that_does_not_suit_its_task_is_refused_at_construction():
    with pytest.raises(TaskValidationError, match="needs loss=mean_squared_error"):
        built(TaskSpec.regression(3), Losses.CROSS_ENTROPY, 3)
    with pytest.raises(
        TaskValidationError, match="declares 3 outputs but the net has output_dim=4"
    ):
        built(CATEGORICAL, Losses.CROSS_ENTROPY, 4)
    wide = built(TaskSpec.regression(), Losses.MEAN_SQUARED_ERROR, 7)
    assert wide.predict(torch.randn(2, 4)).classes.shape == (2, 7)


def test_the_live_loss_is_checked_before_a_loader_is_touched():
    class Untouched:
        def __iter__(self):
            raise AssertionError("the loader was read")

        def __len__(self):
            return 1

    model = built(*KINDS["categorical"])
    model.loss_fn = nn.MSELoss()
    with pytest.raises(TaskValidationError, match="MSELoss cannot score a categorical task"):
        model.train(params(Untouched()))


def test_another_elementwise_loss_may_take_the_place_of_the_declared_one():
    model = built(*KINDS["regression"])
    model.loss_fn = nn.HuberLoss(delta=0.5)
    data = batches("regression", masked=0.3)
    kept = [~torch.isnan(target) for _, target in data]
    outputs = [model.predict(X).logits for X, _ in data]
    numerator = sum(
        nn.functional.huber_loss(torch.as_tensor(o)[k], t[k], delta=0.5, reduction="sum").item()
        for o, (_, t), k in zip(outputs, data, kept)
    )
    assert model.evaluate(data).loss == pytest.approx(numerator / sum(int(k.sum()) for k in kept))


@pytest.mark.parametrize("kind", list(KINDS))
def test_task_and_records_come_back_from_disk(kind):
    model = built(*KINDS[kind])
    data = batches(kind, masked=0.2)
    run = model.train(params(data, data))
    loaded = NNRun.load(run.id)
    assert loaded.model.task == model.params.task
    assert loaded.idps[-1].val_edp == run.idps[-1].val_edp
    checkpoint = NNCheckpoint.load(run.id, Checkpoints.LAST)
    again = NNModel.from_checkpoint(checkpoint)
    assert again.task_adapter.spec == model.params.task
    assert again.evaluate(data) == model.evaluate(data)


def test_a_custom_step_writes_the_default_steps_record():
    model = built(*KINDS["multilabel"])
    data = batches("multilabel", masked=0.2)
    twin = built(*KINDS["multilabel"])

    def step(ctx):
        X, target = ctx.batch
        output = ctx.model.net(X)
        prepared = ctx.model.task_adapter.prepare(output, target)
        loss, _, _ = ctx.model.task_adapter.loss_terms(ctx.model.loss_fn, *prepared)
        ctx.optimizer.zero_grad()
        loss.backward()
        ctx.optimizer.step()
        return ctx.model.task_adapter.record(output, target, loss=float(loss.detach()))

    mine = model.train(params(data), train_step_fn=step)
    theirs = twin.train(params(data), salt="default")
    for a, b in zip(mine.idps, theirs.idps):
        assert a.train_edp.count == b.train_edp.count
        assert a.train_edp.loss == pytest.approx(b.train_edp.loss, rel=1e-6)
        assert a.train_edp.metrics == pytest.approx(b.train_edp.metrics)


def test_regression_is_decided_by_its_loss_alone():
    model = built(*KINDS["regression"])
    data = batches("regression")
    run = model.train(params(data, data, epochs=3))
    last = run.idps[-1].val_edp
    assert (last.error, last.accuracy, last.f1) == (None, None, None)
    best = NNCheckpoint.load(run.id, Checkpoints.BEST)
    losses = [r.val_edp.loss for r in run.idps if r.val_edp is not None]
    assert best.idp.val_edp.loss == min(losses)


def test_extra_metrics_of_a_task_see_valid_targets_alone():
    model = built(*KINDS["categorical"])
    data = batches("categorical", masked=0.4)
    seen = []

    def count(y_true, y_pred):
        seen.append(y_true)
        assert y_true.shape == y_pred.shape
        return len(y_true)

    run = model.train(params(data, data, epochs=1, extra_metrics={"n": count}))
    for record, (_, target) in zip(run.idps, data):
        assert record.train_edp.extra == {"n": float((target != -100).sum())}
    assert run.idps[-1].val_edp.extra == {"n": float(sum((t != -100).sum() for _, t in data))}
    assert all((values >= 0).all() for values in seen)


def test_declared_metrics_of_a_task_in_a_fit():
    model = built(*KINDS["regression"])
    data = batches("regression", masked=0.3)
    run = model.train(params(data, data, epochs=1, metrics=[MetricSpec("mae", name="deviation")]))
    val = run.idps[-1].val_edp
    assert val.metrics["deviation"] == pytest.approx(val.metrics["mae"])
    summary = run.idps[-1].train_summary
    assert set(summary.metrics) == {"deviation"}
    assert run.idps[0].train_summary is None


def test_native_nll_equals_cross_entropy_from_the_same_weights():
    """Without a task: log_softmax is applied for the loss, the outputs stay raw."""
    data = batches("nll")
    nll = built(None, Losses.NEGATIVE_LOG_LIKELIHOOD, 3)
    entropy = built(None, Losses.CROSS_ENTROPY, 3)
    assert torch.equal(
        torch.as_tensor(nll.predict(data[0][0]).logits),
        torch.as_tensor(entropy.predict(data[0][0]).logits),
    )
    a = nll.train(params(data, data))
    b = entropy.train(params(data, data))
    for mine, theirs in zip(nll.net.parameters(), entropy.net.parameters()):
        assert torch.allclose(mine, theirs, atol=1e-6)
    assert a.idps[-1].val_edp.loss == pytest.approx(b.idps[-1].val_edp.loss, rel=1e-6)
