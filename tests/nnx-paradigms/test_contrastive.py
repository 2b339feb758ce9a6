"""NT-Xent, in blocks and whole, and SimCLR."""

from __future__ import annotations

import nnx
import pytest
import torch
import torch.nn.functional as F
from nnx.objectives import ObjectiveContext
from nnx.paradigms import nt_xent, simclr_objective
from nnx.paradigms.nt_xent import nt_xent_sum
from small_models import X, feed_forward, loader, losses, numbers, training


def written_out(first, second, temperature):
    """The formula, one pair at a time."""
    z = torch.cat((first, second))
    n, total = len(first), 0.0
    for i in range(2 * n):
        scores = [F.cosine_similarity(z[i], z[k], dim=0) / temperature for k in range(2 * n)]
        others = torch.stack([s for k, s in enumerate(scores) if k != i])
        total = total - scores[(i + n) % (2 * n)] + others.logsumexp(0)
    return total / (2 * n)


@pytest.mark.parametrize("block", [1, 3, 100])
def test_the_blocks_are_the_formula_and_so_are_their_gradients(block, monkeypatch):
    monkeypatch.setattr(nt_xent, "BLOCK", block)
    first, second = numbers(1, 5, 4).double().requires_grad_(), numbers(2, 5, 4).double()
    whole = written_out(first, second, 0.3)
    (wanted,) = torch.autograd.grad(whole, first)
    loss = nt_xent_sum(torch.cat((first, second)), 5, temperature=0.3) / 10
    (found,) = torch.autograd.grad(loss, first)
    assert float(loss) == pytest.approx(float(whole))
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(nnx.nt_xent_loss(first, second, temperature=0.3), whole)


def test_a_large_batch_is_compared_in_blocks_with_the_same_loss():
    first, second = numbers(1, 1100, 8), numbers(2, 1100, 8)
    from nnx.objectives.contrastive import nt_xent as formula

    torch.testing.assert_close(nnx.nt_xent_loss(first, second), formula(first, second))


def test_a_batch_of_one_and_other_wrong_views_are_refused():
    one = numbers(1, 1, 4)
    with pytest.raises(ValueError, match="nothing to tell it from"):
        nnx.nt_xent_loss(one, one)
    with pytest.raises(ValueError, match="nothing to tell it from"):
        nt_xent_sum(torch.cat((one, one)), 1, temperature=0.5)
    with pytest.raises(ValueError):
        nnx.nt_xent_loss(numbers(1, 4, 4), numbers(1, 4, 3))
    for temperature in (0, -1, float("nan")):
        with pytest.raises(ValueError):
            nnx.simclr_train_step_factory(temperature=temperature)
    with pytest.raises(ValueError, match="is no pair of views"):
        feed_forward().train(
            training(X, torch.zeros(50, dtype=torch.long)),
            train_step_fn=nnx.simclr_train_step_factory(),
        )


def test_labels_beside_the_views_are_left_alone():
    model, params = feed_forward(out=8), training(X, X + 1, epochs=1)
    plain = model.train(params, objective=simclr_objective())

    class WithLabels:
        def __init__(self, inner):
            self.inner = inner

        def __len__(self):
            return len(self.inner)

        def __iter__(self):
            return (((a, b), torch.zeros(len(a))) for a, b in self.inner)

    labelled = feed_forward(out=8)
    params = training(epochs=1, train_loader=WithLabels(loader(X, X + 1)), data_id="labels")
    run = labelled.train(params, objective=simclr_objective())
    assert losses(run) == losses(plain)


def test_pieces_of_a_batch_have_the_gradients_of_the_whole_batch():
    views = (X[:20], X[:20] + 0.1 * numbers(3, 20, 6))
    gradients = []
    for microbatch in (None, 6):
        model = feed_forward(out=8, dropout=0.0)
        objective = simclr_objective(temperature=0.3, microbatch=microbatch)
        (term,) = objective(ObjectiveContext(model, views, 0, 0)).terms
        term.numerator.backward()
        gradients.append([p.grad for p in model.net.parameters()])
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other)


def test_pieces_are_refused_where_each_would_have_statistics_of_its_own():
    net = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4))
    model = nnx.NNModel(
        module=net, params=nnx.NNModelParams(loss=nnx.Losses.CROSS_ENTROPY),
        batch_adapter=nnx.PositionalInputs(1),
    )  # fmt: skip
    with pytest.raises(ValueError, match="'1' normalizes by batch statistics"):
        model.train(training(X, X + 1), objective=simclr_objective(microbatch=4))
