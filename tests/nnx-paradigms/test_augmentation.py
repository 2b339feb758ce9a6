"""Mixup and CutMix."""

from __future__ import annotations

import nnx
import pytest
import torch
import torch.nn.functional as F
from nnx.objectives import ObjectiveContext
from nnx.paradigms import MixingObjective, augmentation, cutmix_objective, mixup_objective
from nnx.paradigms.augmentation import Draws, cut_boxes
from small_models import X, Y, feed_forward, numbers, training


class Told(Draws):
    """λ, partners, centres and the choice as the test says."""

    def __init__(self, lam, partner, centres=(), choice=0.0):
        self.lam, self.partner, self.choice = lam, partner, choice
        self.centres = list(centres)

    def beta(self, alpha, count):
        return torch.as_tensor(self.lam, dtype=torch.float64).expand(count)

    def permutation(self, count):
        return torch.tensor(self.partner)

    def integers(self, high, count):
        return torch.tensor(self.centres.pop(0)).expand(count)

    def uniform(self):
        return self.choice


def compute(objective, draws, batch, model, monkeypatch):
    monkeypatch.setattr(objective, "_draws", lambda generator: draws)
    return objective(ObjectiveContext(model, batch, 0, 0))


def test_mixup_is_the_weighted_loss_of_blended_inputs_also_of_an_odd_batch(monkeypatch):
    model = feed_forward(dropout=0.0)
    x, y, partner = X[:5], Y[:5], [3, 1, 4, 0, 2]
    result = compute(mixup_objective(), Told(0.7, partner), (x, y), model, monkeypatch)
    output = model.net(0.7 * x + 0.3 * x[partner])
    wanted = 0.7 * F.cross_entropy(output, y) + 0.3 * F.cross_entropy(output, y[partner])
    assert result.loss() == pytest.approx(float(wanted.detach()), rel=1e-6)
    right = output.argmax(1)
    accuracy = 0.7 * (right == y).float().mean() + 0.3 * (right == y[partner]).float().mean()
    assert result.record.accuracy == pytest.approx(float(accuracy))
    assert result.record.accuracy + result.record.error == 1.0


def images():
    return numbers(4, 4, 3, 8, 8), torch.tensor([0, 1, 2, 0])


def image_model():
    params = nnx.NNParams(input_dim=192, output_dim=3, hidden_dims=[4], dropout_prob=0.0)
    return nnx.NNModel(
        net_params=params,
        params=nnx.NNModelParams(net=nnx.Nets.FEED_FWD, loss=nnx.Losses.CROSS_ENTROPY),
    )


def test_cutmix_pastes_the_box_and_weighs_by_the_area_after_clipping(monkeypatch):
    model, (x, y), partner = image_model(), images(), [1, 0, 3, 2]
    kept = x.clone()
    told = Told(0.75, partner, centres=[0, 7])  # a 4 by 4 box around the upper right corner
    result = compute(cutmix_objective(), told, (x, y), model, monkeypatch)
    assert torch.equal(x, kept)
    mixed = x.clone()
    mixed[:, :, 0:2, 5:8] = x[partner][:, :, 0:2, 5:8]
    lam = 1 - 2 * 3 / 64
    output = model.net(mixed)
    wanted = lam * F.cross_entropy(output, y) + (1 - lam) * F.cross_entropy(output, y[partner])
    assert result.loss() == pytest.approx(float(wanted.detach()), rel=1e-6)


def test_boxes_are_inside_and_lambda_is_what_they_leave():
    lam = torch.linspace(0, 1, 101, dtype=torch.float64)
    boxes, left = cut_boxes(lam, 9, 7, Draws(torch.Generator().manual_seed(1)))
    top, bottom, start, stop = boxes.T
    assert bool(
        (top >= 0).all() and (bottom <= 9).all() and (start >= 0).all() and (stop <= 7).all()
    )
    assert torch.equal(left, 1 - ((bottom - top) * (stop - start)).double() / 63)
    assert float(left[-1]) == 1.0


def test_each_sample_may_have_a_lambda_of_its_own_and_smooth_labels(monkeypatch):
    model = feed_forward(dropout=0.0)
    x, y, partner = X[:4], Y[:4], [2, 3, 0, 1]
    lam = torch.tensor([0.9, 0.2, 0.5, 1.0])
    objective = MixingObjective(mixup_alpha=1.0, per_element=True, label_smoothing=0.1)
    result = compute(objective, Told(lam, partner), (x, y), model, monkeypatch)
    share = lam[:, None]
    output = model.net(share * x + (1 - share) * x[partner])
    soft = share * F.one_hot(y, 3) + (1 - share) * F.one_hot(y[partner], 3)
    wanted = F.cross_entropy(output, soft * 0.9 + 0.1 / 3)
    assert result.loss() == pytest.approx(float(wanted.detach()), rel=1e-5)


@pytest.mark.parametrize(("choice", "cuts"), [(0.4, True), (0.6, False)])
def test_a_batch_is_cut_or_blended(choice, cuts, monkeypatch):
    model, (x, y) = image_model(), images()
    seen = []
    monkeypatch.setattr(augmentation, "_paste", lambda x, p, boxes: seen.append(boxes) or x)
    objective = MixingObjective(mixup_alpha=1.0, cutmix_alpha=1.0, switch=0.5)
    compute(objective, Told(0.5, [1, 0, 3, 2], [3, 3], choice), (x, y), model, monkeypatch)
    assert bool(seen) is cuts


def test_lambda_follows_its_beta_distribution_and_the_generator_alone():
    state = torch.get_rng_state()
    draws = Draws(torch.Generator().manual_seed(0)).beta(0.4, 20000)
    assert torch.equal(state, torch.get_rng_state())
    assert float(draws.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(draws.var()) == pytest.approx(1 / (4 * (2 * 0.4 + 1)), abs=0.005)
    assert bool(((draws >= 0) & (draws <= 1)).all())
    assert bool(Draws(torch.Generator().manual_seed(0)).beta(1e-4, 1000).isfinite().all())


def test_what_cannot_be_mixed_is_refused():
    for make in (
        lambda: nnx.mixup_train_step_factory(alpha=0),
        lambda: nnx.cutmix_train_step_factory(alpha=-1.0),
        lambda: MixingObjective(),
        lambda: MixingObjective(mixup_alpha=1.0, label_smoothing=1.0),
    ):
        with pytest.raises(ValueError):
            make()
    with pytest.raises(ValueError, match=r"images \(B, C, H, W\), but the input is \(16, 6\)"):
        feed_forward().train(training(), train_step_fn=nnx.cutmix_train_step_factory())
    for step in (nnx.mixup_train_step_factory(), nnx.cutmix_train_step_factory()):
        with pytest.raises(ValueError, match="steps the optimizer itself"):
            feed_forward().train(training(), objective=step)
