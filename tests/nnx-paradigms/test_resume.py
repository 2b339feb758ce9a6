"""Every objective, stopped and resumed, is the uninterrupted training."""

from __future__ import annotations

from pathlib import Path

import nnx
import pytest
import torch
from nnx import Callback, NNOptimParams
from nnx.paradigms import (
    EMA,
    MixingObjective,
    feature_kd_objective,
    mixup_objective,
    moe_objective,
    simclr_objective,
    vicreg_objective,
)
from small_models import X, Y, feed_forward, losses, mixture, numbers, self_distilled, training

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
    "diffusion": ("diffusion", None, (numbers(61, 50, 2), Y)),
}


def start(case, **options):
    """A model and the objective that trains it."""
    build, objective, _ = CASES[case]
    if build == "diffusion":
        nnx.set_seed(options.get("seed", 11))
        model = nnx.NNModel(
            module=nnx.DiffusionMLP(2, [16], 8, n_classes=3),
            params=nnx.NNModelParams(loss=nnx.Losses.MEAN_SQUARED_ERROR),
        )
        schedule = nnx.NoiseSchedulers.COSINE(T=20)
        return model, nnx.diffusion_objective(schedule, seed=4, class_dropout=0.2)
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


class KilledAt(Callback):
    """Ends the process, as far as the training can tell, at a committed update."""

    rank_behaviour = "every"

    def __init__(self, update):
        self.left = update

    def on_train_begin(self, ctx):
        ctx.update_listeners.append(self.count)

    def count(self, ctx):
        self.left -= 1
        if not self.left:
            raise SystemExit("killed")


@pytest.mark.parametrize("case", CASES)
def test_a_training_killed_inside_an_epoch_goes_on_as_if_it_had_not_been(case):
    data = CASES[case][2]
    optim = NNOptimParams.builder().adamw(max_lr=1e-2).build()
    whole, objective = start(case)
    average, rest_average = EMA(0.9), EMA(0.9)
    run = whole.train(
        training(*data, epochs=2, optim=optim, data_id="w"),
        objective=objective, callbacks=[average],
    )  # fmt: skip
    killed, objective = start(case)
    with pytest.raises(SystemExit):
        killed.train(
            training(*data, epochs=2, optim=optim, data_id="k", checkpoint_every=1),
            objective=objective, callbacks=[EMA(0.9), KilledAt(7)],
        )  # fmt: skip
    found = {path.parts[1] for path in Path("runs").glob("*/checkpoints")}
    (source,) = found - {run.id, "best"}
    rest, objective = start(case, seed=5)
    resumed = training(
        *data, epochs=2, optim=optim, resume_from_run_id=source, resume_from_checkpoint="step",
        resume_epochs="planned",
    )  # fmt: skip
    again = rest.train(resumed, objective=objective, callbacks=[rest_average])
    assert losses(again)[-2:] == losses(run)[-2:]
    for name, value in whole.net.state_dict().items():
        assert torch.equal(value, rest.net.state_dict()[name]), name
    pairs = zip(average.averaged.parameters(), rest_average.averaged.parameters())
    assert all(torch.equal(one, other) for one, other in pairs)


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
