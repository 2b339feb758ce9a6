"""BYOL and DINO: their losses, their targets, and what cannot be trained."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from nnx import NNOptimParams, build_target_encoder
from nnx.objectives import ObjectiveContext
from nnx.paradigms import byol_objective, dino_objective, embedding_metrics
from small_models import X, feed_forward, loader, numbers, self_distilled, training

VIEWS = tuple(X + 0.1 * numbers(seed, 50, 6) for seed in (1, 2, 3))


def term_of(objective, model, batch):
    (term,) = objective(ObjectiveContext(model, batch, 0, 0)).terms
    return term


def test_byol_compares_each_guess_with_the_target_of_the_other_view():
    model, objective = self_distilled("byol")
    with torch.no_grad():  # a target that has fallen behind
        for parameter in objective.target_encoder.parameters():
            parameter.mul_(0.9)
    first, second = VIEWS[0][:7], VIEWS[1][:7]
    term = term_of(objective, model, (first, second))
    wanted = torch.zeros(7)
    for view, other in ((first, second), (second, first)):
        guess = F.normalize(objective.predictor(model.net(view)), dim=1)
        target = F.normalize(objective.target_encoder(other), dim=1)
        wanted = wanted + (guess - target).square().sum(1)
    assert (term.name, term.denominator) == ("byol", 7)
    assert term.value == pytest.approx(float(wanted.mean().detach()), rel=1e-5)


def test_dino_is_the_cross_entropy_of_every_pair_of_different_views():
    model, objective = self_distilled("dino")
    objective.center = numbers(5, 8)
    term = term_of(objective, model, tuple(view[:7] for view in VIEWS))
    wanted, pairs = 0.0, 0
    for i in range(2):
        teacher = ((objective.target_encoder(VIEWS[i][:7]) - objective.center) / 0.04).softmax(1)
        for j in range(3):
            if i != j:
                student = (model.net(VIEWS[j][:7]) / 0.1).softmax(1).log()
                wanted, pairs = wanted - (teacher * student).sum(1).mean(), pairs + 1
    assert (term.name, term.denominator, pairs) == ("dino", 7, 4)
    assert term.value == pytest.approx(float(wanted.detach()) / pairs, rel=1e-5)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_centre_follows_the_target_s_outputs_of_a_committed_window(accumulate):
    model, objective = self_distilled("dino", momentum=0.0)
    optim = NNOptimParams.builder().sgd(max_lr=0.0).accumulate_grad(accumulate).build()
    term_of(objective, model, (VIEWS[0][:3], VIEWS[1][:3]))  # no update follows: it counts nowhere
    params = training(
        epochs=1, optim=optim, train_loader=loader(*VIEWS[:2], batch=25, shuffle=False)
    )
    model.train(params, objective=objective)
    center = torch.zeros(8)
    with torch.no_grad():
        outputs = torch.stack([objective.target_encoder(view) for view in VIEWS[:2]])
    for window in outputs.split(25 * accumulate, dim=1):
        center = 0.9 * center + 0.1 * window.mean((0, 1))
    torch.testing.assert_close(objective.center, center)
    assert objective.updates == 2 // accumulate


@pytest.mark.parametrize("kind", ["byol", "dino"])
def test_training_moves_the_target_and_records_how_the_embeddings_spread(kind):
    model, objective = self_distilled(kind)
    before = [p.clone() for p in objective.target_encoder.parameters()]
    run = model.train(training(*VIEWS[:2]), objective=objective)
    moved = [not torch.equal(a, b) for a, b in zip(before, objective.target_encoder.parameters())]
    assert any(moved)
    assert objective.updates == 12
    assert run.idps[-2].train_edp.metrics["effective_rank"] > 1.0
    assert not any(p.requires_grad for p in objective.target_encoder.parameters())


def test_few_wide_embeddings_have_the_metrics_of_their_covariance():
    """Of fewer rows than dimensions the products of rows are decomposed: the same numbers."""
    wide = numbers(1, 5, 9)
    values = torch.linalg.eigvalsh(torch.cov(wide.T.double())).clamp(min=0)
    shares = values / values.sum()
    rank = float(torch.exp(-torch.special.xlogy(shares, shares).sum()))
    assert embedding_metrics(wide)["effective_rank"] == pytest.approx(rank)


def test_what_cannot_be_distilled_is_refused():
    model, objective = self_distilled("byol")
    batch = (X[:4], X[:4])
    for wrong in ((X[:4],), (X[:4], X[:3]), X[:4]):
        with pytest.raises(ValueError, match="at least 2 views"):
            term_of(self_distilled("dino")[1], model, wrong)
    other = byol_objective(objective.target_encoder, torch.nn.Linear(8, 5))
    with pytest.raises(ValueError, match=r"gives \(4, 5\) for a target of \(4, 8\)"):
        term_of(other, model, batch)
    with pytest.raises(ValueError, match="predictor is no part of model.net"):
        model.train(training(*VIEWS[:2]), objective=other)
    for wrong in ({"student_temperature": 0}, {"center_momentum": 1.0}, {"global_views": 0},
                  {"ema_momentum": -0.1}):  # fmt: skip
        target = build_target_encoder(model.net)
        with pytest.raises(ValueError):
            dino_objective(target, **wrong)
    run = self_distilled("dino")[0].train(training(*VIEWS[:2]), objective=self_distilled("dino")[1])
    resumed = training(*VIEWS[:2], resume_from_run_id=run.id, resume_from_checkpoint="last")
    model = feed_forward(out=8)
    other = dino_objective(build_target_encoder(model.net), teacher_temperature=0.07)
    with pytest.raises(ValueError, match=r"teacher_temperature is 0\.07, but .* 0\.04"):
        model.train(resumed, objective=other)
