"""Objectives in real runs, against plain PyTorch."""

from __future__ import annotations

import math

import pytest
import torch
from nnx import (
    Callback,
    Checkpoints,
    Losses,
    LossTerm,
    MetricSpec,
    MonitorSpec,
    Nets,
    NNCheckpoint,
    NNModel,
    NNModelParams,
    NNOptimParams,
    NNParamGroupSpec,
    NNParams,
    NNTrainerParams,
    NNTrainParams,
    Objective,
    ObjectiveContext,
    ObjectiveResult,
    Optims,
    TaskSpec,
    Trainer,
    kd_objective,
    set_seed,
    supervised_objective,
)
from nnx.records import NNEvaluationDataPoint
from torch import nn
from torch.nn import functional as F


@pytest.fixture(autouse=True)
def runs_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def model(seed=0, hidden=(8,), loss=Losses.CROSS_ENTROPY, **params):
    torch.manual_seed(seed)
    return NNModel(
        net_params=NNParams(input_dim=6, output_dim=3, hidden_dims=list(hidden), dropout_prob=0.0),
        params=NNModelParams(net=Nets.FEED_FWD, loss=loss, **params),
    )


def batches(sizes=(8, 8, 8, 8), seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(n, 6, generator=generator), torch.randint(0, 3, (n,), generator=generator))
        for n in sizes
    ]


def sgd(**fields):
    return NNOptimParams(
        **{"name": Optims.SGD, "max_lr": 0.1, "weight_decay": 0.0, "momentum": 0.9, **fields}
    )


def train_params(sizes=(8, 8, 8, 8), **fields):
    return NNTrainParams(
        **{"n_epochs": 2, "train_loader": batches(sizes), "seed": 0, "optim": sgd(), **fields}
    )


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.net.parameters(), b.net.parameters()))


def close(a, b, **tolerance):
    for x, y in zip(a.net.parameters(), b.net.parameters()):
        torch.testing.assert_close(x, y, **{"rtol": 1e-5, "atol": 1e-6, **tolerance})


def context(m, batch, **fields):
    return ObjectiveContext(m, batch, 0, 0, **fields)


# -- the supervised objective ----------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_the_supervised_objective_is_the_default_step_bit_for_bit(accumulate):
    params = train_params(
        (8, 5, 8, 2), optim=sgd(accumulate_grad_batches=accumulate, grad_clip_norm=0.5)
    )
    ours, default = model(), model()
    run = ours.train(params, objective=supervised_objective(), salt="objective")
    other = default.train(params)
    assert same(ours, default)
    assert [i.train_edp for i in run.idps] == [i.train_edp for i in other.idps]
    assert run.idps[0].train_edp.f1 is not None


def test_records_carry_the_committed_updates():
    run = model().train(
        train_params((8, 8, 8, 8, 8), optim=sgd(accumulate_grad_batches=2)),
        objective=supervised_objective(),
    )
    assert [idp.update_count for idp in run.idps] == [0, 1, 1, 2, 3, 3, 4, 4, 5, 6]
    default = model().train(train_params(), salt="default")
    assert {idp.update_count for idp in default.idps} == {None}


@pytest.mark.parametrize(
    ("loss", "task"),
    [
        (Losses.NEGATIVE_LOG_LIKELIHOOD, None),
        (Losses.CROSS_ENTROPY, TaskSpec.categorical(3, ignore_index=1)),
        (Losses.MEAN_SQUARED_ERROR, TaskSpec.regression(3)),
        (Losses.BINARY_CROSS_ENTROPY, TaskSpec.multilabel(3)),
    ],
)
def test_uneven_microbatches_and_masked_targets_are_the_full_batch(loss, task):
    parts = batches((5, 1, 7, 3))
    if task is not None and task.kind != "categorical":
        parts = [(x, F.one_hot(y, 3).float()) for x, y in parts]
        parts[0][1][0] = math.nan
        parts[2][1][1:4, 2] = math.nan
    whole = [tuple(torch.cat(tensors) for tensors in zip(*parts))]
    split, full = model(loss=loss, task=task), model(loss=loss, task=task)
    split.train(
        train_params(train_loader=parts, optim=sgd(accumulate_grad_batches=4)),
        objective=supervised_objective(),
    )
    full.train(train_params(train_loader=whole), salt="full")
    close(split, full)


def test_a_directly_called_supervised_objective_returns_its_term_and_record():
    m = model()
    x, y = batches()[0]
    y[:2] = -100
    result = supervised_objective()(context(m, (x, y)))
    (term,) = result.terms
    logits = m.net(x)
    assert (term.name, term.denominator, term.reduction, term.weight) == (
        "supervised",
        6.0,
        "mean",
        1.0,
    )
    torch.testing.assert_close(term.numerator, F.cross_entropy(logits, y, reduction="sum"))
    assert term.numerator.requires_grad
    assert result.loss() == pytest.approx(F.cross_entropy(logits, y).item())
    assert result.record.loss == result.loss()
    valid = y != -100
    assert result.record.accuracy == (logits.argmax(1) == y)[valid].double().mean().item()


def test_a_batch_without_a_valid_target_has_no_term():
    m = model()
    x, y = batches()[0]
    for reduction in ("mean", "sum"):
        m.loss_fn = nn.CrossEntropyLoss(reduction=reduction)
        result = supervised_objective()(context(m, (x, torch.full_like(y, -100))))
        assert result.terms == ()
        assert result.loss() is None


def test_a_summed_loss_is_a_summed_term():
    m = model()
    m.loss_fn = nn.CrossEntropyLoss(reduction="sum")
    (term,) = supervised_objective()(context(m, batches()[0])).terms
    assert (term.reduction, term.denominator) == ("sum", None)


# -- objectives of one's own -----------------------------------------------------------------


class Penalised(Objective):
    """Cross-entropy over rows plus a weight penalty that is a sum."""

    def __call__(self, ctx):
        x, y = ctx.batch
        logits = ctx.full_precision(ctx.model.net(x))
        penalty = sum(p.square().sum() for p in ctx.model.net.parameters())
        return ObjectiveResult([
            LossTerm("ce", F.cross_entropy(logits, y, reduction="sum"), len(y)),
            LossTerm("l2", penalty, reduction="sum", weight=0.01),
        ])  # fmt: skip


def test_any_callable_is_an_objective_and_trains_like_a_plain_loop():
    ours, plain = model(), model()
    objective = Penalised()
    run = ours.train(train_params(), objective=lambda ctx: objective(ctx))
    set_seed(0)
    optimizer = torch.optim.SGD(plain.net.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(2):
        for x, y in batches():
            optimizer.zero_grad()
            penalty = sum(p.square().sum() for p in plain.net.parameters())
            loss = F.cross_entropy(plain.net(x), y) + 0.01 * penalty
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    close(ours, plain)
    assert [idp.train_edp.loss for idp in run.idps] == pytest.approx(losses, rel=1e-5)
    assert run.idps[0].train_edp.accuracy is None


def test_a_record_of_the_objective_is_kept_and_gets_the_loss():
    def objective(ctx):
        result = Penalised()(ctx)
        return ObjectiveResult(
            result.terms, record=NNEvaluationDataPoint(error=0.25, metrics={"mine": 2.0})
        )

    run = model().train(train_params(n_epochs=1), objective=objective)
    edp = run.idps[0].train_edp
    assert (edp.error, edp.metrics["mine"]) == (0.25, 2.0)
    assert math.isfinite(edp.loss)


def test_an_objective_must_return_a_result():
    with pytest.raises(TypeError, match="must return an ObjectiveResult, not Tensor"):
        model().train(train_params(), objective=lambda ctx: torch.tensor(1.0))


class Journal(Callback):
    def __init__(self):
        self.events, self.counts = [], []

    def on_optimizer_update(self, ctx, event):
        self.events.append(event)
        self.counts.append((ctx.committed_updates, ctx.update_count))


def test_each_committed_update_fires_one_detached_event():
    journal = Journal()
    masked = [(x, torch.full_like(y, -100)) for x, y in batches((4, 4), seed=3)]
    loader = [*batches((8, 4)), *masked, *batches((6,), seed=2)]
    m = model()
    m.train(
        train_params(train_loader=loader, n_epochs=1, optim=sgd(accumulate_grad_batches=2)),
        objective=supervised_objective(), callbacks=[journal],
    )  # fmt: skip
    first, second = journal.events  # the masked window fired none
    assert (first.optimizer, first.update_idx, first.epoch_idx) == ("default", 1, 0)
    assert (first.batch_idx, first.microbatches) == (1, 2)
    assert (second.update_idx, second.batch_idx, second.microbatches) == (2, 4, 1)
    x, y = (torch.cat(t) for t in zip(*loader[:2]))
    fresh = model()
    expected = F.cross_entropy(fresh.net(x), y).item()
    assert first.loss == pytest.approx(expected)
    assert first.losses == {"supervised": pytest.approx(expected)}


class Watched(Objective):
    def __init__(self, log):
        super().__init__()
        self.log = log

    def __call__(self, ctx):
        self.log.append(("batch", ctx.batch_idx))
        return Penalised()(ctx)

    def check_run(self, model, *, optimizers, callbacks):
        self.log.append(("check", list(optimizers), [type(c).__name__ for c in callbacks]))

    def after_update(self, events):
        self.log.append(("after", [event.update_idx for event in events]))


def test_hooks_run_once_per_fit_and_once_per_committed_update(tmp_path):
    log = []

    class Sees(Callback):
        def on_train_begin(self, ctx):
            log.append("begin")

        def on_optimizer_update(self, ctx, event):
            log.append("callback")

    model().train(
        train_params((8, 8, 8), n_epochs=1, optim=sgd(accumulate_grad_batches=2)),
        objective=Watched(log), callbacks=[Sees()],
    )  # fmt: skip
    assert log == [
        ("check", ["default"], ["Sees"]), "begin",
        ("batch", 0), ("batch", 1), ("after", [1]), "callback",
        ("batch", 2), ("after", [2]), "callback",
    ]  # fmt: skip


def test_check_run_refuses_before_anything_is_left_behind(tmp_path):
    class Refuses(Objective):
        def check_run(self, model, *, optimizers, callbacks):
            raise ValueError("not this model")

    with pytest.raises(ValueError, match="not this model"):
        model().train(train_params(), objective=Refuses())
    assert not list(tmp_path.iterdir())


# -- non-finite ------------------------------------------------------------------------------


def poisoned(sizes=(8, 8, 8, 8), at=(1,)):
    loader = batches(sizes)
    for index in at:
        loader[index][0][0, 0] = math.nan
    return loader


def test_fail_stops_the_run_before_a_step():
    m, journal = model(), Journal()
    with pytest.raises(FloatingPointError, match=r"'supervised' is nan at epoch 0, batch 1"):
        m.train(
            train_params(train_loader=poisoned()), objective=supervised_objective(),
            callbacks=[journal],
        )  # fmt: skip
    assert len(journal.events) == 1
    assert all(bool(p.isfinite().all()) for p in m.net.parameters())


def test_skip_trains_as_if_the_window_were_not_there():
    ours, plain, journal = model(), model(), Journal()
    run = ours.train(
        train_params(train_loader=poisoned(at=(1,)), monitor=MonitorSpec("loss", split="train")),
        objective=supervised_objective(nonfinite="skip"), callbacks=[journal],
    )  # fmt: skip
    kept = [b for i, b in enumerate(batches()) if i != 1]
    other = plain.train(
        train_params(train_loader=kept, monitor=MonitorSpec("loss", split="train")),
        objective=supervised_objective(), salt="plain",
    )  # fmt: skip
    assert same(ours, plain)
    assert len(journal.events) == 6
    assert run.idps[-1].train_summary.loss == pytest.approx(other.idps[-1].train_summary.loss)
    assert math.isnan(run.idps[1].train_edp.loss)


def test_an_epoch_that_drops_every_window_has_a_nonfinite_loss():
    run = model().train(
        train_params(
            train_loader=poisoned(at=range(4)), n_epochs=1,
            monitor=MonitorSpec("loss", split="train"),
        ),
        objective=supervised_objective(nonfinite="skip"),
    )  # fmt: skip
    assert math.isnan(run.idps[-1].train_summary.loss)
    assert run.idps[-1].selection.status == "nonfinite"


# -- whole-epoch loss ------------------------------------------------------------------------


def test_the_whole_epoch_loss_follows_the_rule_of_a_window():
    seen = []

    def objective(ctx):
        x, y = ctx.batch
        logits = ctx.model.net(x)
        terms = [
            LossTerm("ce", F.cross_entropy(logits, y, reduction="sum"), len(y), weight=0.5),
            LossTerm("size", logits.square().sum(), 3 * len(y), weight=2.0),
        ]
        seen.append([(t.numerator.item(), t.denominator) for t in terms])
        return ObjectiveResult(terms)

    run = model().train(
        train_params(
            (8, 3, 5), n_epochs=1, optim=sgd(accumulate_grad_batches=2),
            monitor=MonitorSpec("loss", split="train"), val_loader=batches((6,)),
            metrics=[MetricSpec("accuracy")],
        ),
        objective=objective,
    )  # fmt: skip
    (a, b) = ([sum(column) for column in zip(*term)] for term in zip(*seen))
    summary = run.idps[-1].train_summary
    assert summary.loss == pytest.approx(0.5 * a[0] / a[1] + 2.0 * b[0] / b[1])
    assert "accuracy" not in summary.metrics  # declared metrics are recorded on validation
    assert "accuracy" in run.idps[-1].val_edp.metrics


# -- counters across a resume ----------------------------------------------------------------


def test_a_stateful_resume_continues_the_counters_and_weights_only_starts_them_at_zero():
    first = model().train(train_params(n_epochs=1), objective=supervised_objective())
    state = NNCheckpoint.load_training_state(first.id, Checkpoints.LAST)
    assert state["components"]["nnx.update_engine"]["state"]["updates"] == 4

    for mode, start in (("stateful", 4), ("weights_only", 0)):
        journal = Journal()
        run = model().train(
            train_params(n_epochs=1, resume_from_run_id=first.id, resume_mode=mode),
            objective=supervised_objective(), callbacks=[journal], salt=mode,
        )  # fmt: skip
        assert [e.update_idx for e in journal.events] == [start + i + 1 for i in range(4)]
        assert [idp.update_count for idp in run.idps] == [start + i + 1 for i in range(4)]


# -- distillation ----------------------------------------------------------------------------


def kd_loss(student, teacher, y, alpha, temperature):
    soft = F.kl_div(
        F.log_softmax(student / temperature, 1), F.softmax(teacher / temperature, 1),
        reduction="batchmean",
    )  # fmt: skip
    return alpha * temperature**2 * soft + (1 - alpha) * F.cross_entropy(student, y)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("sizes", [(8, 8), (7, 1, 4)])
def test_distillation_is_the_documented_loss_of_the_full_batch(alpha, sizes):
    teacher, student, plain = model(seed=5, hidden=(16,)), model(), model()
    parts = batches(sizes)
    student.train(
        train_params(train_loader=parts, n_epochs=1, optim=sgd(accumulate_grad_batches=len(sizes))),
        objective=kd_objective(teacher, alpha=alpha, temperature=3.0),
    )
    x, y = (torch.cat(t) for t in zip(*parts))
    optimizer = torch.optim.SGD(plain.net.parameters(), lr=0.1, momentum=0.9)
    with torch.no_grad():
        target = teacher.net(x)
    kd_loss(plain.net(x), target, y, alpha, 3.0).backward()
    optimizer.step()
    close(student, plain)


def test_the_terms_of_distillation():
    teacher, student = model(seed=5), model()
    batch = batches()[0]
    soft, hard = kd_objective(teacher, alpha=0.25)(context(student, batch)).terms
    assert (soft.name, soft.weight, soft.denominator) == ("distillation", 0.25, 8)
    assert (hard.name, hard.weight, hard.denominator) == ("supervised", 0.75, 8.0)
    (only,) = kd_objective(teacher, alpha=0.0)(context(student, batch)).terms
    assert (only.name, only.weight) == ("supervised", 1.0)
    _, off = kd_objective(teacher, alpha=1.0)(context(student, batch)).terms
    assert off.weight == 0.0


def test_cross_entropy_and_nll_students_distil_alike():
    trained = []
    for loss in (Losses.CROSS_ENTROPY, Losses.NEGATIVE_LOG_LIKELIHOOD):
        student = model(loss=loss)
        student.train(train_params(), objective=kd_objective(model(seed=5)), salt=str(loss))
        trained.append(student)
    close(*trained)


def test_the_teacher_is_frozen_in_eval_mode_and_never_changes():
    teacher = model(seed=5)
    teacher.net.train()
    before = [p.clone() for p in teacher.net.parameters()]
    objective = kd_objective(teacher)
    assert not teacher.net.training
    assert not any(p.requires_grad for p in teacher.net.parameters())
    modes = []
    teacher.net.register_forward_hook(lambda net, *_: modes.append(net.training))
    teacher.net.train()  # whatever the caller does meanwhile
    model().train(train_params(n_epochs=1), objective=objective)
    assert modes == [False] * 4
    assert all(torch.equal(a, b) for a, b in zip(before, teacher.net.parameters()))


def test_the_teacher_runs_in_its_own_precision_never_the_students():
    from nnx import PrecisionPolicy

    for policy, expected in ((None, torch.float32), (PrecisionPolicy("bf16"), torch.bfloat16)):
        teacher = model(seed=5, precision=policy)
        dtypes = []
        teacher.net.register_forward_hook(lambda *a, log=dtypes: log.append(a[-1].dtype))
        student = model(precision=PrecisionPolicy("bf16"))
        outputs = []
        student.net.register_forward_hook(lambda *a, log=outputs: log.append(a[-1].dtype))
        student.train(train_params(n_epochs=1), objective=kd_objective(teacher), salt=str(expected))
        assert set(dtypes) == {expected}
        assert set(outputs) == {torch.bfloat16}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alpha": 1.5}, r"kd_objective\.alpha"),
        ({"alpha": math.nan}, r"kd_objective\.alpha"),
        ({"temperature": 0}, r"kd_objective\.temperature"),
        ({"nonfinite": "warn"}, r"nonfinite"),
    ],
)
def test_distillation_refuses_arguments_outside_their_domain(arguments, message):
    with pytest.raises(ValueError, match=message):
        kd_objective(model(seed=5), **arguments)


def test_a_student_cannot_be_its_own_teacher(tmp_path):
    m = model()
    with pytest.raises(ValueError, match="shares parameters with its teacher"):
        m.train(train_params(), objective=kd_objective(m))
    assert not list(tmp_path.iterdir())


def test_teacher_and_student_must_agree_in_shape_and_take_one_input():
    torch.manual_seed(0)
    wide = NNModel(
        net_params=NNParams(input_dim=6, output_dim=4, hidden_dims=[8], dropout_prob=0.0),
        params=NNModelParams(net=Nets.FEED_FWD, loss=Losses.CROSS_ENTROPY),
    )
    with pytest.raises(ValueError, match=r"\(8, 4\) and the student's \(8, 3\) differ"):
        model().train(train_params(), objective=kd_objective(wide))

    from nnx import KeywordInputs

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            return self.layer(x)

    named = NNModel(
        module=Named(), params=NNModelParams(loss=Losses.CROSS_ENTROPY),
        batch_adapter=KeywordInputs(("x",), target="y"),
    )  # fmt: skip
    loader = [{"x": x, "y": y} for x, y in batches()]
    with pytest.raises(
        ValueError, match=r"exactly one positional input.*0 positional and 1 keyword"
    ):
        named.train(train_params(train_loader=loader), objective=kd_objective(model(seed=5)))


# -- one update owner ------------------------------------------------------------------------


class Untouched(list):
    """A loader that must not be read."""

    def __iter__(self):
        raise AssertionError("the loader was read")


class Unseen(Callback):
    def on_train_begin(self, ctx):
        raise AssertionError("a callback ran")


def imperative(ctx):
    raise AssertionError("the step ran")


imperative.steps_optimizer = True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"objective": supervised_objective(), "train_step_fn": lambda ctx: None},
            "either objective= or train_step_fn=, not both",
        ),
        ({"objective": imperative}, "imperative steps the optimizer itself.*as train_step_fn="),
        ({"train_step_fn": supervised_objective()}, "SupervisedObjective is an objective"),
        ({"objective": 3}, "objective must be callable, not int"),
    ],
)
def test_a_run_has_one_update_owner(tmp_path, arguments, message):
    m = model()
    before = [p.clone() for p in m.net.parameters()]
    with pytest.raises((ValueError, TypeError), match=message):
        m.train(train_params(train_loader=Untouched(batches())), callbacks=[Unseen()], **arguments)
    assert all(torch.equal(a, b) for a, b in zip(before, m.net.parameters()))
    assert not list(tmp_path.iterdir())


def test_the_trainer_has_one_update_owner_too(tmp_path):
    params = NNTrainerParams(n_epochs=1, train_loader=Untouched(batches()), optims={"all": sgd()})
    with pytest.raises(ValueError, match="either objective= or trainer_step_fn="):
        Trainer(model()).train(
            params, trainer_step_fn=lambda ctx: None, objective=supervised_objective()
        )
    with pytest.raises(ValueError, match=r"steps the optimizer itself.*trainer_step_fn="):
        Trainer(model()).train(params, objective=imperative)
    assert not list(tmp_path.iterdir())


# -- several optimizers ----------------------------------------------------------------------


def split_optims(**fields):
    return {
        name: sgd(param_groups=[NNParamGroupSpec(name_pattern=pattern)], **fields)
        for name, pattern in (("body", "layers.0.*"), ("head", "layers.1.*"))
    }


def test_a_trainer_objective_equals_one_optimizer_over_all_parameters():
    both, one, journal = model(), model(), Journal()
    Trainer(both).train(
        NNTrainerParams(
            n_epochs=2, train_loader=batches((8, 3, 5)), seed=0,
            optims=split_optims(accumulate_grad_batches=2),
        ),
        objective=supervised_objective(), callbacks=[journal],
    )  # fmt: skip
    one.train(
        train_params((8, 3, 5), optim=sgd(accumulate_grad_batches=2)),
        objective=supervised_objective(),
    )
    assert same(both, one)
    assert [(e.optimizer, e.update_idx) for e in journal.events] == [
        (name, index) for index in range(1, 5) for name in ("body", "head")
    ]
