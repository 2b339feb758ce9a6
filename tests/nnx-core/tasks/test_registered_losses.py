"""Losses by id: what each computes, what torch's own become, what is refused."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from nnx import (
    Losses,
    LossSpec,
    MissingLossError,
    NNCheckpoint,
    NNModel,
    NNModelParams,
    NNOptimParams,
    NNParams,
    NNRun,
    NNTrainParams,
    TaskSpec,
    register_loss,
    registered_losses,
    unregister_loss,
)
from nnx import (
    LossSpec as Spec,
)
from nnx.tasks import TaskValidationError
from torch import nn
from torch.nn import functional as F

LOGITS = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
CLASSES = torch.tensor([0, 1, 2, 2, 1, 0])
VALUES = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
BITS = (VALUES > 0).float()
WEIGHT = torch.tensor([0.1, 2.0, 0.7])


def params(loss, **more):
    return NNModelParams(loss=loss, **more)


@pytest.mark.parametrize(
    ("spec", "stock", "target"),
    [
        (Spec("cross_entropy", config={"weight": [0.1, 2.0, 0.7], "label_smoothing": 0.1, "ignore_index": 1}),
         nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1, ignore_index=1), CLASSES),
        (Spec("cross_entropy", config={"reduction": "sum"}), nn.CrossEntropyLoss(reduction="sum"), CLASSES),
        (Spec("binary_cross_entropy", config={"pos_weight": [0.1, 2.0, 0.7]}),
         nn.BCEWithLogitsLoss(pos_weight=WEIGHT), BITS),
        (Spec("binary_cross_entropy", config={"pos_weight": 3.0}),
         nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0)), BITS),
        (Spec("huber", config={"delta": 0.3}), nn.HuberLoss(delta=0.3), VALUES),
        (Spec("smooth_l1", config={"beta": 0.3}), nn.SmoothL1Loss(beta=0.3), VALUES),
        (Spec("l1"), nn.L1Loss(), VALUES),
        (Spec("poisson", config={"full": True}), nn.PoissonNLLLoss(full=True), VALUES.exp().round()),
    ],
)  # fmt: skip
def test_a_stock_loss_becomes_its_spec_and_computes_the_same(spec, stock, target):
    told, given = params(spec), params(stock)
    assert told == given
    assert told.state() == given.state()
    assert NNModelParams.from_state(told.state()).loss == spec
    assert torch.equal(spec()(LOGITS, target), stock(LOGITS, target))


def test_a_loss_without_settings_is_the_member():
    for given in (nn.CrossEntropyLoss(), LossSpec("cross_entropy"), "cross_entropy"):
        assert params(given).loss is Losses.CROSS_ENTROPY
    assert params(nn.MSELoss()).state() == params(Losses.MEAN_SQUARED_ERROR).state()


def test_focal_is_the_formula_of_its_paper():
    p = LOGITS.softmax(1)[torch.arange(6), CLASSES]
    expected = -(WEIGHT[CLASSES] * (1 - p) ** 1.5 * p.log()).mean()
    spec = LossSpec("focal", config={"gamma": 1.5, "weight": [0.1, 2.0, 0.7]})
    torch.testing.assert_close(spec()(LOGITS, CLASSES), expected)
    plain = LossSpec("focal", config={"gamma": 0})
    torch.testing.assert_close(plain()(LOGITS, CLASSES), F.cross_entropy(LOGITS, CLASSES))


def test_gaussian_nll_reads_means_and_log_variances():
    output = torch.cat([LOGITS, VALUES], dim=1)
    expected = (VALUES / 2 + (BITS - LOGITS) ** 2 / (2 * VALUES.exp())).mean()
    torch.testing.assert_close(LossSpec("gaussian_nll")()(output, BITS), expected)
    full = LossSpec("gaussian_nll", config={"full": True})
    torch.testing.assert_close(full()(output, BITS), expected + math.log(2 * math.pi) / 2)
    with pytest.raises(ValueError, match=r"gaussian_nll needs outputs \(..., 2D\)"):
        full()(LOGITS, BITS)


def test_ctc_reads_padded_targets():
    output = torch.randn(2, 7, 4, generator=torch.Generator().manual_seed(2))
    target = torch.tensor([[1, 2, 3], [2, 2, -1]])
    expected = F.ctc_loss(
        output.log_softmax(-1).transpose(0, 1), torch.tensor([1, 2, 3, 2, 2]),
        torch.tensor([7, 7]), torch.tensor([3, 2]),
    )  # fmt: skip
    torch.testing.assert_close(LossSpec("ctc")()(output, target), expected)


def test_triplet_reads_three_embeddings():
    output = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(3))
    expected = F.triplet_margin_loss(*output.unbind(1), margin=0.5, swap=True)
    spec = params(nn.TripletMarginLoss(margin=0.5, swap=True)).loss
    assert spec == LossSpec("triplet", config={"margin": 0.5, "swap": True})
    torch.testing.assert_close(spec()(output, torch.zeros(5)), expected)


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        (Spec("cross_entropy", config={"wieght": [1.0]}), ValueError, "no key 'wieght'; did you mean 'weight'"),
        (Spec("cross_entropy", config={"label_smoothing": 2}), ValueError, "label_smoothing must be .* <= 1, not 2"),
        (Spec("cross_entropy", config={"weight": [0.0, 0.0]}), ValueError, "one of them above 0"),
        (Spec("focal", config={"gamma": -1}), ValueError, "gamma must be"),
        (Spec("huber", config={"delta": 0}), ValueError, "delta must be"),
        (Spec("huber", config={"reduction": "none"}), ValueError, "reduction must be one of mean, sum"),
        (Spec("hubert"), MissingLossError, "no loss is registered as hubert@v1; did you mean 'huber'"),
        (Spec("huber", 9), MissingLossError, "registered versions of 'huber': 1"),
    ],
)  # fmt: skip
def test_what_a_loss_does_not_take_is_refused_where_the_model_is_made(spec, error, message):
    with pytest.raises(error, match=message):
        NNModel(params=params(spec), module=nn.Linear(2, 3))


def test_weights_must_fit_the_classes_and_the_task():
    shape = NNParams(input_dim=2, output_dim=3, hidden_dims=[], dropout_prob=0.0)
    two = LossSpec("cross_entropy", config={"weight": [1.0, 2.0]})
    with pytest.raises(ValueError, match="has 2 weights and the net output_dim=3"):
        NNModel(shape, params(two, net="feed_fwd"))
    with pytest.raises(TaskValidationError, match="HuberLoss cannot score a categorical task"):
        NNModel(params=params("huber", task=TaskSpec.categorical(3)), module=nn.Linear(2, 3))


def test_a_loss_of_ones_own_is_registered_and_named():
    register_loss("tests.scaled", 1, lambda config: Scaled(config["by"]))
    try:
        assert ("tests.scaled", 1) in registered_losses()
        model = NNModel(
            params=params(LossSpec("tests.scaled", config={"by": 3})), module=nn.Linear(2, 3)
        )
        assert torch.equal(model.loss_fn(LOGITS, VALUES), 3 * F.mse_loss(LOGITS, VALUES))
        register_loss("tests.scaled", 1, lambda config: nn.Linear(1, 1), replace=True)
        with pytest.raises(
            ValueError, match="parameters of its own, which no optimizer would train"
        ):
            NNModel(params=params("tests.scaled"), module=nn.Linear(2, 3))
        register_loss("tests.scaled", 1, lambda config: F.mse_loss, replace=True)
        with pytest.raises(TypeError, match="must be an nn.Module, not function"):
            NNModel(params=params("tests.scaled"), module=nn.Linear(2, 3))
    finally:
        assert unregister_loss("tests.scaled", 1)
    with pytest.raises(TypeError, match="a loss of your own is registered"):
        params(Scaled(2))


class Scaled(nn.Module):
    def __init__(self, by):
        super().__init__()
        self.by = by

    def forward(self, output, target):
        return self.by * F.mse_loss(output, target)


def test_a_run_keeps_its_class_weights_and_resumes_exactly(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loss = nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1)
    shape = NNParams(input_dim=3, output_dim=3, hidden_dims=[4], dropout_prob=0.0)
    batches = [(LOGITS[i : i + 4], CLASSES[i : i + 4]) for i in (0, 4)]

    def train(n_epochs, loss=loss, **more):
        torch.manual_seed(0)
        model = NNModel(shape, params(loss, net="feed_fwd"))
        training = NNTrainParams(
            n_epochs=n_epochs, train_loader=batches, val_loader=batches, scheduler=None,
            optim=NNOptimParams(name="sgd", max_lr=0.5, weight_decay=0, momentum=0.9), **more,
        )  # fmt: skip
        return model, model.train(training)

    whole, run = train(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # BEST goes on: both were chosen by one measure
        _, first = train(2)
        rest, _ = train(1, resume_from_run_id=first.id)
    for one, other in zip(whole.net.parameters(), rest.net.parameters()):
        assert torch.equal(one, other)
    assert train(3, loss="cross_entropy")[1].id != run.id

    # A plain loop, and the mean over the class weights that torch divides by.
    torch.manual_seed(0)
    plain = NNModel(shape, NNModelParams(net="feed_fwd")).net
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.9)
    for _ in range(3):
        for x, y in batches:
            optimizer.zero_grad()
            loss(plain(x), y).backward()
            optimizer.step()
    for one, other in zip(whole.net.parameters(), plain.parameters()):
        torch.testing.assert_close(one, other)

    found = NNRun.load(run.id)
    assert found.model.loss == LossSpec(
        "cross_entropy", config={"weight": [0.1, 2.0, 0.7], "label_smoothing": 0.1}
    )
    assert found.id == run.id
    back = NNModel.from_checkpoint(NNCheckpoint.load(run.id, "last"))
    assert torch.equal(back.loss_fn.weight, WEIGHT)
    with torch.no_grad():
        torch.testing.assert_close(
            back.evaluate(batches).loss, float(loss(plain(LOGITS), CLASSES)), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("loss", ["gaussian_nll", "poisson", "huber"])
def test_a_regression_of_each_kind_trains(loss, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    x = torch.randn(12, 2)
    model = NNModel(params=params(loss), module=nn.Linear(2, 2 if loss == "gaussian_nll" else 1))
    batches = [(x, x.sum(1, keepdim=True).abs().round())]
    run = model.train(NNTrainParams(n_epochs=4, train_loader=batches, val_loader=batches))
    losses = [record.train_edp.loss for record in run.idps]
    assert losses[-1] < losses[0]
    assert run.idps[-1].val_edp.accuracy is None
