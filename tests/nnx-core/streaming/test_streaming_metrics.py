"""Metrics accumulated apart and merged equal the whole."""

from __future__ import annotations

import functools
import itertools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nnx import (
    MetricSnapshot,
    MetricSpec,
    StreamingMetrics,
    TaskSpec,
    register_metric,
    unregister_metric,
)
from nnx.prediction.inference import evaluate
from nnx.streaming import MetricMergeError
from sklearn.metrics import f1_score, log_loss, roc_auc_score
from torch import nn

CATEGORICAL = (MetricSpec("accuracy"), MetricSpec("f1"), MetricSpec("nll"), MetricSpec("brier"))
BINARY = (
    MetricSpec("accuracy"), MetricSpec("f1", config={"average": "binary"}), MetricSpec("nll"),
)  # fmt: skip


class Auroc:
    """A rank metric: it needs every score, and says so by having no merge()."""

    def __init__(self, config):
        self.parts = []

    def update(self, target, prediction):
        self.parts.append((target, prediction))

    def result(self):
        target, scores = (np.concatenate(side) for side in zip(*self.parts))
        return roc_auc_score(target, scores)


class Total:
    """Bounded and mergeable."""

    def __init__(self, config):
        self.sum = 0.0

    def update(self, target, prediction):
        self.sum += float(prediction.sum())

    def merge(self, other):
        self.sum += other.sum

    def result(self):
        return self.sum


class Hoarder(Total):
    stores_scores = True


@pytest.fixture
def custom():
    register_metric("test.auroc", 1, Auroc, input="probabilities", mode="max")
    register_metric("test.total", 1, Total, input="continuous", mode="max")
    register_metric("test.hoarder", 1, Hoarder, input="continuous", mode="max")
    yield
    for id in ("test.auroc", "test.total", "test.hoarder"):
        unregister_metric(id, 1)


def logits(n, c, seed=0):
    return torch.randn(n, c, generator=torch.Generator().manual_seed(seed)).double()


def values(snapshot):
    return pytest.approx(dict(snapshot.values), rel=1e-12)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(0, 60), max_size=6), st.randoms(use_true_random=False),
    st.sampled_from(["categorical", "multilabel", "regression"]), st.floats(0, 1),
)  # fmt: skip
def test_merging_in_any_order_equals_the_whole(cuts, shuffler, kind, masked):
    task = {
        "categorical": TaskSpec.categorical(4, ignore_index=-1),
        "multilabel": TaskSpec.multilabel(4, threshold=0.6),
        "regression": TaskSpec.regression(4),
    }[kind]
    metrics = {
        "categorical": CATEGORICAL, "multilabel": BINARY, "regression": (MetricSpec("mse"), MetricSpec("mae")),
    }[kind]  # fmt: skip
    output = logits(60, 4)
    generator = torch.Generator().manual_seed(1)
    target = torch.randint(0, 4, (60,), generator=generator)
    if kind != "categorical":
        target = (logits(60, 4, seed=2) > 0).double()
    hidden = torch.rand(target.shape, generator=generator) < masked
    target[hidden] = -1 if kind == "categorical" else float("nan")
    whole = StreamingMetrics.for_task(metrics, task)
    whole.update_logits(target, output)
    edges = [0, *sorted(cuts), 60]
    parts = []
    for start, stop in itertools.pairwise(edges):
        part = StreamingMetrics.for_task(metrics, task)
        assert part.update_logits(target[start:stop], output[start:stop]) == part.count
        parts.append(part)
    shuffler.shuffle(parts)
    merged = functools.reduce(lambda a, b: a.merge(b), parts)
    assert merged.count == whole.count == int((~hidden).sum())
    assert dict(merged.finalize().values) == values(whole.finalize())
    assert merged.finalize().unavailable == whole.finalize().unavailable


def test_the_built_ins_equal_scikit_learn():
    output, target = logits(300, 5), torch.arange(300) % 5
    stream = StreamingMetrics(CATEGORICAL, "categorical")
    for start in range(0, 300, 64):
        stream.update_logits(target[start : start + 64], output[start : start + 64])
    found = stream.finalize().values
    assert found["f1"] == pytest.approx(
        f1_score(target, output.argmax(1), average="macro", zero_division=0)
    )
    assert found["nll"] == pytest.approx(log_loss(target, output.softmax(1)))
    assert stream.bounded


def test_given_inputs_equal_those_derived_from_logits():
    output, target = logits(40, 3), torch.arange(40) % 3
    derived = StreamingMetrics(CATEGORICAL, "categorical")
    derived.update_logits(target, output)
    given_inputs = StreamingMetrics(CATEGORICAL, "categorical")
    count = given_inputs.update(
        target.numpy(), probabilities=output.softmax(1).numpy(), labels=output.argmax(1).numpy()
    )
    assert count == 40
    assert dict(given_inputs.finalize().values) == values(derived.finalize())


def test_masked_entries_are_not_scored():
    stream = StreamingMetrics(
        (MetricSpec("accuracy"),), "categorical", ignore_index=9, num_outputs=3
    )
    assert (
        stream.update([0, 9, 1, 2], labels=[0, 0, 1, 0], valid=np.array([True, True, True, False]))
        == 2
    )
    assert stream.finalize() == MetricSnapshot(count=2, values={"accuracy": 1.0})
    continuous = StreamingMetrics((MetricSpec("mae"),), "continuous")
    assert continuous.update([1.0, np.nan], values=[3.0, 7.0]) == 1
    assert continuous.finalize().values["mae"] == 2.0


def test_soft_targets_are_scored_and_a_row_holding_nan_is_masked():
    stream = StreamingMetrics((MetricSpec("nll"), MetricSpec("brier")), "categorical")
    target = np.array([[0.25, 0.75], [np.nan, 1.0], [1.0, 0.0]])
    table = np.array([[0.5, 0.5], [0.1, 0.9], [1.0, 0.0]])
    assert stream.update(target, probabilities=table) == 2
    found = stream.finalize().values
    assert found["nll"] == pytest.approx(np.log(2) / 2)
    assert found["brier"] == pytest.approx((0.25**2 * 2 + 0) / 2)


def test_an_empty_or_fully_masked_stream_is_unavailable():
    stream = StreamingMetrics(CATEGORICAL, "categorical", ignore_index=-100)
    empty = MetricSnapshot(count=0, unavailable=("accuracy", "f1", "nll", "brier"))
    assert stream.finalize() == empty
    assert not stream.finalize().available
    assert stream.update_logits(torch.full((3,), -100), logits(3, 4)) == 0
    assert stream.finalize() == empty
    assert StreamingMetrics((MetricSpec("f1"),), "categorical").update([], labels=[]) == 0
    full = StreamingMetrics(CATEGORICAL, "categorical", ignore_index=-100)
    full.update_logits(torch.tensor([0, 1]), logits(2, 4))
    assert full.finalize().available == ("accuracy", "f1", "nll", "brier")
    assert full.merge(stream).finalize() == full.finalize() == stream.merge(full).finalize()


def test_a_merge_copies_its_inputs_and_finalize_is_repeatable(custom):
    metrics = (MetricSpec("mae"), MetricSpec("test.total"))
    one, two = (StreamingMetrics(metrics, "continuous") for _ in range(2))
    one.update([0.0], values=[1.0])
    two.update([0.0], values=[3.0])
    merged = one.merge(two)
    before = merged.finalize()
    assert before == merged.finalize()
    one.update([0.0], values=[100.0])
    two.update([0.0], values=[100.0])
    assert merged.finalize() == before
    assert dict(before.values) == {"mae": 2.0, "test.total": 4.0}
    merged.update([0.0], values=[5.0])
    assert one.count == two.count == 2
    with pytest.raises(TypeError):
        before.values["mae"] = 0.0


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (StreamingMetrics((MetricSpec("f1"),), "categorical", num_outputs=3), "differ in metrics"),
        (StreamingMetrics((MetricSpec("accuracy", name="a"),), "categorical"), "differ in metrics"),
        (StreamingMetrics((MetricSpec("accuracy"),), "bernoulli"), "differ in semantics"),
        (StreamingMetrics((MetricSpec("accuracy"),), "categorical", labels=["a", "b", "c"]), "in labels"),
        (StreamingMetrics((MetricSpec("accuracy"),), "categorical", num_outputs=4), "in num_outputs"),
        (StreamingMetrics((MetricSpec("accuracy"),), "categorical", ignore_index=0), "ignore_index"),
        (3, "cannot merge with int"),
    ],
)  # fmt: skip
def test_only_equal_schemas_merge(other, message):
    mine = StreamingMetrics((MetricSpec("accuracy"),), "categorical", num_outputs=3)
    with pytest.raises(MetricMergeError, match=message):
        mine.merge(other)


def test_the_threshold_is_part_of_a_bernoulli_schema():
    one, two = (
        StreamingMetrics((MetricSpec("accuracy"),), "bernoulli", threshold=t) for t in (0.5, 0.6)
    )
    with pytest.raises(MetricMergeError, match=r"differ in threshold: 0\.5 and 0\.6"):
        one.merge(two)


def test_outputs_seen_in_the_data_must_agree_too():
    one, two = (StreamingMetrics((MetricSpec("accuracy"),), "categorical") for _ in range(2))
    one.update_logits(torch.tensor([0]), logits(1, 3))
    two.update_logits(torch.tensor([0]), logits(1, 4))
    with pytest.raises(MetricMergeError, match="num_outputs: 3 and 4"):
        one.merge(two)
    with pytest.raises(ValueError, match="outputs are 4 wide; 3 were declared or seen before"):
        one.update_logits(torch.tensor([0]), logits(1, 4))
    assert one.count == 1


def test_a_rank_metric_is_refused_in_bounded_mode_and_replayed_when_materialized(custom):
    for id, semantics in (("test.auroc", "bernoulli"), ("test.hoarder", "continuous")):
        with pytest.raises(ValueError, match="needs every score; pass materialize=True"):
            StreamingMetrics((MetricSpec(id),), semantics)
    metrics = (MetricSpec("test.auroc"), MetricSpec("nll"))
    one, two = (StreamingMetrics(metrics, "bernoulli", materialize=True) for _ in range(2))
    assert not one.bounded
    generator = np.random.default_rng(0)
    target, scores = generator.integers(0, 2, 80), generator.random(80)
    one.update(target[:30], probabilities=scores[:30])
    two.update(target[30:], probabilities=scores[30:])
    merged = one.merge(two)
    assert merged.finalize().values["test.auroc"] == pytest.approx(roc_auc_score(target, scores))
    assert merged.finalize() == merged.finalize()


@pytest.mark.parametrize(
    ("stream", "arguments", "message"),
    [
        (("accuracy", "categorical"), {"target": [0, 1]}, "needs labels="),
        (("nll", "categorical"), {"target": [0, 1], "labels": [0, 1]}, "needs probabilities="),
        (("mae", "continuous"), {"target": [0.0]}, "needs values="),
        (("accuracy", "categorical"), {"target": [0, 1], "labels": [0, 1, 2]}, "do not fit targets"),
        (("nll", "categorical"), {"target": [0], "probabilities": [0.5]}, r"must be \(N, C, ...\)"),
        (("nll", "categorical"), {"target": [5], "probabilities": [[0.5, 0.5]]}, r"in \[0, 2\); found 5"),
        (("nll", "categorical"), {"target": [0.5], "probabilities": [[0.5, 0.5]]}, "class indices in .*found 0.5"),
        (("mae", "continuous"), {"target": [0.0], "values": [1.0], "valid": [1]}, "boolean mask"),
        (("accuracy", "bernoulli"), {"target": [0, 2], "labels": [0, 1]}, "0 or 1.*found 2"),
    ],
)  # fmt: skip
def test_inputs_that_do_not_fit_are_refused_and_add_nothing(stream, arguments, message):
    metrics = StreamingMetrics((MetricSpec(stream[0]),), stream[1])
    arguments = dict(arguments)
    with pytest.raises(ValueError, match=message):
        metrics.update(arguments.pop("target"), **arguments)
    assert metrics.count == 0


def test_wrong_targets_of_logits_are_refused():
    bernoulli = StreamingMetrics((MetricSpec("accuracy"),), "bernoulli")
    with pytest.raises(ValueError, match="0 or 1.*found 2"):
        bernoulli.update_logits(torch.tensor([[0, 2]]), logits(1, 2))
    categorical = StreamingMetrics((MetricSpec("accuracy"),), "categorical")
    with pytest.raises(ValueError, match="must be class indices"):
        categorical.update_logits(torch.rand(2) * 0.9 + 0.05, logits(2, 2))
    with pytest.raises(ValueError, match="logits must be floating"):
        categorical.update_logits(torch.tensor([0]), torch.tensor([[1, 2]]))
    with pytest.raises(ValueError, match="found 2"):
        categorical.update_logits(torch.tensor([2]), logits(1, 2))


def test_declarations_are_checked():
    for arguments, message in (
        (((MetricSpec("mae"),), "categorical"), "reads continuous"),
        (((MetricSpec("f1"),), "bernoulli"), "binary"),
        (((), "softmax"), "semantics"),
    ):
        with pytest.raises(ValueError, match=message):
            StreamingMetrics(*arguments)
    with pytest.raises(ValueError, match="labels"):
        StreamingMetrics((), "categorical", labels=["a"], num_outputs=2)
    with pytest.raises(ValueError, match="ignore_index"):
        StreamingMetrics((), "continuous", ignore_index=1)
    for labels in ("ab", {"a": 0, "b": 1}, {"a", "b"}, 3, ["a", "a"]):
        with pytest.raises(ValueError, match="labels must be"):
            StreamingMetrics((), "categorical", labels=labels)
        with pytest.raises(ValueError, match="labels"):
            TaskSpec.categorical(2, labels=labels)


def test_ten_thousand_classes_take_bounded_memory():
    stream = StreamingMetrics((MetricSpec("f1"),), "categorical", num_outputs=10_000)
    generator = np.random.default_rng(0)
    truth, guess = generator.integers(0, 10_000, (2, 30_000))
    for start in range(0, 30_000, 1000):
        stream.update(truth[start : start + 1000], labels=guess[start : start + 1000])
    expected = f1_score(truth, guess, average="macro", zero_division=0)
    assert stream.finalize().values["f1"] == pytest.approx(expected)


def test_accumulations_and_snapshots_travel_between_processes():
    stream = StreamingMetrics(CATEGORICAL, "categorical")
    stream.update_logits(torch.arange(9) % 3, logits(9, 3))
    sent = pickle.loads(pickle.dumps(stream))
    assert sent.finalize() == stream.finalize()
    assert pickle.loads(pickle.dumps(stream.finalize())) == stream.finalize()
    assert sent.merge(stream).count == 18


@pytest.mark.parametrize(
    ("task", "loss_fn", "metrics"),
    [
        (TaskSpec.categorical(4, ignore_index=-1), nn.CrossEntropyLoss(), CATEGORICAL),
        (TaskSpec.multilabel(4, threshold=0.3), nn.BCEWithLogitsLoss(), BINARY),
        (TaskSpec.regression(4), nn.MSELoss(), (MetricSpec("mae"), MetricSpec("mse"))),
    ],
)
def test_logits_are_scored_as_evaluate_scores_them(make_model, task, loss_fn, metrics):
    model = make_model(loss_fn, task)
    output = logits(30, 4).float()
    if task.kind == "categorical":
        target = torch.arange(30) % 4
        target[::5] = -1
    else:
        target = (logits(30, 4, seed=5) > 0).float()
        target[::5, 2] = float("nan")
    stream = StreamingMetrics.for_task(metrics, task)
    stream.update_logits(target, output)
    record = evaluate(model, [(output, target)], metrics=metrics)
    assert {name: record.metrics[name] for name in stream.finalize().values} == values(
        stream.finalize()
    )
    assert stream.count == record.count


def test_labels_are_decided_from_probabilities_where_none_are_given():
    output, target = logits(40, 3), torch.arange(40) % 3
    table = output.softmax(1)
    metrics = (MetricSpec("accuracy"), MetricSpec("f1"))
    derived, named = (StreamingMetrics(metrics, "categorical") for _ in range(2))
    derived.update(target, probabilities=table)
    named.update(target, labels=table.argmax(1))
    assert derived.finalize() == named.finalize()
    binary = StreamingMetrics(BINARY, "bernoulli", threshold=0.7)
    binary.update([1, 1, 0], probabilities=[0.69, 0.7, 0.1])
    assert binary.finalize().values["accuracy"] == pytest.approx(2 / 3)
    # Labels that are given count, whatever the probabilities say.
    both = StreamingMetrics((MetricSpec("accuracy"),), "categorical")
    both.update([0, 1], probabilities=[[1.0, 0.0], [1.0, 0.0]], labels=[0, 1])
    assert both.finalize().values["accuracy"] == 1.0


@pytest.mark.parametrize("shape", [(40,), (10, 2, 2)])
def test_float_targets_are_class_indices_and_nan_is_masked(shape):
    output = torch.randn(shape[0], 3, *shape[1:], generator=torch.Generator().manual_seed(0))
    target = (torch.arange(40) % 3).reshape(shape)
    floating = target.double()
    floating[::4] = float("nan")
    kept = ~floating.isnan()
    expected = StreamingMetrics(CATEGORICAL, "categorical", ignore_index=-1)
    expected.update_logits(torch.where(kept, target, -1), output)
    for add in (
        lambda s: s.update_logits(floating, output),
        lambda s: s.update(floating, probabilities=output.double().softmax(1)),
    ):
        stream = StreamingMetrics(CATEGORICAL, "categorical", ignore_index=-1)
        assert add(stream) == int(kept.sum())
        assert dict(stream.finalize().values) == values(expected.finalize())


@pytest.mark.parametrize("further", [(), (2, 3)])
def test_soft_targets_have_every_metric(further):
    generator = torch.Generator().manual_seed(0)
    output = torch.randn(20, 4, *further, generator=generator).double()
    soft = torch.rand(20, 4, *further, generator=generator).double()
    soft = soft / soft.sum(1, keepdim=True)
    soft[3] = float("nan")  # masked
    streams = [StreamingMetrics(CATEGORICAL, "categorical") for _ in range(2)]
    counts = {streams[0].update_logits(soft, output),
              streams[1].update(soft, probabilities=output.softmax(1))}  # fmt: skip
    rows = [t.movedim(1, -1).reshape(-1, 4) for t in (soft, output.softmax(1))]
    shares, chances = (r[~rows[0].isnan().any(1)].numpy() for r in rows)
    assert counts == {len(shares)}
    truth, guess = shares.argmax(1), chances.argmax(1)
    expected = {
        "accuracy": (truth == guess).mean(),
        "f1": f1_score(truth, guess, average="macro", zero_division=0),
        "nll": -(shares * np.log(chances)).sum(1).mean(),
        "brier": ((chances - shares) ** 2).sum(1).mean(),
    }
    for stream in streams:
        assert dict(stream.finalize().values) == pytest.approx(expected)


def test_soft_binary_targets_have_likelihoods_and_decisions():
    stream = StreamingMetrics(BINARY, "bernoulli")
    stream.update_logits(torch.tensor([[0.9, 0.2]]), torch.tensor([[2.0, 1.0]]))
    chance = torch.tensor([2.0, 1.0]).double().sigmoid().numpy()
    soft = np.array([0.9, 0.2])
    expected = -(soft * np.log(chance) + (1 - soft) * np.log(1 - chance)).mean()
    found = stream.finalize().values
    assert found["nll"] == pytest.approx(expected)
    assert found["accuracy"] == 0.5


@pytest.mark.parametrize(
    ("declared", "batch", "message"),
    [
        # another number of classes than the batch before
        ({}, {"target": [0], "probabilities": [[0.2, 0.3, 0.5]]}, "3 wide; 2 were declared or seen"),
        ({}, {"target": [[0.2, 0.3, 0.5]], "probabilities": [[0.2, 0.3, 0.5]]}, "3 wide; 2"),
        # labels that are no classes
        ({}, {"target": [0], "labels": [2]}, r"labels must be class indices in \[0, 2\); found 2"),
        ({}, {"target": [0], "labels": [-1]}, "found -1"),
        ({}, {"target": [0], "labels": [0.5]}, "found 0.5"),
        ({}, {"target": [2], "labels": [0]}, "targets must be class indices"),
        ({}, {"target": [0.5], "labels": [0]}, "found 0.5"),
        # batch sizes
        ({}, {"target": [0, 1], "probabilities": [[0.5, 0.5]]}, r"must be \(N, C, ...\)"),
        ({}, {"target": [0], "probabilities": [[0.5, 0.5]], "labels": [0, 1]}, "do not fit targets"),
        ({}, {"target": [0], "labels": [0], "valid": np.array([True, False])}, "mask of shape"),
    ],
)  # fmt: skip
def test_a_batch_that_does_not_fit_the_ones_before_is_refused(declared, batch, message):
    stream = StreamingMetrics((MetricSpec("accuracy"),), "categorical", **declared)
    stream.update([0, 1], probabilities=[[0.5, 0.5], [0.1, 0.9]])
    before = stream.finalize()
    batch = dict(batch)
    with pytest.raises(ValueError, match=message):
        stream.update(batch.pop("target"), **batch)
    assert (stream.finalize(), stream.num_outputs) == (before, 2)


@pytest.mark.parametrize(
    ("semantics", "target", "given", "message"),
    [
        ("categorical", [0], {"probabilities": [[0.5, 0.5]]}, "2 wide; 3 were declared"),
        ("categorical", [3], {"labels": [0]}, r"in \[0, 3\); found 3"),
        ("bernoulli", [[0, 1]], {"probabilities": [[0.5, 0.5]]}, "2 wide; 3 were declared"),
        ("bernoulli", [0, 1], {"labels": [0, 1]}, "1 wide; 3 were declared"),
        ("bernoulli", [[0, 1, 1]], {"labels": [[0, 1, 2]]}, "labels must be 0 or 1; found 2"),
        ("continuous", [[0.0, 1.0]], {"values": [[0.0, 1.0]]}, "2 wide; 3 were declared"),
    ],
)
def test_widths_are_those_that_were_declared(semantics, target, given, message):
    id = "mae" if semantics == "continuous" else "accuracy"
    stream = StreamingMetrics((MetricSpec(id),), semantics, num_outputs=3)
    with pytest.raises(ValueError, match=message):
        stream.update(target, **given)
    assert stream.count == 0


@pytest.mark.parametrize(
    ("semantics", "target", "output"),
    [
        ("categorical", torch.zeros(3).long(), torch.zeros(4, 2)),
        ("categorical", torch.zeros(2, 2).long(), torch.zeros(4, 2)),
        ("bernoulli", torch.zeros(2, 4), torch.zeros(4, 2)),
        ("bernoulli", torch.zeros(4), torch.zeros(4, 2)),
        ("continuous", torch.zeros(3, 1), torch.zeros(1, 3)),
    ],
)
def test_targets_of_another_shape_than_the_logits_are_refused(semantics, target, output):
    stream = StreamingMetrics((), semantics)
    with pytest.raises(ValueError, match=f"do not fit {semantics} logits of shape"):
        stream.update_logits(target, output)


def test_flat_targets_fit_a_single_output():
    stream = StreamingMetrics((MetricSpec("mae"),), "continuous")
    assert stream.update_logits(torch.tensor([1.0, 2.0]), torch.tensor([[1.0], [4.0]])) == 2
    assert stream.finalize().values["mae"] == 1.0


def test_class_counts_seen_in_probabilities_must_agree_to_merge():
    one, two = (StreamingMetrics((MetricSpec("brier"),), "categorical") for _ in range(2))
    one.update([0], probabilities=[[0.5, 0.5]])
    two.update([0], probabilities=[[0.5, 0.5, 0.0]])
    with pytest.raises(MetricMergeError, match="num_outputs: 2 and 3"):
        one.merge(two)


class Failing(Total):
    def update(self, target, prediction):
        super().update(target, prediction)
        if (prediction > 100).any():
            raise RuntimeError("no such value")


class Functional(Total):
    def merge(self, other):
        made = Functional(None)
        made.sum = self.sum + other.sum
        return made


@pytest.fixture
def unruly():
    register_metric("test.failing", 1, Failing, input="continuous", mode="max")
    register_metric("test.functional", 1, Functional, input="continuous", mode="max")
    yield
    for id in ("test.failing", "test.functional"):
        unregister_metric(id, 1)


@pytest.mark.parametrize("order", [1, -1])
def test_a_metric_that_raises_leaves_no_half_counted_batch(custom, unruly, order):
    metrics = [MetricSpec("mae"), MetricSpec("test.failing"), MetricSpec("test.hoarder")][::order]
    stream = StreamingMetrics(metrics, "continuous", materialize=True)
    stream.update([0.0], values=[1.0])
    before = stream.finalize()
    with pytest.raises(RuntimeError, match="no such value"):
        stream.update([0.0], values=[101.0])
    assert (stream.finalize(), stream.count) == (before, 1)
    stream.update([0.0], values=[3.0])
    assert dict(stream.finalize().values) == {"mae": 2, "test.failing": 4, "test.hoarder": 4}


def test_an_accumulator_that_does_not_merge_in_place_is_refused(unruly):
    one, two = (StreamingMetrics((MetricSpec("test.functional"),), "continuous") for _ in range(2))
    one.update([0.0], values=[1.0])
    two.update([0.0], values=[2.0])
    with pytest.raises(
        MetricMergeError, match=r"test\.functional@v1 must merge in place and return None"
    ):
        one.merge(two)
    assert one.finalize().values["test.functional"] == 1.0
