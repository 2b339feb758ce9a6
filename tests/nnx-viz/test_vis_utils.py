from __future__ import annotations

import numpy as np
import pytest
from nnx import VisUtils
from nnx.vis_utils import confusion_matrix, generate_colors, multi_line_plot, scatter_plot
from sklearn import metrics


def labels(seed=0, n=200, classes=4):
    rng = np.random.default_rng(seed)
    return rng.integers(0, classes, n), rng.integers(0, classes, n)


def test_confusion_matrix_equals_scikit_learn():
    true, predicted = labels()
    figure = confusion_matrix(true, predicted, class_names=list("abcd"))
    assert np.array_equal(figure.data[0].z, metrics.confusion_matrix(true, predicted))
    assert list(figure.data[0].x) == list("abcd")


def test_normalised_rows_sum_to_one_and_absent_classes_stay_zero():
    figure = confusion_matrix([0, 0, 1], [0, 2, 1], class_names=["x", "y", "z"], normalize=True)
    assert np.allclose(figure.data[0].z, [[0.5, 0, 0.5], [0, 1, 0], [0, 0, 0]])


def test_string_labels_and_names_that_occur():
    figure = confusion_matrix(["cat", "dog"], ["dog", "dog"])
    assert list(figure.data[0].y) == ["cat", "dog"]
    assert np.array_equal(figure.data[0].z, [[0, 1], [0, 1]])


@pytest.mark.parametrize(
    ("true", "predicted", "names", "message"),
    [
        ([], [], None, "no labels"),
        ([0, 1], [0], None, "2 labels and Y_pred 1"),
        ([[0, 1]], [[0, 1]], None, "Y_true must be 1-D"),
        ([0, 3], [0, 1], ["a", "b"], "names 2 classes, but the labels run from 0 to 3"),
        (["a", "q"], ["a", "a"], ["a", "b"], "does not name"),
        ([0, 1, 1], [0.1, 0.9, 0.7], ["a", "b"], "Y_pred holds 0.1, which is no class: these look"),
        ([0, 1], [0.0, float("nan")], None, "Y_pred holds nan, which is no class"),
        ([0.5, 1.0], [0, 1], ["a", "b"], "Y_true holds 0.5"),
        ([0, 1], np.array([[0.9, 0.1], [0.2, 0.8]]), ["a", "b"], "Y_pred must be 1-D"),
    ],
)
def test_refusals(true, predicted, names, message):
    for draw in (confusion_matrix, VisUtils.classification_report):
        with pytest.raises(ValueError, match=message):
            draw(true, predicted, class_names=names)


@pytest.mark.parametrize("kind", [float, bool, np.float32])
def test_whole_floats_and_truth_values_are_classes(kind):
    true, predicted = labels(classes=2)
    figure = confusion_matrix(true.astype(kind), predicted.astype(kind), class_names=["a", "b"])
    assert np.array_equal(figure.data[0].z, metrics.confusion_matrix(true, predicted))


def test_classification_report_equals_scikit_learn():
    true, predicted = labels(1)
    table = VisUtils.classification_report(true, predicted, class_names=list("abcd"))
    expected = metrics.precision_recall_fscore_support(true, predicted, zero_division=0)
    assert np.allclose(table.loc[list("abcd"), "precision"], expected[0])
    assert np.allclose(table.loc[list("abcd"), "support"], expected[3])
    assert table.loc["accuracy", "f1-score"] == pytest.approx(
        metrics.accuracy_score(true, predicted)
    )


def test_lines():
    figure = multi_line_plot([1, 2, 3], [[1, 2, 3], [3, 2, 1]], "t", ["up", "down"], "x", "y")
    assert [t.name for t in figure.data] == ["up", "down"]
    assert list(figure.data[1].y) == [3, 2, 1]
    with pytest.raises(ValueError, match="2 values for 3"):
        multi_line_plot([1, 2, 3], [[1, 2]], "t", ["a"], "x", "y")


def test_groups_of_lines_share_a_colour():
    train, val = [[1.0, 2.0], [1.5, 2.5]], [[3.0, 4.0], [3.5, 4.5]]
    flat = [*train, *val]
    for legend, shown in (
        (["train", "val"], ["train", None, "val", None]),
        ([["a", "b"], ["c", "d"]], ["a", "b", "c", "d"]),
        (["a", "b", "c", "d"], ["a", "b", "c", "d"]),
    ):
        for groups in ([train, val], np.array([train, val])):
            figure = multi_line_plot([0, 1], groups, "t", legend, "x", "y")
            assert [list(t.y) for t in figure.data] == flat
            assert [t.name if t.showlegend else None for t in figure.data] == shown
            colours = [t.line.color for t in figure.data]
            assert colours[0] == colours[1] != colours[2] == colours[3]


def test_a_group_may_stand_beside_a_single_line():
    figure = multi_line_plot([0, 1], [[[1, 2], [3, 4]], [5, 6]], "t", ["many", "one"], "x", "y")
    assert [(t.name, list(t.y)) for t in figure.data] == [
        ("many", [1, 2]), ("many", [3, 4]), ("one", [5, 6]),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("series", "legend", "message"),
    [
        ([[[1, 2], [3, 4]]], ["a", "b", "c"], "2 series in 1 groups but 3 legend entries"),
        ([[[1, 2], [3, 4]], [5, 6]], [["a"], ["b"]], "a group of 2 series has 1 legend entries"),
        ([[[1, 2], [3]]], ["a"], "series 'a' has 1 values for 2 x values"),
        ([[1, 2]], ["a", "b"], "1 series but 2 legend entries"),
    ],
)
def test_lines_that_do_not_fit(series, legend, message):
    with pytest.raises(ValueError, match=message):
        multi_line_plot([0, 1], series, "t", legend, "x", "y")


def test_scatter_groups_by_value():
    data = {"x": [0.0, 1.0, 2.0], "y": [1.0, 2.0, 3.0], "t": [0, 1, 0]}
    vm = VisUtils.get_scatter_plot_vm(
        data, "T", "x", "X", "y", "Y", "t", {0: "zero", 1: "one"}, None, [0, 1]
    )
    figure = scatter_plot(vm)
    assert [t.name for t in figure.data] == ["zero", "one"]
    assert list(figure.data[0].x) == [0.0, 2.0]


def test_colours_are_distinct():
    for n in (1, 8, 30):
        assert len(set(generate_colors(n))) == n


def test_checkpoint_logits_in_two_dimensions(tmp_path, monkeypatch):
    import torch
    from nnx import (
        Checkpoints,
        Nets,
        NNCheckpoint,
        NNModel,
        NNModelParams,
        NNParams,
        NNTrainParams,
    )  # fmt: skip
    from torch.utils.data import DataLoader, TensorDataset

    monkeypatch.chdir(tmp_path)
    x = torch.randn(120, 4, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=40)
    model = NNModel(
        net_params=NNParams(input_dim=4, output_dim=2, hidden_dims=[8], dropout_prob=0.0),
        params=NNModelParams(net=Nets.FEED_FWD),
    )
    run = model.train(NNTrainParams(n_epochs=2, seed=0, train_loader=loader))

    class Data:
        test_loader = loader
        classes = ("negative", "positive")

    checkpoint = NNCheckpoint.load(run.id, Checkpoints.LAST)
    ambient = torch.get_rng_state()
    figure = VisUtils.two_dim_tsne_checkpoint_logits(checkpoint, Data, 100)
    assert torch.equal(torch.get_rng_state(), ambient)
    assert [t.name for t in figure.data] == ["negative", "positive"]
    assert len(figure.data[0].x) == int((x[:100, 0] <= 0).sum())
    again = VisUtils.two_dim_tsne_checkpoint_logits(checkpoint, Data, 100)
    assert np.array_equal(figure.data[0].x, again.data[0].x)
    with pytest.raises(ValueError, match="n_samples must be"):
        VisUtils.two_dim_tsne_checkpoint_logits(checkpoint, Data, 2)


def test_a_runtime_checkpoint_needs_its_module_before_any_data_is_read(tmp_path, monkeypatch):
    import torch
    from nnx import Checkpoints, NNCheckpoint, NNModel, NNModelParams, NNTrainParams
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    monkeypatch.chdir(tmp_path)
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=20)
    run = NNModel(module=nn.Linear(3, 2), params=NNModelParams()).train(
        NNTrainParams(n_epochs=1, seed=0, train_loader=loader)
    )
    checkpoint = NNCheckpoint.load(run.id, Checkpoints.LAST)

    class Unread:
        @property
        def test_loader(self):
            raise AssertionError("the data was read")

    with pytest.raises(ValueError, match="pass an instance as module="):
        VisUtils.two_dim_tsne_checkpoint_logits(checkpoint, Unread(), 50)
    module = nn.Linear(3, 2)

    class Data:
        test_loader = loader

    figure = VisUtils.two_dim_tsne_checkpoint_logits(checkpoint, Data, 50, module=module)
    assert sum(len(t.x) for t in figure.data) == 50
    assert module.training
