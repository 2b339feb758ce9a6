"""VICReg and the signs of collapse."""

from __future__ import annotations

import pytest
import torch
from nnx.objectives import ObjectiveContext, build_objective
from nnx.paradigms import embedding_metrics, vicreg_objective
from small_models import X, feed_forward, losses, numbers, training


def test_the_loss_is_the_paper_s():
    model = feed_forward(out=4, dropout=0.0)
    views = (X[:9], X[:9] + 0.1 * numbers(2, 9, 6))
    (term,) = vicreg_objective()(ObjectiveContext(model, views, 0, 0)).terms
    a, b = (model.net(v).detach() for v in views)
    hinge = sum(torch.relu(1 - torch.sqrt(z.var(0) + 1e-4)).mean() / 2 for z in (a, b))
    off = 0.0
    for z in (a, b):
        c = torch.cov(z.T)
        off += (c - torch.diag(c.diag())).square().sum() / 4
    wanted = 25 * (a - b).square().mean() + 25 * hinge + off
    assert term.value == pytest.approx(float(wanted), rel=1e-5)
    assert term.denominator == 9


def test_collapse_is_seen():
    line = torch.linspace(0, 1, 20)[:, None] * torch.ones(1, 5)
    assert embedding_metrics(line)["effective_rank"] == pytest.approx(1.0, abs=1e-6)
    even = torch.cat((torch.eye(5), -torch.eye(5)))
    found = embedding_metrics(even)
    assert found["effective_rank"] == pytest.approx(5.0)
    assert found["deviation_min"] == pytest.approx((2 / 10) ** 0.5)
    assert embedding_metrics(torch.ones(8, 3)) == {
        "effective_rank": 0.0, "deviation_mean": 0.0, "deviation_min": 0.0,
    }  # fmt: skip


def test_training_spreads_the_embeddings():
    model = feed_forward(out=4, dropout=0.0)
    run = model.train(training(X, X + 0.1, epochs=10), objective=vicreg_objective())
    first, last = run.idps[0].train_edp.metrics, run.idps[-2].train_edp.metrics
    assert losses(run)[-2] < losses(run)[0]
    assert last["deviation_mean"] > first["deviation_mean"]
    assert build_objective("paradigms.vicreg", config={"variance": 3}).variance == 3.0
    with pytest.raises(ValueError):
        vicreg_objective(variance=-1)
    with pytest.raises(ValueError, match="at least 2 embeddings"):
        vicreg_objective()(ObjectiveContext(model, (X[:1], X[:1]), 0, 0))
