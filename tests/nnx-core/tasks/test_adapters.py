"""A declared task checks, masks, normalizes, decodes and records."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nnx import Losses, Nets, TaskSpec, TaskValidationError, task_adapter
from nnx.tasks.losses import supervised_terms
from sklearn.metrics import accuracy_score, f1_score, precision_score, recall_score
from torch import nn

NAN = math.nan
categorical = task_adapter(TaskSpec.categorical(3, ignore_index=-100))
multilabel = task_adapter(TaskSpec.multilabel(2))
regression = task_adapter(TaskSpec.regression(2))


def logits(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("adapter", "output", "target", "message"),
    [
        (categorical, logits(2, 3), torch.tensor([0, 3]), r"in \[0, 3\) \(or ignore_index=-100\); found 3"),
        (categorical, logits(2, 3), torch.tensor([0, -1]), "found -1"),
        (categorical, logits(2, 3), torch.tensor([0.0, 1.0]), "integer class indices, not float32"),
        (categorical, logits(2, 3), torch.tensor([True, False]), "integer class indices, not bool"),
        (categorical, logits(2, 3), torch.tensor([[0], [1]]), r"shape \(2,\)"),
        (categorical, logits(2, 4), torch.tensor([0, 1]), "declares 3 outputs but axis 1"),
        (categorical, logits(3), torch.tensor([0, 1, 2]), r"must be \(N, 3, ...\)"),
        (categorical, torch.ones(2, 3, dtype=torch.long), torch.tensor([0, 1]), "floating tensor"),
        (categorical, logits(2, 3), [0, 1], "must be a tensor, not list"),
        (categorical, logits(2, 3), None, "must be a tensor, not NoneType"),
        (multilabel, logits(2, 2), torch.tensor([[0, 1], [2, 0]]), "0 or 1 .NaN is masked.; found 2"),
        (multilabel, logits(2, 2), torch.full((2, 2), 0.5), "found 0.5"),
        (multilabel, logits(2, 2), torch.tensor([0, 1]), r"shape \(2, 2\), not \(2,\)"),
        (regression, logits(2, 2), torch.zeros(2, 1), r"shape \(2, 2\)"),
        (regression, logits(2, 2), torch.zeros(2), "only fits"),
        (regression, logits(2, 2), torch.zeros(2, 2, dtype=torch.long), "floating, not int64"),
        (regression, logits(2, 2), torch.full((2, 2), math.inf), "must be finite"),
    ],
)  # fmt: skip
def test_a_batch_that_does_not_fit_is_refused(adapter, output, target, message):
    with pytest.raises(TaskValidationError, match=message):
        adapter.prepare(output, target)


def test_a_flat_target_fits_only_a_single_output_regression():
    adapter = task_adapter(TaskSpec.regression(1))
    _, target, valid = adapter.prepare(logits(3, 1), torch.tensor([1.0, NAN, 3.0]))
    assert target.shape == (3, 1)
    assert valid.tolist() == [[True], [False], [True]]


def test_targets_keep_their_own_dtype():
    output = logits(2, 2).bfloat16()
    _, target, _ = regression.prepare(output, torch.zeros(2, 2, dtype=torch.float64))
    assert target.dtype == torch.float64
    _, target, _ = multilabel.prepare(output, torch.zeros(2, 2))
    assert target.dtype == torch.float32
    _, target, _ = categorical.prepare(logits(2, 3), torch.tensor([1, 2], dtype=torch.uint8))
    assert target.dtype == torch.int64


@pytest.mark.parametrize(
    ("adapter", "loss", "message"),
    [
        (categorical, Losses.MEAN_SQUARED_ERROR, "needs loss=cross_entropy or negative"),
        (multilabel, Losses.CROSS_ENTROPY, "needs loss=binary_cross_entropy"),
        (regression, Losses.BINARY_CROSS_ENTROPY, "needs loss=mean_squared_error"),
    ],
)
def test_a_model_with_an_unsuitable_loss_is_refused(adapter, loss, message):
    with pytest.raises(TaskValidationError, match=message):
        adapter.check_model(net=Nets.FEED_FWD, loss=loss, output_dim=None)


def test_a_model_of_another_width_or_of_sequences_is_refused():
    with pytest.raises(
        TaskValidationError, match="declares 3 outputs but the net has output_dim=4"
    ):
        categorical.check_model(net=Nets.FEED_FWD, loss=Losses.CROSS_ENTROPY, output_dim=4)
    for net in (Nets.TRANSFORMER, Nets.VIT):
        with pytest.raises(TaskValidationError, match="does not cover Nets"):
            categorical.check_model(net=net, loss=Losses.CROSS_ENTROPY, output_dim=3)
    for loss in (Losses.CROSS_ENTROPY, Losses.NEGATIVE_LOG_LIKELIHOOD):
        categorical.check_model(net=Nets.FEED_FWD, loss=loss, output_dim=3)
        task_adapter(TaskSpec.categorical()).check_model(net=None, loss=loss, output_dim=9)


@pytest.mark.parametrize(
    ("adapter", "loss_fn", "message"),
    [
        (categorical, nn.MSELoss(), "MSELoss cannot score a categorical"),
        (multilabel, nn.CrossEntropyLoss(), "cannot score a multilabel"),
        (regression, nn.BCEWithLogitsLoss(), "cannot score a regression"),
        (regression, nn.MSELoss(reduction="none"), "use 'mean' or 'sum'"),
        (categorical, nn.CrossEntropyLoss(ignore_index=1), "the loss ignores class 1"),
    ],
)
def test_a_live_loss_that_cannot_be_meant_is_refused(adapter, loss_fn, message):
    with pytest.raises(TaskValidationError, match=message):
        adapter.check_loss_fn(loss_fn)


@pytest.mark.parametrize("loss_fn", [nn.L1Loss(), nn.SmoothL1Loss(), nn.HuberLoss(), nn.MSELoss()])
def test_elementwise_losses_leave_masked_entries_out(loss_fn):
    output, target = logits(4, 2).requires_grad_(), logits(4, 2, seed=1)
    target[1, 0] = target[3, 1] = NAN
    terms = supervised_terms(loss_fn, regression, output, target)
    kept = ~torch.isnan(target)
    expected = loss_fn(output[kept], target[kept])
    assert terms.denominator == 6
    assert torch.allclose(terms.loss, expected)
    terms.loss.backward()
    assert output.grad[1, 0] == output.grad[3, 1] == 0
    reference = output.detach().clone().requires_grad_()
    loss_fn(reference[kept], target[kept]).backward()
    assert torch.allclose(output.grad, reference.grad)


def test_a_nan_output_under_a_mask_reaches_neither_loss_nor_gradient():
    output = torch.tensor([[1.0, NAN]], requires_grad=True)
    terms = supervised_terms(nn.MSELoss(), regression, output, torch.tensor([[0.0, NAN]]))
    terms.loss.backward()
    assert terms.loss.item() == 1.0
    assert output.grad.tolist() == [[2.0, 0.0]]


def test_a_pos_weight_still_lines_up_with_its_labels_under_a_mask():
    weight = torch.tensor([1.0, 10.0])
    output = logits(3, 2)
    target = torch.tensor([[1.0, NAN], [0.0, 1.0], [NAN, 0.0]])
    terms = supervised_terms(nn.BCEWithLogitsLoss(pos_weight=weight), multilabel, output, target)
    each = nn.BCEWithLogitsLoss(pos_weight=weight, reduction="none")(output, target.nan_to_num())
    assert terms.loss.item() == pytest.approx(each[~torch.isnan(target)].mean().item())


class Asymmetric(nn.Module):
    def forward(self, output, target):
        return (output - target).clamp(min=0).mean()


def test_another_loss_scores_complete_batches_and_refuses_masked_ones():
    output, target = logits(4, 2), logits(4, 2, seed=1)
    terms = supervised_terms(Asymmetric(), regression, output, target)
    assert terms.loss == Asymmetric()(output, target)
    target[0, 0] = NAN
    with pytest.raises(TaskValidationError, match="masked targets, which Asymmetric cannot"):
        supervised_terms(Asymmetric(), regression, output, target)


@pytest.mark.parametrize("loss_fn", [
    nn.CrossEntropyLoss(), nn.NLLLoss(), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0])),
    nn.NLLLoss(weight=torch.tensor([1.0, 2.0, 5.0])), nn.CrossEntropyLoss(label_smoothing=0.2),
    nn.CrossEntropyLoss(reduction="sum"), nn.NLLLoss(reduction="sum"),
], ids=str)  # fmt: skip
@settings(deadline=None, max_examples=25)
@given(
    cuts=st.lists(st.integers(0, 20), max_size=5), masked=st.lists(st.integers(0, 19), max_size=8)
)
def test_class_losses_add_up_to_the_full_batch_however_it_is_cut(loss_fn, cuts, masked):
    output = logits(20, 3)
    target = torch.arange(20) % 3
    target[masked] = -100
    full = supervised_terms(loss_fn, categorical, output, target)
    numerator, denominator = 0.0, 0.0
    edges = [0, *sorted(cuts), 20]
    for start, stop in itertools.pairwise(edges):
        if start == stop:
            continue
        part = supervised_terms(loss_fn, categorical, output[start:stop], target[start:stop])
        numerator += part.numerator.item()
        denominator += part.denominator or 0
    if full.denominator is None:
        assert numerator == pytest.approx(full.loss.item(), rel=1e-5)
    else:
        assert denominator == pytest.approx(full.denominator)
        assert numerator / denominator == pytest.approx(full.loss.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("adapter", "loss_fn", "target"),
    [
        (categorical, nn.CrossEntropyLoss(), torch.tensor([-100, -100])),
        (multilabel, nn.BCEWithLogitsLoss(), torch.full((2, 2), NAN)),
        (regression, nn.MSELoss(), torch.full((2, 2), NAN)),
    ],
)
def test_a_fully_masked_batch_weighs_nothing_and_has_a_zero_gradient(adapter, loss_fn, target):
    output = logits(2, adapter.spec.num_outputs).requires_grad_()
    terms = supervised_terms(loss_fn, adapter, output, target)
    assert terms.masked
    assert terms.denominator == 0.0
    terms.numerator.backward()
    assert terms.numerator.item() == 0.0
    assert (output.grad == 0).all()
    record = adapter.record(output, target, loss=None)
    assert record.state() == {
        "f1": None, "recall": None, "accuracy": None, "precision": None, "loss": None,
        "error": None, "kind": adapter.spec.kind, "count": 0, "status": "empty",
    }  # fmt: skip


def test_a_fully_masked_batch_of_a_summed_loss_is_masked_too():
    output = logits(2, 2).requires_grad_()
    target = torch.full((2, 2), NAN)
    assert supervised_terms(nn.MSELoss(reduction="sum"), regression, output, target).masked


def test_an_ignore_index_the_loss_does_not_know_is_still_ignored():
    adapter = task_adapter(TaskSpec.categorical(3, ignore_index=255))
    output, target = logits(4, 3), torch.tensor([0, 255, 2, 255])
    terms = supervised_terms(nn.CrossEntropyLoss(), adapter, output, target)
    assert terms.loss == nn.CrossEntropyLoss()(output[[0, 2]], target[[0, 2]])
    inside = task_adapter(TaskSpec.categorical(3, ignore_index=1))
    output, target = logits(4, 3), torch.tensor([0, 1, 2, 1])
    terms = supervised_terms(nn.CrossEntropyLoss(), inside, output, target)
    assert terms.loss == nn.CrossEntropyLoss()(output[[0, 2]], target[[0, 2]])


def test_decoding_is_argmax_threshold_or_the_values():
    output = torch.tensor([[0.1, 2.0, -1.0], [3.0, 0.0, 0.0]])
    assert categorical.decode(output).tolist() == [1, 0]
    two = torch.tensor([[0.0, -1e-12], [-0.5, 5.0]])
    assert multilabel.decode(two).tolist() == [[1, 0], [0, 1]]
    low = task_adapter(TaskSpec.multilabel(2, threshold=0.3))
    assert low.decode(two).tolist() == [[1, 1], [1, 1]]
    assert regression.decode(two) is two
    assert np.array_equal(low.decode_array(two.numpy()), low.decode(two).numpy())


def test_dense_categorical_outputs_are_decoded_over_axis_one():
    adapter = task_adapter(TaskSpec.categorical(3))
    output = logits(2, 3, 4, 5)
    target = output.argmax(1)
    record = adapter.record(output, target, loss=0.0)
    assert (record.accuracy, record.count) == (1.0, 40)


def test_a_categorical_record_holds_scikit_learns_scores_of_the_valid_rows():
    output = logits(40, 3)
    target = torch.arange(40) % 3
    target[::4] = -100
    record = categorical.record(output, target, loss=0.5)
    kept = target >= 0
    truth, guess = target[kept].numpy(), output.argmax(1)[kept].numpy()
    macro = {"average": "macro", "zero_division": 0}
    assert record.accuracy == accuracy_score(truth, guess)
    assert record.error == 1 - record.accuracy
    assert record.f1 == pytest.approx(f1_score(truth, guess, **macro), rel=1e-15)
    assert record.recall == pytest.approx(recall_score(truth, guess, **macro), rel=1e-15)
    assert record.precision == pytest.approx(precision_score(truth, guess, **macro), rel=1e-15)
    assert (record.kind, record.count, record.status, record.loss) == ("categorical", 30, "ok", 0.5)


def test_a_multilabel_record_has_subset_and_element_accuracy():
    output = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]])
    target = torch.tensor([[1.0, 0.0], [1.0, 0.0], [NAN, 0.0]])
    record = multilabel.record(output, target, loss=0.25)
    assert record.accuracy == record.metrics["subset_accuracy"] == 2 / 3
    assert record.metrics["element_accuracy"] == 4 / 5
    assert record.error == 1 - 2 / 3
    assert record.count == 5
    # label 0: both valid positives found; label 1: one false positive and nothing to find
    assert (record.precision, record.recall, record.f1) == (0.5, 0.5, 0.5)


def test_a_regression_record_has_no_classification_field():
    output = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    target = torch.tensor([[0.0, 4.0], [NAN, 4.0]])
    record = regression.record(output, target, loss=2.0)
    assert record.metrics == {"mse": 5 / 3, "mae": 1.0}
    assert (record.accuracy, record.f1, record.recall, record.precision) == (None,) * 4
    assert record.error is None
    assert (record.kind, record.count) == ("regression", 3)


def test_extra_metrics_see_only_valid_targets():
    seen = {}

    def keep(name):
        def metric(y_true, y_pred):
            seen[name] = (y_true.tolist(), y_pred.tolist())
            return 1.5

        return {name: metric}

    output = torch.tensor([[2.0, 0.0, 0.0], [0.0, 3.0, 0.0]])
    record = categorical.record(output, torch.tensor([0, -100]), loss=None, extra_metrics=keep("c"))
    assert record.extra == {"c": 1.5}
    multilabel.record(
        torch.tensor([[1.0, -1.0]]), torch.tensor([[NAN, 1.0]]), loss=None, extra_metrics=keep("m")
    )
    regression.record(
        torch.tensor([[1.0, -1.0]]), torch.tensor([[0.5, NAN]]), loss=None, extra_metrics=keep("r")
    )
    assert seen == {"c": ([0], [0]), "m": ([1], [0]), "r": ([0.5], [1.0])}


def test_a_bounded_accumulator_keeps_no_arrays():
    with pytest.raises(ValueError, match="bounded accumulator cannot keep"):
        categorical.accumulator(keep_arrays=True, bounded=True)
    with pytest.raises(ValueError, match="keep_arrays=True"):
        categorical.accumulator(bounded=True).result(loss=None, extra_metrics={"a": max})


def test_a_task_prediction_has_the_tasks_probabilities_and_decisions():
    raw = logits(3, 2).numpy()
    result = multilabel.prediction(raw, np.array([7, 8, 9]))
    assert result.kind == "bernoulli"
    assert np.allclose(result.probabilities, 1 / (1 + np.exp(-raw)))
    assert result.sample_ids.tolist() == [7, 8, 9]
    continuous = regression.prediction(raw, np.arange(3))
    assert continuous.probabilities is None
    assert continuous.spec is None
    assert np.array_equal(continuous.decoded, raw)
    with pytest.raises(TaskValidationError, match="declares 2 outputs"):
        multilabel.prediction(logits(3, 4).numpy(), np.arange(3))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("adapter", "loss_fn", "target"),
    [
        (categorical, nn.CrossEntropyLoss(), torch.tensor([0, 1, 2, 1])),
        (multilabel, nn.BCEWithLogitsLoss(), torch.ones(4, 2)),
        (regression, nn.MSELoss(), torch.ones(4, 2)),
    ],
)
def test_the_values_of_a_batch_are_read_once_before_its_loss(
    monkeypatch, adapter, loss_fn, target, masked
):
    """Each read waits for an accelerator; the step's own read of the loss is the other one."""
    target = target.clone()
    if masked:
        target[0] = -100 if adapter is categorical else NAN
    reads = []
    for name in ("tolist", "item", "__bool__", "__float__", "__int__"):
        plain = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor,
            name,
            lambda self, name=name, plain=plain: reads.append(name) or plain(self),
        )
    terms = supervised_terms(loss_fn, adapter, logits(4, adapter.spec.num_outputs), target)
    assert not terms.masked
    assert reads == ["tolist"]
