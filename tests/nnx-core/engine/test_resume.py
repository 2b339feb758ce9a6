"""Resuming: what is restored, what is refused, and what a refusal leaves behind."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import pytest
import torch
from nnx import (
    Callback,
    Checkpoints,
    ComponentRestoreError,
    ComponentSpec,
    EarlyStopping,
    ModelCheckpoint,
    NNCheckpoint,
    NNOptimFactoryParams,
    NNOptimParams,
    NNParamGroupSpec,
    NNRun,
    NNSchedulerParams,
    NNTrainerParams,
    OptimizerFactorySpec,
    Optims,
    PrecisionPolicy,
    ResumePointError,
    Schedulers,
    Trainer,
    register_optimizer_factory,
    supervised_objective,
)


class Counter(Callback):
    """A component that counts epochs."""

    def __init__(self, name="test.counter", version=1, required=True, fails=False):
        self.name, self.version, self.required, self.fails = name, version, required, fails
        self.count, self.begun = 0, 0

    def on_train_begin(self, ctx):
        self.count, self.begun = 0, self.begun + 1

    def on_epoch_end(self, ctx):
        self.count += 1

    def component_spec(self):
        return ComponentSpec(self.name, version=self.version, required=self.required)

    def component_state(self):
        return {"count": self.count}

    def load_component_state(self, state, *, version):
        if self.fails:
            raise RuntimeError("cannot load")
        self.count = state["count"]


def stop_after(epoch):
    def stop(self, ctx):
        ctx.should_stop = ctx.epoch >= epoch

    return type("Stop", (Callback,), {"on_epoch_end": stop})()


def resuming(params, run, **kwargs):
    kwargs.setdefault("resume_mode", "stateful")
    return dataclasses.replace(params, resume_from_run_id=run.id, **kwargs)


@pytest.fixture
def refused(kit):
    """Expect a resume to raise and to leave the model, the streams and the disk alone."""

    def check(call, match, error=ValueError, model=None):
        model = kit.model(seed=9) if model is None else model
        weights, streams = kit.weights(model.net), torch.get_rng_state()
        before = sorted(p.name for p in Path("runs").iterdir() if not p.name.startswith("."))
        with pytest.raises(error, match=match) as caught:
            call(model)
        assert kit.same(weights, model.net.state_dict())
        assert torch.equal(streams, torch.get_rng_state())
        assert before == sorted(
            p.name for p in Path("runs").iterdir() if not p.name.startswith(".")
        )
        return caught.value

    return check


def test_a_fresh_run_says_so(kit):
    run = kit.model().train(kit.train_params(n_epochs=1))
    assert run.resume_status.mode == "fresh"
    assert NNRun.load(run.id).resume_status.mode == "fresh"


def test_additional_epochs_follow_the_checkpoint(kit):
    params = kit.train_params(n_epochs=2)
    first = kit.model().train(params)
    model = kit.model(seed=9)
    second = model.train(resuming(params, first))
    assert [idp.epoch_idx for idp in second.idps if idp.val_edp] == [2, 3]
    assert second.idps[0].iter_idx == 0
    status = second.resume_status
    assert (status.mode, status.source_run_id, status.source_checkpoint) == (
        "stateful", first.id, "last",
    )  # fmt: skip
    point = NNCheckpoint.resume_point(run=first.id, type=Checkpoints.LAST)
    assert status.source_epoch == 1
    assert status.source_checkpoint_id == point["checkpoint_id"]
    assert status.source_generation == point["generation"]
    assert NNRun.load(second.id).resume_status == status


def test_a_split_run_equals_a_straight_one(kit):
    plan = kit.train_params(n_epochs=4)
    whole = kit.model()
    straight = whole.train(plan)
    first = kit.model().train(dataclasses.replace(plan, data_id="split"), callbacks=[stop_after(1)])
    rest = kit.model(seed=9)
    second = rest.train(resuming(plan, first, resume_epochs="planned"))
    assert kit.same(whole.net.state_dict(), rest.net.state_dict())
    assert [i.state() for i in second.idps] == [i.state() for i in straight.idps[12:]]


def test_the_controls_stay_out_of_the_source_and_lineage_is_part_of_the_id(kit):
    params = kit.train_params(n_epochs=1)
    first = kit.model().train(params)
    files = {p: p.read_bytes() for p in Path(f"runs/{first.id}").rglob("*") if p.is_file()}
    child = kit.model().train(resuming(params, first))
    assert child.id != first.id
    assert child.state()["train"]["parent_run_id"] == first.id
    assert {p: p.read_bytes() for p in files} == files
    with pytest.raises(FileExistsError):
        kit.model().train(resuming(params, first))
    assert kit.model().train(resuming(params, first), salt="again").id != child.id
    assert kit.model().train(resuming(params, first, overwrite_existing=True)).id == child.id


# Modes --------------------------------------------------------------------------------------


def test_weights_only_starts_everything_else_fresh(kit):
    params = kit.train_params(n_epochs=2)
    first = kit.model().train(params, callbacks=[Counter()])
    counter = Counter()
    run = kit.model(seed=9).train(
        resuming(params, first, resume_mode="weights_only"), callbacks=[counter]
    )
    assert run.resume_status.mode == "weights_only"
    assert run.resume_status.fresh_components == ("test.counter",)
    assert run.idps[0].epoch_idx == 2
    assert counter.count == 2


def test_a_weights_only_file_warms_a_start_and_is_no_training_state(kit, refused):
    params = kit.train_params(n_epochs=2)
    first = kit.model().train(params, callbacks=[ModelCheckpoint(epochs=[0], tag="custom")])
    request = {"resume_from_checkpoint": "custom_e0"}
    refused(lambda m: m.train(resuming(params, first, **request)), "weights only")
    refused(
        lambda m: m.train(
            resuming(params, first, resume_mode="auto", resume_epochs="planned", **request)
        ),
        "planned",
    )
    with pytest.warns(RuntimeWarning, match="start fresh"):
        run = kit.model(seed=9).train(resuming(params, first, resume_mode="auto", **request))
    assert run.resume_status.mode == "weights_only"
    assert run.idps[0].epoch_idx == 1


def test_planned_needs_the_same_unfinished_plan(kit, refused):
    params = kit.train_params(n_epochs=3)
    part = kit.model().train(params, callbacks=[stop_after(0)])
    longer = dataclasses.replace(params, n_epochs=5)
    refused(lambda m: m.train(resuming(longer, part, resume_epochs="planned")), "planned 3 epochs")
    done = kit.model().train(dataclasses.replace(params, data_id="done"))
    refused(lambda m: m.train(resuming(params, done, resume_epochs="planned")), "finished its plan")


def test_planned_carries_on_steps_updates_and_the_phase_cadence(kit):
    params = kit.train_params(n_epochs=8)
    seen = []

    def note(self, ctx):
        seen.append((ctx.epoch, ctx.idp.iter_idx, ctx.committed_updates))

    look = type("Look", (Callback,), {"on_epoch_end": note})()
    part = kit.model().train(params, callbacks=[stop_after(4)])
    rest = kit.model().train(resuming(params, part, resume_epochs="planned"), callbacks=[look])
    assert seen == [(5, 35, 36), (6, 41, 42), (7, 47, 48)]
    names = {
        p.name for p in Path(f"runs/{rest.id}/checkpoints").glob("*.pt") if ".opt" not in p.name
    }
    assert "q3.pt" in names
    assert names.isdisjoint({"first.pt", "q1.pt", "q2.pt"})


# What does not fit --------------------------------------------------------------------------


def test_every_problem_is_reported_at_once(kit, refused):
    params = kit.train_params(n_epochs=1)
    first = kit.model().train(params, callbacks=[Counter("test.gone"), Counter("test.new", 2)])
    error = refused(
        lambda m: m.train(
            resuming(params, first), callbacks=[Counter("test.new", 1), Counter("test.missing")]
        ),
        "cannot be restored",
        ComponentRestoreError,
    )
    assert len(error.problems) == 3
    text = str(error)
    assert "test.gone" in text
    assert "test.missing" in text
    assert "newer" in text


def test_problems_of_every_kind_share_one_report(kit, refused):
    first = kit.model().train(kit.train_params(n_epochs=1), callbacks=[Counter("test.gone")])
    sgd = NNOptimParams(name=Optims.SGD, max_lr=0.1, weight_decay=0.0, momentum=0.9)
    params = kit.train_params(n_epochs=1, optim=sgd)
    error = refused(lambda m: m.train(resuming(params, first)), "SGD")
    assert len(error.problems) == 2
    assert any("test.gone" in problem for problem in error.problems)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"name": Optims.SGD, "momentum": 0.9}, "SGD"),
        (
            {"param_groups": [NNParamGroupSpec(name_pattern="layers.0.*", lr=0.1)]},
            "other parameters",
        ),
    ],
)
def test_another_optimizer_is_refused(kit, refused, change, match):
    first = kit.model().train(kit.train_params(n_epochs=1))
    optim = dataclasses.replace(kit.adam(), **change)
    refused(lambda m: m.train(resuming(kit.train_params(optim=optim), first)), match)


def test_another_net_is_refused(kit, refused):
    first = kit.model().train(kit.train_params(n_epochs=1))
    model = kit.model()
    wider = type(model)(
        net_params=dataclasses.replace(model.net_params, hidden_dims=[20]), params=model.params
    )
    refused(lambda m: m.train(resuming(kit.train_params(), first)), "topology", model=wider)


def test_another_precision_is_refused_unless_only_weights_are_wanted(kit, refused):
    first = kit.model().train(kit.train_params(n_epochs=1))
    reduced = kit.model(precision=PrecisionPolicy(mode="bf16"))
    refused(lambda m: m.train(resuming(kit.train_params(), first)), "bf16", model=reduced)
    run = reduced.train(resuming(kit.train_params(n_epochs=1), first, resume_mode="weights_only"))
    assert run.resume_status.mode == "weights_only"


def test_another_scheduler_or_plateau_rule_is_refused(kit, refused):
    first = kit.model().train(kit.train_params(n_epochs=1))
    common = {"min_lr": 1e-7, "factor": 0.95, "patience": 8, "cooldown": 2}
    step = NNSchedulerParams(kind=Schedulers.STEP, step_size=1, threshold=1e-3, **common)
    refused(lambda m: m.train(resuming(kit.train_params(scheduler=step), first)), "StepLR")
    rule = NNSchedulerParams(threshold=0.5, **common)
    refused(
        lambda m: m.train(resuming(kit.train_params(scheduler=rule), first)),
        "improvement rule.*threshold",
    )


def test_a_trainer_and_a_model_do_not_continue_each_other(kit, refused):
    first = kit.model().train(kit.train_params(n_epochs=1))
    groups = [NNParamGroupSpec(name_pattern="*")]

    def trainer_params(**kwargs):
        return NNTrainerParams(
            n_epochs=1, train_loader=kit.loader(), optims={"a": kit.adam(param_groups=groups)},
            **kwargs,
        )  # fmt: skip

    refused(
        lambda m: Trainer(m).train(
            trainer_params(resume_from_run_id=first.id), objective=supervised_objective()
        ),
        "NNModel.train",
    )
    second = Trainer(kit.model()).train(trainer_params(), objective=supervised_objective())
    refused(lambda m: m.train(resuming(kit.train_params(), second)), "Trainer.train")
    run = kit.model().train(resuming(kit.train_params(), second, resume_mode="weights_only"))
    assert run.resume_status.mode == "weights_only"


@pytest.mark.parametrize("kind", [Schedulers.ONE_CYCLE, Schedulers.LINEAR_WARMUP_DECAY])
def test_a_budgeted_schedule_needs_one_explicit_horizon(kit, refused, kind):
    def schedule(**kwargs):
        return NNSchedulerParams(
            kind=kind, min_lr=0.0, factor=0.5, patience=0, cooldown=0, threshold=0.0, **kwargs
        )

    def params(**kwargs):
        return kit.train_params(n_epochs=2, scheduler=schedule(**kwargs))

    first = kit.model().train(params(total_steps=4, warmup_steps=1))
    refused(lambda m: m.train(resuming(params(), first)), "total_steps")
    refused(
        lambda m: m.train(
            resuming(dataclasses.replace(params(total_steps=4, warmup_steps=1), n_epochs=3), first)
        ),
        "4 steps",
    )
    if kind is Schedulers.LINEAR_WARMUP_DECAY:
        refused(lambda m: m.train(resuming(params(total_steps=4), first)), "warmup_steps")
    run = kit.model().train(resuming(params(total_steps=4, warmup_steps=1), first))
    assert run.idps[-1].epoch_idx == 3
    fresh = kit.model().train(resuming(params(), first, resume_mode="weights_only"))
    assert fresh.idps[-1].epoch_idx == 3


def test_a_damaged_point_is_refused(kit, refused):
    first = kit.model().train(kit.train_params(n_epochs=1))
    path = Path(f"runs/{first.id}/checkpoints/last.pt")
    damaged = bytearray(path.read_bytes())
    damaged[-200] ^= 1
    path.write_bytes(bytes(damaged))
    refused(lambda m: m.train(resuming(kit.train_params(), first)), "last", ResumePointError)


# All or nothing -----------------------------------------------------------------------------


def test_a_component_that_cannot_load_rolls_everything_back(kit, refused):
    params = kit.train_params(n_epochs=1)
    first = kit.model().train(params, callbacks=[Counter("test.a"), Counter("test.b")])
    a, b = Counter("test.a"), Counter("test.b", fails=True)
    with pytest.warns(RuntimeWarning, match="'test.b' could not be rolled back"):
        refused(
            lambda m: m.train(resuming(params, first), callbacks=[a, b]),
            "cannot load",
            RuntimeError,
        )
    assert (a.begun, a.count) == (1, 0), "reset once, then given back what the reset left"


def test_a_hook_that_fails_while_resuming_rolls_the_model_back(kit, refused):
    params = kit.train_params(n_epochs=1)
    first = kit.model().train(params)

    def fail(self, ctx):
        raise RuntimeError("broken hook")

    broken = type("Broken", (Callback,), {"on_train_begin": fail})()
    refused(
        lambda m: m.train(resuming(params, first), callbacks=[broken]), "broken hook", RuntimeError
    )


def test_a_rollback_that_fails_is_a_warning(kit):
    params = kit.train_params(n_epochs=1)
    first = kit.model().train(params)

    def rewire(self, ctx):
        ctx.model.net.layers[0] = torch.nn.Linear(2, 2)
        raise RuntimeError("rewired")

    broken = type("Broken", (Callback,), {"on_train_begin": rewire})()
    with (
        pytest.warns(RuntimeWarning, match="could not be rolled back"),
        pytest.raises(RuntimeError, match="rewired"),
    ):
        kit.model().train(resuming(params, first), callbacks=[broken])


def test_components_are_restored_after_the_reset_and_before_the_first_epoch(kit):
    params = kit.train_params(n_epochs=2)
    first = kit.model().train(params, callbacks=[Counter()])
    counter, seen = Counter(), []

    def look(self, ctx):
        seen.append(counter.count)

    watch = type("Watch", (Callback,), {"on_epoch_begin": look})()
    run = kit.model().train(resuming(params, first), callbacks=[counter, watch])
    assert seen == [2, 3]
    assert run.resume_status.restored_components == ("test.counter",)


def test_an_optional_component_starts_fresh(kit):
    params = kit.train_params(n_epochs=1)
    first = kit.model().train(params)
    run = kit.model().train(resuming(params, first), callbacks=[EarlyStopping()])
    assert run.resume_status.fresh_components == ("early_stopping",)


def test_patience_goes_on_across_a_resume(kit):
    params = kit.train_params(n_epochs=20, optim=kit.adam(max_lr=0.0))
    straight = kit.model().train(params, callbacks=[EarlyStopping(patience=4)])
    part = kit.model().train(
        dataclasses.replace(params, data_id="part"),
        callbacks=[EarlyStopping(patience=4), stop_after(2)],
    )
    rest = kit.model().train(
        resuming(params, part, resume_epochs="planned"), callbacks=[EarlyStopping(patience=4)]
    )
    assert rest.idps[-1].epoch_idx == straight.idps[-1].epoch_idx


def test_the_last_checkpoint_is_written_again_after_on_train_end(kit):
    def change(self, ctx):
        with torch.no_grad():
            ctx.model.net.layers[0].weight.zero_()

    callback = type("Zero", (Callback,), {"on_train_end": change})()
    run = kit.model().train(kit.train_params(n_epochs=1), callbacks=[callback])
    last = NNCheckpoint.load(run=run.id, type=Checkpoints.LAST)
    assert (last.net_state["layers.0.weight"] == 0).all()
    again = kit.model().train(
        dataclasses.replace(kit.train_params(n_epochs=1), resume_from_run_id=run.id)
    )
    assert again.resume_status.mode == "stateful"


# Older checkpoints -----------------------------------------------------------------------------


def rewritten(run, *without):
    """LAST of a run saved again without some of its training state."""
    checkpoint, state = NNCheckpoint.load_with_training_state(run=run.id, type=Checkpoints.LAST)
    fields = inspect.signature(checkpoint.save).parameters
    kept = {k: v for k, v in state.items() if k in fields and k not in without}
    checkpoint.save(run.id, Checkpoints.LAST, **kept)


def test_a_point_without_counters_has_no_plan_to_continue(kit, refused):
    params = kit.train_params(n_epochs=3)
    part = kit.model().train(params, callbacks=[stop_after(0)])
    rewritten(part, "counters")
    refused(
        lambda m: m.train(resuming(params, part, resume_epochs="planned")),
        "does not record its plan",
    )
    assert kit.model().train(resuming(params, part)).idps[0].epoch_idx == 1


def test_a_point_without_component_state_starts_the_components_fresh(kit, refused):
    params = kit.train_params(n_epochs=1)
    first = kit.model().train(params)
    rewritten(first, "components")
    with pytest.warns(RuntimeWarning, match="without component state"):
        run = kit.model().train(resuming(params, first), callbacks=[Counter()])
    assert run.resume_status.mode == "stateful"
    assert run.resume_status.fresh_components == ("test.counter",)
    updates = NNSchedulerParams(
        min_lr=0.0, factor=0.5, patience=0, cooldown=0, threshold=0.0,
        kind=Schedulers.STEP, step_size=1,
    )  # fmt: skip
    by_epoch = kit.train_params(n_epochs=1, scheduler=updates, data_id="by epoch")
    second = kit.model().train(by_epoch)
    rewritten(second, "components")
    by_update = dataclasses.replace(
        by_epoch, scheduler=dataclasses.replace(updates, clock="optimizer_update")
    )
    refused(lambda m: m.train(resuming(by_update, second)), "counts epochs")


def test_an_optimizer_only_point_restores_the_optimizer(kit):
    params = kit.train_params(n_epochs=1)
    first = kit.model().train(params)
    saved = NNCheckpoint.load_optimizer_state(run=first.id, type=Checkpoints.LAST)
    state = NNCheckpoint.load_training_state(run=first.id, type=Checkpoints.LAST)
    rewritten(first, *(set(state) - {"optimizer_state"}))
    steps = []

    def look(self, ctx):
        steps.append(ctx.optimizer.state_dict()["state"][0]["step"].item())

    watch = type("Watch", (Callback,), {"on_epoch_begin": look})()
    with pytest.warns(RuntimeWarning, match="no random state"):
        run = kit.model().train(
            dataclasses.replace(params, resume_from_run_id=first.id), callbacks=[watch]
        )
    assert steps == [saved["state"][0]["step"].item()] == [6.0]
    assert run.idps[0].epoch_idx == 1


def test_a_generator_of_another_seed_is_another_stream(kit):
    def with_seed(seed):
        return kit.train_params(
            n_epochs=1, train_loader=kit.loader(generator=torch.Generator().manual_seed(seed))
        )

    first = kit.model().train(with_seed(1))
    with pytest.warns(RuntimeWarning, match=r"train\.generator"):
        kit.model().train(resuming(with_seed(2), first))


def test_worker_processes_are_outside_what_is_saved(kit):
    params = kit.train_params(n_epochs=1, train_loader=kit.loader(num_workers=1))
    first = kit.model().train(params)
    with pytest.warns(RuntimeWarning, match="workers"):
        kit.model().train(resuming(params, first))


# Attempts ---------------------------------------------------------------------------------------


def test_every_fit_is_an_attempt_of_its_plan(kit):
    from nnx.provenance import ExperimentManifest, load_provenance

    params = kit.train_params(n_epochs=2)
    model = kit.model()
    plan = ExperimentManifest.for_model(model, train=params)
    run = model.train(params, provenance=plan)
    assert run.provenance.fingerprint == plan.fingerprint()
    assert run.provenance.attempt.status == "completed"
    again = resuming(params, run)
    child = kit.model().train(again, provenance=ExperimentManifest.for_model(model, train=again))
    assert child.provenance.fingerprint == plan.fingerprint()
    assert child.provenance.attempt.parent["run_id"] == run.id
    assert child.provenance.attempt.parent["attempt_id"] == run.provenance.attempt.attempt_id

    for error, status in ((RuntimeError("broken"), "failed"), (KeyboardInterrupt(), "cancelled")):

        def fail(self, ctx, error=error):
            if ctx.epoch == 1:
                raise error

        broken = type("Broken", (Callback,), {"on_epoch_begin": fail})()
        with pytest.raises(type(error)):
            kit.model().train(params, provenance=plan, callbacks=[broken], salt=status)
        names = [p.name for p in Path("runs").iterdir() if p.name[0] != "." and p.name != "best"]
        records = [load_provenance(name).attempt for name in names]
        attempt = next(a for a in records if a.status == status)
        assert attempt.last_committed["epoch"] == 0


def test_a_training_state_of_another_version_is_refused(kit, refused):
    params = kit.train_params(n_epochs=1)
    first = kit.model().train(params)
    folder = Path("runs") / first.id / "checkpoints"
    manifest = folder / "last.pt.manifest.json"
    manifest.unlink()  # its digests are those of the file as it was
    (sidecar,) = (p for p in folder.glob("last.pt.opt.*.pt") if p.name != "last.pt.opt.pt")
    state = torch.load(sidecar, weights_only=True)
    torch.save({**state, "version": 2}, sidecar)
    refused(lambda m: m.train(resuming(params, first)), "version 2.*reads version 1")
    warm = kit.model().train(resuming(params, first, resume_mode="weights_only"))  # the way out
    assert warm.resume_status.mode == "weights_only"


def adam_by_factory(groups, config):
    return torch.optim.Adam(groups, betas=(0.9, 0.999))


@pytest.mark.parametrize(("first", "second"), [("own", "factory"), ("factory", "own"), (1, 1.0)])
def test_a_factory_is_not_the_optimizer_it_builds_nor_another_config(kit, refused, first, second):
    register_optimizer_factory("test.adam", 1, adam_by_factory, replace=True)

    def optim(kind):
        if kind == "own":
            return kit.adam()
        config = {} if kind == "factory" else {"momentum": kind}
        return NNOptimFactoryParams(
            factory=OptimizerFactorySpec(id="test.adam", version=1, config=config),
            max_lr=0.01, weight_decay=0.0,
        )  # fmt: skip

    def params(kind):
        return kit.train_params(n_epochs=1, optim=optim(kind))

    run = kit.model().train(params(first))
    refused(lambda m: m.train(resuming(params(second), run)), "checkpoint's optimizer factory is")
    assert kit.model().train(resuming(params(first), run)).resume_status.mode == "stateful"
