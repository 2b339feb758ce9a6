"""Scores from counts are scikit-learn's, whatever classes occur."""

from __future__ import annotations

import tracemalloc
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nnx.records import NNEvaluationDataPoint
from nnx.tasks.counts import ClassCounts, IndicatorCounts
from nnx.tasks.scores import AVERAGES, classification_scores, grouped_class_scores
from sklearn.metrics import accuracy_score, precision_recall_fscore_support

FAST = settings(deadline=None, max_examples=60)


def oracle(y_true, y_pred, average):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        precision, recall, f1, _ = precision_recall_fscore_support(
            y_true, y_pred, average=average, zero_division=0
        )
    return accuracy_score(y_true, y_pred), f1, recall, precision


labels = st.integers(1, 60).flatmap(
    lambda n: st.tuples(*(st.lists(st.integers(0, 7), min_size=n, max_size=n) for _ in range(2)))
)


@FAST
@given(labels, st.sampled_from(["macro", "micro", "weighted"]))
def test_label_scores_equal_scikit_learn(pair, average):
    truth, guess = map(np.array, pair)
    assert classification_scores(truth, guess, average) == pytest.approx(
        oracle(truth, guess, average), abs=0, rel=1e-15
    )


@FAST
@given(st.integers(1, 30), st.integers(2, 6), st.randoms(), st.sampled_from(AVERAGES[:3]))
def test_indicator_scores_equal_scikit_learn(rows, width, random, average):
    truth, guess = (
        np.array([[random.random() < 0.3 for _ in range(width)] for _ in range(rows)]).astype(int)
        for _ in range(2)
    )
    assert classification_scores(truth, guess, average) == pytest.approx(
        oracle(truth, guess, average), rel=1e-15
    )


@FAST
@given(labels)
def test_binary_scores_are_those_of_class_one(pair):
    truth, guess = (np.array(side) % 2 for side in pair)
    assert classification_scores(truth, guess, "binary") == pytest.approx(
        oracle(truth, guess, "binary"), rel=1e-15
    )


def test_one_class_alone_is_perfect_and_string_labels_are_scored():
    assert classification_scores([3, 3, 3], [3, 3, 3]) == (1.0, 1.0, 1.0, 1.0)
    truth, guess = np.array(["cat", "dog", "dog"]), np.array(["cat", "cat", "dog"])
    assert classification_scores(truth, guess) == pytest.approx(oracle(truth, guess, "macro"))


def test_ten_thousand_classes_equal_scikit_learn_without_a_square_table():
    generator = np.random.default_rng(0)
    truth = generator.integers(0, 10_000, 50_000)
    guess = np.where(generator.random(50_000) < 0.5, truth, generator.integers(0, 10_000, 50_000))
    expected = oracle(truth, guess, "macro")
    assert classification_scores(truth, guess) == pytest.approx(expected, rel=1e-14)
    counts = ClassCounts(10_000)
    for start in range(0, 50_000, 777):
        part = slice(start, start + 777)
        counts.update(torch.as_tensor(guess[part]), torch.as_tensor(truth[part]))
    assert counts.scores() == pytest.approx(expected, rel=1e-14)
    assert sum(t.numel() for t in (counts.state()["table"],)) == 3 * 10_001


def test_nothing_scored_is_unknown_not_zero():
    assert classification_scores([], []) == (None, None, None, None)
    assert ClassCounts().scores() == (None, None, None, None)
    assert IndicatorCounts().scores() == (None, None, None, None)


@pytest.mark.parametrize(
    ("truth", "guess", "message"),
    [
        ([0, 1], [0, 1, 1], "cannot be scored against"),
        ([[0, 1], [1, 0]], [0, 1], "cannot be scored against"),
        ([0.5, 1.0], [0, 1], "continuous or missing"),
        ([np.nan, 1.0], [0, 1], "continuous or missing"),
        ([[0, 2], [1, 0]], [[0, 1], [1, 0]], "0/1 indicators"),
        (np.zeros((2, 2, 2)), np.zeros((2, 2, 2)), "must be .N,. labels"),
    ],
)
def test_unscorable_arrays_are_refused(truth, guess, message):
    with pytest.raises(ValueError, match=message):
        classification_scores(truth, guess)


def test_an_unknown_average_names_the_known_ones():
    with pytest.raises(ValueError, match="macro, micro, weighted, binary, not 'samples'"):
        classification_scores([0], [0], "samples")


@FAST
@given(labels, st.lists(st.integers(0, 9), min_size=0, max_size=6), st.sampled_from([1, 10**12]))
def test_many_groups_at_once_equal_each_alone(pair, cuts, stretch):
    """Also empty groups, and label ranges far too wide for a dense table."""
    truth, guess = (np.array(side) * stretch for side in pair)
    bounds = sorted(cut % (len(truth) + 1) for cut in cuts)
    edges = [0, *bounds, len(truth)]
    group = np.repeat(np.arange(len(edges) - 1), np.diff(edges))
    table = grouped_class_scores(truth, guess, group, len(edges) - 1)
    for row, start, stop in zip(table, edges, edges[1:]):
        if start == stop:
            assert np.isnan(row).all()
        else:
            assert tuple(row) == pytest.approx(
                oracle(truth[start:stop], guess[start:stop], "macro"), rel=1e-15
            )


@FAST
@given(labels, st.randoms())
def test_counts_are_the_same_in_any_order_of_merging_and_masking(pair, random):
    truth, guess = map(torch.tensor, pair)
    valid = torch.tensor([random.random() < 0.7 for _ in truth])
    whole = ClassCounts(8, trusted=True)
    whole.update(guess, truth, valid)
    parts = []
    for start in range(0, len(truth), 7):
        part = ClassCounts(random.choice([8, None]))
        window = slice(start, start + 7)
        part.update(guess[window], truth[window], valid[window])
        parts.append(part)
    random.shuffle(parts)
    merged = ClassCounts()
    for part in parts:
        merged.merge(part)
    assert merged.count == whole.count == int(valid.sum())
    assert merged.scores() == whole.scores()
    if valid.any():
        kept = (truth[valid].numpy(), guess[valid].numpy())
        assert whole.scores() == pytest.approx(oracle(*kept, "macro"), rel=1e-15)


def test_targets_outside_the_classes_are_classes_that_nobody_predicts():
    truth, guess = np.array([0, 1, -5, 999_999_999_999, 2]), np.array([0, 1, 1, 2, 0])
    counts = ClassCounts(3)
    counts.update(torch.as_tensor(guess), torch.as_tensor(truth))
    assert counts.scores() == pytest.approx(oracle(truth, guess, "macro"))
    free = ClassCounts()
    free.update(torch.as_tensor(guess), torch.as_tensor(truth))
    assert free.scores() == counts.scores()


def test_a_masked_indicator_row_counts_by_its_valid_entries():
    actual = torch.tensor([[1, 0], [1, 1], [0, 0]]) != 0
    predicted = torch.tensor([[1, 1], [1, 1], [1, 1]]) != 0
    valid = torch.tensor([[1, 0], [1, 1], [0, 0]]) != 0
    counts = IndicatorCounts()
    counts.update(predicted, actual, valid)
    assert counts.totals() == (2, 2, 3, 3)
    assert counts.scores().accuracy == 1.0


def test_the_record_of_arrays_has_the_same_scores():
    truth, guess = np.array([0, 1, 2, 2, 1]), np.array([0, 2, 2, 2, 1])
    record = NNEvaluationDataPoint.of(truth, guess)
    scores = classification_scores(truth, guess)
    assert (record.accuracy, record.f1, record.recall, record.precision) == scores


def test_many_groups_of_many_classes_take_memory_of_the_samples_alone():
    """A dense table of 400 batches x 10,000 classes would be 96 MB."""
    generator = np.random.default_rng(0)
    truth = generator.integers(0, 10_000, 400 * 32)
    guess = np.where(generator.random(len(truth)) < 0.5, truth, generator.permutation(truth))
    group = np.repeat(np.arange(400), 32)
    tracemalloc.start()
    table = grouped_class_scores(truth, guess, group, 400)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8e6
    for index in (0, 17, 399):
        part = slice(index * 32, index * 32 + 32)
        expected = oracle(truth[part], guess[part], "macro")
        assert tuple(table[index]) == pytest.approx(expected, rel=1e-15)


def test_a_table_grows_to_the_classes_it_meets_and_keeps_its_counts():
    counts = ClassCounts()
    for label in (2, 0, 7):
        counts.update(torch.tensor([label]), torch.tensor([label]))
    counts.expect(12, trusted=True)
    counts.update(torch.tensor([11, 3]), torch.tensor([11, 4]), torch.tensor([True, False]))
    assert counts.count == 4
    assert counts.scores() == (1.0, 1.0, 1.0, 1.0)
    assert len(counts.arrays()[0]) == 12


def test_the_score_of_class_1_needs_two_classes():
    with pytest.raises(ValueError, match="scores class 1 against class 0, but there are 3"):
        classification_scores([0, 1, 2], [0, 1, 1], "binary")
    with pytest.raises(ValueError, match="there are 3"):
        NNEvaluationDataPoint.of(np.array([0, 1, 2]), np.array([0, 1, 1]), average="binary")
    assert classification_scores([0, 1, 1], [0, 1, 0], "binary").recall == 0.5
