"""Losses of models without a task, as numerators over denominators."""

from __future__ import annotations

import pytest
import torch
from nnx.tasks.losses import native_input, supervised_terms
from torch import nn
from torch.nn import functional as F


def logits(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_the_native_nll_gets_log_probabilities_and_cross_entropys_gradient():
    raw = logits(6, 3).requires_grad_()
    target = torch.tensor([0, 1, 2, 0, 1, 2])
    loss = supervised_terms(nn.NLLLoss(), None, raw, target).loss
    loss.backward()
    twin = raw.detach().clone().requires_grad_()
    F.cross_entropy(twin, target).backward()
    assert torch.allclose(raw.grad, twin.grad)
    assert loss.item() == pytest.approx(F.cross_entropy(twin, target).item())


class OwnNLL(nn.NLLLoss):
    def forward(self, input, target):
        return input.sum() * 0 + target.sum()


class Renamed(nn.NLLLoss):
    """Inherits torch's forward: still the native loss."""


def test_an_nll_with_its_own_forward_receives_the_raw_output():
    raw = logits(2, 3)
    assert native_input(OwnNLL(), raw) is raw
    assert native_input(nn.CrossEntropyLoss(), raw) is raw
    assert torch.equal(native_input(Renamed(), raw), raw.log_softmax(1))


def test_the_loss_objects_weights_and_ignore_index_stay_in_force():
    weight = torch.tensor([1.0, 3.0, 0.5])
    loss_fn = nn.NLLLoss(weight=weight, ignore_index=2)
    raw, target = logits(5, 3), torch.tensor([0, 1, 2, 1, 0])
    terms = supervised_terms(loss_fn, None, raw, target)
    assert terms.denominator == 1 + 3 + 3 + 1
    assert terms.loss == loss_fn(raw.log_softmax(1), target)


@pytest.mark.parametrize(
    ("loss_fn", "target", "denominator"),
    [
        (nn.CrossEntropyLoss(), torch.tensor([0, -100, 2, 1]), 3),
        (nn.CrossEntropyLoss(), torch.full((4, 3), 1 / 3), 4),
        (nn.CrossEntropyLoss(reduction="sum"), torch.tensor([0, 1, 2, 1]), None),
        (nn.MSELoss(), torch.zeros(4, 3), 12),
        (nn.BCEWithLogitsLoss(), torch.zeros(4, 3), 12),
        (nn.L1Loss(reduction="sum"), torch.zeros(4, 3), None),
    ],
    ids=str,
)
def test_denominators_are_what_torch_divides_by(loss_fn, target, denominator):
    raw = logits(4, 3)
    terms = supervised_terms(loss_fn, None, raw, target)
    assert terms.denominator == denominator
    assert terms.loss == loss_fn(raw, target)
    if denominator:
        summed = type(loss_fn)(reduction="sum")(raw, target)
        assert terms.numerator.item() == pytest.approx(summed.item(), rel=1e-5)


class Rows(nn.Module):
    def forward(self, output, target):
        return (output.argmax(1) != target).float().mean() + output.sum() * 0


def test_a_loss_of_unknown_arithmetic_is_weighted_by_rows():
    terms = supervised_terms(Rows(), None, logits(5, 3), torch.tensor([0, 1, 2, 0, 1]))
    assert terms.denominator == 5


def test_a_fully_ignored_batch_has_a_zero_numerator_instead_of_nan():
    raw = logits(2, 3).requires_grad_()
    terms = supervised_terms(nn.CrossEntropyLoss(), None, raw, torch.tensor([-100, -100]))
    assert torch.isnan(terms.loss)
    assert terms.masked
    terms.numerator.backward()
    assert (raw.grad == 0).all()


def test_an_unreduced_loss_is_refused():
    with pytest.raises(ValueError, match=r"loss of shape .2,.; use reduction='mean' or 'sum'"):
        supervised_terms(
            nn.CrossEntropyLoss(reduction="none"), None, logits(2, 3), torch.tensor([0, 1])
        )


def test_reduced_precision_outputs_are_scored_in_float32():
    raw = logits(4, 3).bfloat16()
    terms = supervised_terms(nn.CrossEntropyLoss(), None, raw, torch.tensor([0, 1, 2, 0]))
    assert terms.output.dtype == terms.loss.dtype == torch.float32


def test_a_continuous_loss_never_broadcasts():
    with pytest.raises(ValueError, match=r"MSELoss would broadcast targets of shape \(4,\)"):
        supervised_terms(nn.MSELoss(), None, logits(4, 1), torch.zeros(4))
