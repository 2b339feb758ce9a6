"""Learning from a teacher's stored distributions."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from nnx.objectives import ObjectiveContext
from nnx.paradigms.offline_distillation import (
    OfflineDistillationObjective,
    TeacherBatch,
    TeacherDataset,
    TeacherRecord,
    TeacherRecordError,
    evaluate_offline,
    read_teacher_records,
    write_teacher_records,
)
from small_models import X, feed_forward, training

CLASSES = ("cat", "dog", "fox")
RIGHTS = {"source": "a test", "training_rights": "ours"}


def record(i=0, **changes) -> TeacherRecord:
    values = {
        "sample_id": f"s{i}", "question_id": "q", "candidates": ("fox", "cat", "dog"),
        "probabilities": (0.5, 0.3, 0.2), "teacher": "t", "revision": "1", "schema_digest": "d",
        "semantics": "predictive", "provenance": RIGHTS, "label": "cat",
    }  # fmt: skip
    return TeacherRecord(**{**values, **changes})


def dataset(n=20, **changes) -> TeacherDataset:
    rows = [record(i, **changes) for i in range(n)]
    inputs = {f"s{i}": X[i] for i in range(n)}
    return TeacherDataset(rows, inputs, candidates=CLASSES, schema_digest="d")


def batch_of(teacher, target=(0,)) -> TeacherBatch:
    teacher, target = torch.tensor(teacher), torch.tensor(target)
    names = tuple(map(str, range(len(target))))
    return TeacherBatch(
        torch.zeros(len(target), 2), teacher, target, target >= 0, names, "d", ("a", "b")
    )


class Zero:
    """A model whose logits are all zero, with a gradient."""

    device = torch.device("cpu")

    def __init__(self):
        self.logits = None

    def net(self, inputs):
        self.logits = torch.zeros(len(inputs), 2, requires_grad=True)
        return self.logits


def test_the_loss_and_its_gradient_are_those_of_the_hand_calculation():
    objective = OfflineDistillationObjective(schema_digest="d", candidates=("a", "b"), alpha=1.0)
    model = Zero()
    (term,) = objective(ObjectiveContext(model, batch_of([[0.75, 0.25]]), 0, 0)).terms
    assert term.value == pytest.approx(0.130812, abs=1e-6)
    term.numerator.backward()
    assert model.logits.grad.tolist() == [[-0.25, 0.25]]


def test_certain_teachers_have_a_finite_divergence():
    objective = OfflineDistillationObjective(schema_digest="d", candidates=("a", "b"), alpha=1.0)
    (term,) = objective(ObjectiveContext(Zero(), batch_of([[1.0, 0.0]]), 0, 0)).terms
    assert term.value == pytest.approx(math.log(2))


def test_both_terms_are_over_the_rows_of_a_batch():
    objective = OfflineDistillationObjective(schema_digest="d", candidates=("a", "b"), alpha=0.3)
    batch = batch_of([[0.75, 0.25], [0.5, 0.5]], (0, 1))
    terms = objective(ObjectiveContext(Zero(), batch, 0, 0)).terms
    assert [(t.name, t.denominator, t.weight) for t in terms] == [
        ("imitation", 2, 0.3),
        ("supervised", 2, 0.7),
    ]


def test_distributions_are_aligned_by_the_names_of_the_candidates():
    batch = dataset(3).collate([dataset(3)[i] for i in range(3)])
    assert batch.teacher.tolist() == [pytest.approx([0.3, 0.2, 0.5])] * 3
    assert batch.target.tolist() == [0, 0, 0]
    assert batch.sample_ids == ("s0", "s1", "s2")


def test_records_are_the_same_after_a_file(tmp_path):
    rows = [record(0), record(1, label=None)]
    write_teacher_records("t.jsonl", rows)
    assert read_teacher_records("t.jsonl") == rows
    assert '"label"' not in (tmp_path / "t.jsonl").read_text().splitlines()[1]
    assert rows[0].distribution() == {"fox": 0.5, "cat": 0.3, "dog": 0.2}
    assert hash(dataclasses.replace(rows[0])) == hash(rows[0])


@pytest.mark.parametrize(
    "change",
    [
        {"probabilities": (0.5, 0.3, 0.1)},
        {"probabilities": (1.2, -0.2, 0.0)},
        {"probabilities": (math.nan, 0.5, 0.5)},
        {"probabilities": (0.5, 0.5)},
        {"candidates": ("a", "a", "b")},
        {"semantics": "logits"},
        {"provenance": {"source": "x"}},
        {"label": "bird"},
        {"sample_id": " "},
        {"teacher": 3},
    ],
)
def test_a_record_that_is_none_is_refused(change):
    with pytest.raises(TeacherRecordError, match=r"TeacherRecord\."):
        record(**change)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        '{"format": "nnx.teacher-record/2"}',
        '{"a": 1, "a": 2}',
        "NaN",
        "huge",
        "more",
    ],
)
def test_a_malformed_line_is_named(line, tmp_path):
    good = json.dumps(record().state())
    if line == "huge":
        line = good.replace("0.5", "1e999")
    if line == "more":
        line = json.dumps({**record().state(), "logits": [1]})
    (tmp_path / "t.jsonl").write_text(good + "\n" + line + "\n")
    with pytest.raises(TeacherRecordError, match=r"t\.jsonl:2: "):
        read_teacher_records("t.jsonl")


def test_a_dataset_refuses_what_does_not_fit():
    inputs = {"s0": X[0]}
    for rows, options, match in (
        ([record(), record()], {}, "two records"),
        ([record(1)], {}, "no input"),
        ([record(schema_digest="e")], {}, "answers the schema 'e'"),
        (
            [record()],
            {"candidates": ("cat", "dog", "owl")},
            r"missing \['owl'\], unknown \['fox'\]",
        ),
        ([], {}, "at least one record"),
        ([record()], {"candidates": ("cat", "cat")}, "ids that differ"),
    ):
        with pytest.raises(TeacherRecordError, match=match):
            TeacherDataset(rows, inputs, **{"candidates": CLASSES, "schema_digest": "d", **options})
    partly = TeacherDataset(
        [record(0), record(1, label=None)], {"s0": X[0], "s1": X[1]}, candidates=CLASSES,
        schema_digest="d",
    )  # fmt: skip
    with pytest.raises(TeacherRecordError, match="1 of 2 records have no label"):
        partly.objective(alpha=0.5)
    assert partly.objective(alpha=1.0).alpha == 1.0
    assert partly.labelled == 1


def test_a_student_learns_to_imitate_and_the_report_keeps_things_apart():
    data, student = dataset(40), feed_forward(dropout=0.0)
    before = evaluate_offline(student, data)
    params = training(
        epochs=15, train_loader=data.loader(16, shuffle=True, seed=1), val_loader=data.loader(16)
    )
    run = student.train(params, objective=data.objective(alpha=1.0), eval_step_fn=data.eval_step())
    after = evaluate_offline(student, data)
    assert after.imitation_loss.value < before.imitation_loss.value
    logits = student.net.eval()(X[:40])
    q = torch.tensor([0.3, 0.2, 0.5])
    wanted = (q * (q.log() - logits.log_softmax(1))).sum(1).mean()
    assert after.imitation_loss.value == pytest.approx(float(wanted.detach()), abs=1e-6)
    assert after.label_accuracy.value == pytest.approx(
        float((logits.argmax(1) == 0).double().mean())
    )
    assert run.idps[-1].val_edp.loss == pytest.approx(after.imitation_loss.value, rel=1e-5)
    assert run.idps[-1].val_edp.metrics["label_nll"] == pytest.approx(after.label_nll.value)
    assert "teacher agreement" in after.text()


def test_an_unlabelled_report_says_unknown():
    data = dataset(4, label=None)
    report = evaluate_offline(feed_forward(), data.loader(2))
    assert report.label_accuracy.value is None
    assert report.label_accuracy.denominator == 0
    assert "labelled accuracy: unknown over 0 records (no record has a label)" in report.text()
    assert report.state()["agreement"]["denominator"] == 4


def test_a_resume_with_another_alpha_is_refused():
    data, student = dataset(), feed_forward()
    params = training(epochs=1, train_loader=data.loader(8))
    run = student.train(params, objective=data.objective(alpha=0.7))
    resumed = training(
        epochs=1, train_loader=data.loader(8), resume_from_run_id=run.id,
        resume_from_checkpoint="last",
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"alpha is 0\.3"):
        feed_forward().train(resumed, objective=data.objective(alpha=0.3))
    feed_forward().train(resumed, objective=data.objective(alpha=0.7))


def test_live_distillation_refuses_stored_batches():
    import nnx

    data = dataset()
    with pytest.raises((ValueError, TypeError)):
        feed_forward().train(
            training(epochs=1, train_loader=data.loader(8)),
            objective=nnx.kd_objective(feed_forward(seed=99)),
        )
