"""Every objective, stopped and resumed, is the uninterrupted training."""

from __future__ import annotations

import nnx
import pytest
import torch
from nnx import NNOptimParams
from nnx.paradigms import (
    MixingObjective,
    feature_kd_objective,
    mixup_objective,
    moe_objective,
    simclr_objective,
    vicreg_objective,
)
from small_models import X, Y, feed_forward, losses, mixture, self_distilled, training

TEACHER = {"seed": 99, "dropout": 0.0}
CASES = {
    "kd": (feed_forward, lambda: nnx.kd_objective(feed_forward(**TEACHER)), (X, Y)),
    "feature_kd": (
        feed_forward,
        lambda: feature_kd_objective(
            feed_forward(**TEACHER), auxiliary_layers={"layers.0": "layers.0"}
        ),
        (X, Y),
    ),
    "simclr": (feed_forward, simclr_objective, (X, X + 0.1)),
    "mixup": (feed_forward, lambda: mixup_objective(seed=1), (X, Y)),
    "per element": (
        feed_forward,
        lambda: MixingObjective(mixup_alpha=0.4, per_element=True, label_smoothing=0.1, seed=1),
        (X, Y),
    ),
    "moe": (mixture, moe_objective, (X, Y)),
    "vicreg": (feed_forward, vicreg_objective, (X, X + 0.1)),
    "byol": ("byol", None, (X, X + 0.1)),
    "dino": ("dino", None, (X, X + 0.1)),
}


def start(case, **options):
    """A model and the objective that trains it."""
    build, objective, _ = CASES[case]
    if objective is None:
        return self_distilled(build, dropout=0.2, **options)
    return build(**options), objective()


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_training_is_the_uninterrupted_one(case):
    data = CASES[case][2]
    optim = NNOptimParams.builder().adamw(max_lr=1e-2).accumulate_grad(3).build()
    whole, objective = start(case)
    run = whole.train(training(*data, epochs=4, optim=optim, data_id="whole"), objective=objective)
    half, objective = start(case)
    started = half.train(
        training(*data, epochs=2, optim=optim, data_id="half"), objective=objective
    )
    rest, objective = start(case, seed=5)
    resumed = training(
        *data, epochs=2, optim=optim, resume_from_run_id=started.id, resume_from_checkpoint="last"
    )
    again = rest.train(resumed, objective=objective)
    assert losses(run)[8:] == losses(again)[-8:]
    for name, value in whole.net.state_dict().items():
        assert torch.equal(value, rest.net.state_dict()[name]), name


def test_a_resume_with_other_settings_is_refused():
    run = feed_forward().train(training(), objective=mixup_objective(alpha=0.4, seed=1))
    resumed = training(resume_from_run_id=run.id, resume_from_checkpoint="last")
    with pytest.raises(ValueError, match=r"mixup_alpha is 0\.2, but .* 0\.4"):
        feed_forward().train(resumed, objective=mixup_objective(alpha=0.2, seed=1))


def test_draws_leave_the_global_streams_alone():
    model = feed_forward(dropout=0.0)
    objective = mixup_objective(seed=1)
    from nnx.objectives import ObjectiveContext

    state = torch.get_rng_state()
    objective(ObjectiveContext(model, (X, Y), 0, 0))
    assert torch.equal(state, torch.get_rng_state())


def test_uneven_windows_are_the_full_batch():
    """Three microbatches accumulated are one batch, for what is a mean over rows."""
    trained = []
    for batch, accumulate in ((50, 1), (20, 3)):
        model = feed_forward(dropout=0.0)
        optim = NNOptimParams.builder().sgd(max_lr=0.1).accumulate_grad(accumulate).build()
        params = training(
            epochs=1, optim=optim, data_id=str(batch),
            train_loader=torch.utils.data.DataLoader(
                torch.utils.data.TensorDataset(X, Y), batch_size=batch
            ),
        )  # fmt: skip
        teacher = feed_forward(**TEACHER)
        objective = feature_kd_objective(teacher, auxiliary_layers={"layers.0": "layers.0"})
        model.train(params, objective=objective)
        trained.append(model.net.state_dict())
    for name, value in trained[0].items():
        torch.testing.assert_close(value, trained[1][name])
