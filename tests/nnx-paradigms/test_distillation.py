"""Distilling outputs and layers, and generations of one network."""

from __future__ import annotations

import math

import nnx
import pytest
import torch
from nnx import Losses, NNCheckpoint, kd_objective
from nnx.paradigms import FeatureKDObjective, feature_kd_objective
from nnx.provenance import ExperimentManifest
from nnx.store import NNRun
from nnx.utils.weights import fingerprint_of
from small_models import X, Y, feed_forward, losses, training, weights


def logit_model(rows: list[list[float]]):
    """A model whose outputs are these rows, by the row's number."""
    model = feed_forward(dropout=0.0)
    table = torch.tensor(rows)

    class Table(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(table)

        def forward(self, x):
            return self.table[x[:, 0].long()]

    return nnx.NNModel(module=Table(), params=nnx.NNModelParams(loss=Losses.CROSS_ENTROPY)), model


def test_the_divergence_is_that_of_a_hand_calculation():
    """Averaged over rows, not over rows times classes, and times the squared temperature."""
    teacher, _ = logit_model([[0.0, math.log(3.0)], [0.0, 0.0]])
    student, _ = logit_model([[0.0, 0.0], [0.0, 0.0]])
    batch = (torch.tensor([[0.0], [1.0]]), torch.tensor([0, 1]))
    objective = kd_objective(teacher, alpha=1.0, temperature=1.0)
    from nnx.objectives import ObjectiveContext

    result = objective(ObjectiveContext(student, batch, 0, 0))
    by_hand = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    assert result.loss() == pytest.approx(by_hand / 2)
    softened = kd_objective(teacher, alpha=1.0, temperature=2.0)
    p = torch.tensor([0.0, math.log(3.0) / 2]).softmax(0)
    by_hand = 4 * float((p * (p / 0.5).log()).sum()) / 2
    assert softened(ObjectiveContext(student, batch, 0, 0)).loss() == pytest.approx(by_hand)


def test_a_step_and_the_objective_train_alike():
    one, other = feed_forward(), feed_forward()
    teacher = feed_forward(seed=99, dropout=0.0)
    step = nnx.kd_train_step_factory(teacher, alpha=0.3, temperature=2.0)
    first = one.train(training(), train_step_fn=step)
    objective = kd_objective(teacher, alpha=0.3, temperature=2.0)
    second = other.train(training(), objective=objective, salt="objective")
    assert losses(first) == pytest.approx(losses(second), rel=1e-6)


@pytest.mark.parametrize("loss", [Losses.CROSS_ENTROPY, Losses.NEGATIVE_LOG_LIKELIHOOD])
def test_nll_students_train_as_those_of_cross_entropy(loss):
    teacher = feed_forward(seed=99, dropout=0.0)
    student = feed_forward(dropout=0.0)
    student.loss_fn = loss()
    run = student.train(training(epochs=1), train_step_fn=nnx.kd_train_step_factory(teacher))
    assert losses(run)[0] == pytest.approx(0.61, abs=0.2)
    twin = feed_forward(dropout=0.0)
    again = twin.train(
        training(epochs=1), train_step_fn=nnx.kd_train_step_factory(teacher), salt="twin"
    )
    assert losses(run) == pytest.approx(losses(again), rel=1e-6)


def test_the_teacher_is_frozen_and_never_moves():
    teacher = feed_forward(seed=99)
    before = weights(teacher)
    feed_forward().train(
        training(),
        objective=feature_kd_objective(teacher, auxiliary_layers={"layers.0": "layers.0"}),
    )
    assert not any(p.requires_grad for p in teacher.net.parameters())
    assert not teacher.net.training
    assert all(torch.equal(before[n], v) for n, v in teacher.net.state_dict().items())
    assert not any(m._forward_hooks for m in teacher.net.modules())


def test_matching_layers_is_the_mean_squared_difference_of_their_outputs():
    from nnx.objectives import ObjectiveContext

    teacher, student = feed_forward(seed=99, dropout=0.0), feed_forward(dropout=0.0)
    pairs = {"layers.0": "layers.0", "layers.1": "layers.1"}
    objective = FeatureKDObjective(teacher, auxiliary_layers=pairs, alpha=0.0, beta=0.7)
    terms = {t.name: t for t in objective(ObjectiveContext(student, (X, Y), 0, 0)).terms}
    seen = {}
    for name, model in (("t", teacher), ("s", student)):
        first = model.net.layers[0](X)
        seen[name] = (first, model.net.layers[1](first.relu()))
    wanted = sum(torch.nn.functional.mse_loss(a, b) for a, b in zip(seen["t"], seen["s"])) / 2
    assert terms["features"].value == pytest.approx(float(wanted.detach()))
    assert terms["features"].weight == 0.7


def test_what_cannot_be_distilled_is_refused_and_the_teacher_is_left_alone():
    teacher = feed_forward(seed=99)
    for make in (
        lambda: nnx.kd_train_step_factory(teacher, alpha=1.5),
        lambda: nnx.kd_train_step_factory(teacher, temperature=0),
        lambda: nnx.feature_kd_train_step_factory(teacher, auxiliary_layers={}),
        lambda: nnx.feature_kd_train_step_factory(teacher, auxiliary_layers={"a": "b"}, beta=-1),
        lambda: nnx.feature_kd_train_step_factory(teacher, auxiliary_layers={"layer.0": "x"}),
    ):
        with pytest.raises(ValueError):
            make()
    assert all(p.requires_grad for p in teacher.net.parameters())
    with pytest.raises(ValueError, match="no layer 'layers.9'"):
        feed_forward().train(
            training(),
            objective=feature_kd_objective(teacher, auxiliary_layers={"layers.0": "layers.9"}),
        )
    wide = feed_forward(seed=99, hidden=(12, 8))
    step = nnx.feature_kd_train_step_factory(wide, auxiliary_layers={"layers.0": "layers.0"})
    with pytest.raises(ValueError, match="a pair must have one shape"):
        feed_forward().train(training(), train_step_fn=step)
    itself = feed_forward()
    with pytest.raises(ValueError, match="shares parameters with its teacher"):
        itself.train(training(), train_step_fn=nnx.kd_train_step_factory(itself))


def test_generations_are_one_lineage_and_each_is_taught_by_the_last():
    model = feed_forward(dropout=0.0)
    runs = nnx.born_again_train(model, generations=3, train_params=training(), alpha=0.5)
    assert len({run.id for run in runs}) == 3
    parents = [NNRun.load(run.id).train.parent_run_id for run in runs]
    assert parents == [None, runs[0].id, runs[1].id]

    by_hand = feed_forward(dropout=0.0)
    by_hand.train(training(), salt="hand")
    teacher = feed_forward(dropout=0.0)
    teacher.net.load_state_dict(by_hand.net.state_dict())
    step = nnx.kd_train_step_factory(teacher, alpha=0.5)
    second = by_hand.train(training(), train_step_fn=step, salt="hand 2")
    assert losses(runs[1]) == pytest.approx(losses(second), rel=1e-6)


def test_one_generation_is_a_plain_training_and_wrong_arguments_are_refused_first():
    runs = nnx.born_again_train(feed_forward(), generations=1, train_params=training(epochs=1))
    assert len(runs) == 1
    for kwargs, error in (
        ({"generations": 0}, ValueError),
        ({"alpha": 2.0}, ValueError),
        ({"beta": 0.1}, TypeError),
    ):
        model = feed_forward()
        before = weights(model)
        with pytest.raises(error):
            nnx.born_again_train(model, train_params=training(epochs=1, data_id="x"), **kwargs)
        assert all(torch.equal(before[n], v) for n, v in model.net.state_dict().items())


def test_the_teacher_s_identity_is_in_checkpoints_and_in_provenance():
    teacher = feed_forward(seed=99, dropout=0.0)
    objective = feature_kd_objective(
        teacher, auxiliary_layers={"layers.0": "layers.0"}, teacher_run="a" * 32,
        teacher_checkpoint="best",
    )  # fmt: skip
    identity = objective.identity()
    assert identity["teacher"] == {
        "weights": fingerprint_of(teacher.net.state_dict()), "run": "a" * 32, "checkpoint": "best",
    }  # fmt: skip
    model = feed_forward()
    manifest = ExperimentManifest.for_model(model, objective=identity)
    run = model.train(training(), objective=objective, provenance=manifest)
    assert NNRun.load(run.id).provenance.manifest.objective == identity
    saved = NNCheckpoint.load_training_state(run.id, "last")["components"]["kd.objective"]["state"]
    assert saved == identity


def test_a_resume_with_another_teacher_is_refused():
    run = feed_forward().train(training(), objective=kd_objective(feed_forward(seed=99)))
    resumed = training(resume_from_run_id=run.id, resume_from_checkpoint="last")
    with pytest.raises(ValueError, match="teacher's weights are sha256:.*trained by a teacher of"):
        feed_forward().train(resumed, objective=kd_objective(feed_forward(seed=98)))
    feed_forward().train(resumed, objective=kd_objective(feed_forward(seed=99)))


def test_every_generation_s_provenance_names_its_teacher():
    model = feed_forward(dropout=0.0)
    manifest = ExperimentManifest.for_model(model, config={"study": 1})
    teachers = []
    train = model.train

    def look(**arguments):
        teachers.append(fingerprint_of(model.net.state_dict()))
        return train(**arguments)

    model.train = look
    runs = nnx.born_again_train(
        model, generations=3, train_params=training(epochs=1), provenance=manifest, alpha=0.25
    )
    found = [NNRun.load(run.id).provenance.manifest.objective for run in runs]
    assert found[0] is None
    for i in (1, 2):
        assert found[i]["alpha"] == 0.25
        assert found[i]["teacher"] == {
            "weights": teachers[i], "run": runs[i - 1].id, "checkpoint": "last",
        }  # fmt: skip
