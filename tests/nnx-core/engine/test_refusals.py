"""What cannot be trained is refused before a callback runs, a loader is read or a run exists."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from nnx import (
    Callback,
    Losses,
    MetricSpec,
    MonitorSpec,
    NNEvaluationDataPoint,
    NNModel,
    NNModelParams,
    NNParamGroupSpec,
    NNSchedulerParams,
    NNTrainerParams,
    PrecisionPolicy,
    Schedulers,
    TaskSpec,
    Trainer,
    default_train_step,
    supervised_objective,
)


class Untouchable:
    """A loader that must not be read, and callbacks that must not be called."""

    def __iter__(self):
        raise AssertionError("the loader was read")

    def __len__(self):
        return 3


class NeverCalled(Callback):
    def on_train_begin(self, ctx):
        raise AssertionError("a callback was called")


def trainer_params(kit, **kwargs):
    kwargs.setdefault("n_epochs", 1)
    kwargs.setdefault("train_loader", Untouchable())
    kwargs.setdefault(
        "optims",
        {
            "a": kit.adam(param_groups=[NNParamGroupSpec(name_pattern="layers.0.*")]),
            "b": kit.adam(param_groups=[NNParamGroupSpec(name_pattern="layers.1.*")]),
        },
    )
    return NNTrainerParams(**kwargs)


@pytest.fixture
def refused(kit):
    """Expect ``call(model)`` to raise and to leave everything as it was."""

    def check(call, match, error=ValueError, model=None):
        model = kit.model() if model is None else model
        model.net.eval()
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        weights, streams = kit.weights(model.net), torch.get_rng_state()
        numpy_state, python_state = np.random.get_state()[1].copy(), random.getstate()
        with pytest.raises(error, match=match):
            call(model)
        assert kit.same(weights, model.net.state_dict())
        assert torch.equal(streams, torch.get_rng_state())
        assert (numpy_state == np.random.get_state()[1]).all()
        assert python_state == random.getstate()
        assert not any(module.training for module in model.net.modules())
        assert all(p.grad is None for p in model.net.parameters())
        assert not Path("runs").exists() or not [
            p for p in Path("runs").iterdir() if not p.name.startswith(".")
        ]

    return check


def test_train_needs_parameters_and_a_loader(kit, refused):
    refused(lambda m: m.train(None), "params must be an NNTrainParams")
    refused(lambda m: m.train(trainer_params(kit)), "params must be an NNTrainParams")
    refused(lambda m: m.train(kit.train_params(train_loader=None)), "train_loader is None")
    refused(lambda m: m.train(kit.train_params(train_loader=[])), "empty")
    refused(lambda m: Trainer(m).train(kit.train_params()), "must be an NNTrainerParams")


@pytest.mark.parametrize(
    ("arguments", "match", "error"),
    [
        ({"train_step_fn": 3}, "train_step_fn must be callable", TypeError),
        ({"eval_step_fn": 3}, "eval_step_fn must be callable", TypeError),
        ({"callbacks": [3]}, "a callback must be", TypeError),
        ({"callbacks": [NeverCalled]}, "takes instances", TypeError),
        ({"components": [object()]}, "is not a component", TypeError),
        ({"salt": 7}, "salt must be a non-empty string", ValueError),
        ({"salt": ""}, "salt must be a non-empty string", ValueError),
        ({"history": 100}, "must be a HistoryJournal", TypeError),
        (
            {"objective": supervised_objective(), "train_step_fn": default_train_step},
            "one owner",
            ValueError,
        ),
        ({"train_step_fn": supervised_objective()}, "is an objective", ValueError),
    ],
)
def test_arguments_of_a_wrong_kind(kit, refused, arguments, match, error):
    arguments = {"callbacks": [NeverCalled()], **arguments}
    params = kit.train_params(train_loader=Untouchable(), val_loader=None)
    refused(lambda m: m.train(params, **arguments), match, error)


def test_a_trainer_has_no_default_step(kit, refused):
    refused(lambda m: Trainer(m).train(trainer_params(kit)), "no default step")


def test_a_trainer_step_cannot_be_clipped_or_accumulated_for(kit, refused):
    groups = [NNParamGroupSpec(name_pattern="*")]
    for field, value in (("grad_clip_norm", 1.0), ("accumulate_grad_batches", 2)):
        optims = {"a": kit.adam(param_groups=groups, **{field: value})}
        refused(
            lambda m, o=optims: Trainer(m).train(
                trainer_params(kit, optims=o), trainer_step_fn=lambda ctx: None
            ),
            field,
        )


def test_an_objective_has_one_window_for_all_optimizers(kit, refused):
    optims = {
        name: kit.adam(
            accumulate_grad_batches=n, param_groups=[NNParamGroupSpec(name_pattern=pattern)]
        )
        for name, n, pattern in (("a", 1, "layers.0.*"), ("b", 2, "layers.1.*"))
    }
    refused(
        lambda m: Trainer(m).train(
            trainer_params(kit, optims=optims), objective=supervised_objective()
        ),
        "disagree on accumulate_grad_batches",
    )


def test_an_objective_run_steps_its_schedulers_itself(kit, refused):
    params = trainer_params(kit, auto_step_schedulers=False)
    refused(
        lambda m: Trainer(m).train(params, objective=supervised_objective()), "auto_step_schedulers"
    )


def test_optimizers_of_an_objective_run_share_no_parameter(kit, refused):
    groups = [NNParamGroupSpec(name_pattern="*")]
    optims = {"a": kit.adam(param_groups=groups), "b": kit.adam(param_groups=groups)}
    refused(
        lambda m: Trainer(m).train(
            trainer_params(kit, optims=optims), objective=supervised_objective()
        ),
        "share the parameter",
    )


def test_a_monitor_needs_what_it_watches(kit, refused):
    params = kit.train_params(
        train_loader=Untouchable(), val_loader=None, monitor=MonitorSpec(metric="loss")
    )
    refused(lambda m: m.train(params), "val_loader is None")
    params = kit.train_params(
        train_loader=Untouchable(),
        metrics=(MetricSpec("nll"),),
        monitor=MonitorSpec(metric="nll", split="train"),
    )
    refused(lambda m: m.train(params, objective=supervised_objective()), "training split")
    refused(
        lambda m: m.train(params, train_step_fn=lambda ctx: default_train_step(ctx)),
        "training split",
    )


def test_metrics_that_are_not_registered_or_not_available(kit, refused):
    params = kit.train_params(train_loader=Untouchable(), metrics=(MetricSpec("nnl"),))
    refused(lambda m: m.train(params), "nnl", Exception)
    params = kit.train_params(train_loader=Untouchable(), metrics=(MetricSpec("mae"),))
    refused(lambda m: m.train(params), "mae")


def test_a_loss_that_does_not_suit_the_task(kit, refused):
    model = kit.model(task=TaskSpec.categorical(3))
    model.loss_fn = torch.nn.MSELoss()
    refused(
        lambda m: m.train(kit.train_params(train_loader=Untouchable())), "MSELoss|loss", model=model
    )


def test_a_precision_that_the_step_or_the_device_does_not_have(kit, refused):
    def step(ctx):
        raise AssertionError("the step was called")

    step.full_precision_only = True
    params = kit.train_params(train_loader=Untouchable())
    reduced = kit.model(precision=PrecisionPolicy(mode="bf16"))
    refused(lambda m: m.train(params, train_step_fn=step), "full precision", model=reduced)
    refused(
        lambda m: Trainer(m).train(trainer_params(kit), trainer_step_fn=step),
        "full precision",
        model=reduced,
    )
    half = kit.model(precision=PrecisionPolicy(mode="fp16"))
    refused(lambda m: m.train(params), "fp16", model=half)


def test_a_plateau_has_no_update_clock(kit):
    with pytest.raises(ValueError, match="plateau"):
        NNSchedulerParams(
            min_lr=0, factor=0.5, patience=0, cooldown=0, threshold=0, clock="optimizer_update"
        )


def test_an_update_clock_of_a_custom_step_needs_its_budget(kit, refused):
    schedule = NNSchedulerParams(
        min_lr=0, factor=0.5, patience=0, cooldown=0, threshold=0,
        kind=Schedulers.COSINE_ANNEALING, clock="optimizer_update",
    )  # fmt: skip
    params = kit.train_params(train_loader=Untouchable(), scheduler=schedule)
    refused(lambda m: m.train(params, train_step_fn=lambda ctx: default_train_step(ctx)), "T_max")


def test_a_scheduler_without_a_position_has_no_update_clock(kit, refused):
    class Chained(NNModel):
        def _build_scheduler(self, optimizer, params, horizon, monitor=None):
            inner = super()._build_scheduler(optimizer, params, horizon, monitor)
            return torch.optim.lr_scheduler.ChainedScheduler([inner], optimizer=optimizer)

    plain = kit.model()
    model = Chained(net_params=plain.net_params, params=plain.params)
    schedule = NNSchedulerParams(
        min_lr=0, factor=0.5, patience=0, cooldown=0, threshold=0, T_max=4,
        kind=Schedulers.COSINE_ANNEALING, clock="optimizer_update",
    )  # fmt: skip
    params = kit.train_params(train_loader=Untouchable(), scheduler=schedule)
    refused(lambda m: m.train(params), "last_epoch", model=model)


def test_an_existing_run_is_kept(kit):
    params = kit.train_params(n_epochs=1)
    run = kit.model().train(params)
    before = Path(f"runs/{run.id}/checkpoints/last.pt").read_bytes()
    model = kit.model()
    with pytest.raises(FileExistsError, match="overwrite_existing"):
        model.train(params, callbacks=[NeverCalled()])
    assert Path(f"runs/{run.id}/checkpoints/last.pt").read_bytes() == before
    again = model.train(dataclasses.replace(params, overwrite_existing=True))
    assert again.id == run.id


def test_low_rank_factors_that_no_recipe_records(kit, refused):
    model = kit.model()
    model.net.layers[0] = torch.nn.Sequential(
        torch.nn.Linear(6, 2, bias=False), torch.nn.Linear(2, 16)
    )
    params = kit.train_params(train_loader=Untouchable())
    refused(lambda m: m.train(params), "low-rank", model=model)
    refused(lambda m: m.train(params, objective=supervised_objective()), "low-rank", model=model)


def test_pruning_masks_and_parametrizations(kit, refused):
    params = kit.train_params(train_loader=Untouchable())
    pruned = kit.model()
    torch.nn.utils.prune.l1_unstructured(pruned.net.layers[0], "weight", amount=0.5)
    refused(lambda m: m.train(params), "pruning masks", model=pruned)
    normed = kit.model()
    torch.nn.utils.parametrizations.weight_norm(normed.net.layers[0])
    refused(lambda m: m.train(params), "parametrization", model=normed)


def test_a_net_without_a_parameter_to_train(kit, refused):
    bare = NNModel(module=torch.nn.Flatten(), params=NNModelParams(loss=Losses.CROSS_ENTROPY))
    refused(
        lambda m: m.train(kit.train_params(train_loader=Untouchable())), "parameter", model=bare
    )
    frozen = kit.model()
    frozen.freeze("*")
    params = kit.train_params(
        train_loader=Untouchable(),
        optim=kit.adam(param_groups=[NNParamGroupSpec(name_pattern="*")]),
    )
    refused(lambda m: m.train(params), "frozen", model=frozen)


def test_a_run_that_does_not_exist_is_not_resumed(kit, refused):
    params = kit.train_params(train_loader=Untouchable(), resume_from_run_id="0" * 32)
    refused(lambda m: m.train(params), "0000", Exception)


def test_distributed_needs_its_spec_and_a_process_group(kit, refused):
    from nnx.distributed import DDP

    params = kit.train_params(train_loader=Untouchable())
    refused(
        lambda m: m.train(params, distributed=object()),
        "must be DDP\\(\\), FSDP\\(\\) or None",
        TypeError,
    )
    refused(lambda m: m.train(params, distributed=DDP()), "init_process_group", RuntimeError)


@pytest.mark.parametrize("owner", ["step", "objective"])
@pytest.mark.parametrize("missing", ["a", "b"])
def test_several_optimizers_say_what_each_of_them_owns(kit, refused, owner, missing):
    groups = {"a": "layers.0.*", "b": "layers.1.*"}
    optims = {
        name: kit.adam(
            param_groups=None if name == missing else [NNParamGroupSpec(name_pattern=pattern)]
        )
        for name, pattern in groups.items()
    }
    step = (
        {"trainer_step_fn": pytest.fail}
        if owner == "step"
        else {"objective": supervised_objective()}
    )
    params = trainer_params(kit, optims=optims)
    refused(
        lambda m: Trainer(m).train(params, **step), rf"optims\['{missing}'\] has no param_groups"
    )


def test_one_optimizer_of_a_trainer_needs_no_groups(kit):
    params = trainer_params(kit, optims={"all": kit.adam()}, train_loader=kit.loader())
    run = Trainer(kit.model()).train(params, objective=supervised_objective())
    assert len(run.idps) == 6


def test_a_frozen_model_is_refused_with_words(kit, refused):
    frozen = kit.model()
    frozen.freeze("*")
    params = kit.train_params(train_loader=Untouchable())
    refused(lambda m: m.train(params), "all parameters of the model are frozen", model=frozen)
    one = trainer_params(kit, optims={"all": kit.adam()})
    refused(
        lambda m: Trainer(m).train(one, trainer_step_fn=pytest.fail),
        "all parameters of the optimizer 'all' are frozen",
        model=frozen,
    )


def test_a_plan_that_nothing_is_resumed_from(kit, refused):
    params = kit.train_params(train_loader=Untouchable(), resume_epochs="planned")
    refused(lambda m: m.train(params), "resume_from_run_id is None")
    resumed = dataclasses.replace(params, resume_from_run_id="0" * 32)
    read_back = type(params).from_state(resumed.state())  # lineage alone, as a stored run has it
    assert (read_back.resume_from_run_id, read_back.resume_epochs) == (None, "planned")


def ending(kind, steps):
    return NNSchedulerParams(
        min_lr=0.0, factor=0.5, patience=0, cooldown=0, threshold=0.0, kind=kind, total_steps=steps
    )


@pytest.mark.parametrize("kind", [Schedulers.ONE_CYCLE, Schedulers.LINEAR_WARMUP_DECAY])
def test_a_schedule_that_ends_before_the_training(kit, refused, kind):
    match = r"total_steps must be at least the 6 epochs.*, not 5"
    params = kit.train_params(n_epochs=6, train_loader=Untouchable(), scheduler=ending(kind, 5))
    refused(lambda m: m.train(params), match)
    optimizer = torch.optim.Adam(kit.model().net.parameters())
    with pytest.raises(ValueError, match=match):
        kind(optimizer, ending(kind, 5), 6)
    assert kind(optimizer, ending(kind, 6), 6).last_epoch == 0
    whole = kit.train_params(n_epochs=3, scheduler=ending(kind, 3))
    assert kit.model().train(whole).idps[-1].epoch_idx == 2


def test_a_step_function_that_steps_its_schedules_sets_their_length(kit):
    def step(ctx):
        ctx.model.net.train()
        return NNEvaluationDataPoint(loss=1.0, error=1.0)

    params = NNTrainerParams(
        n_epochs=3, train_loader=kit.loader(), optims={"all": kit.adam()},
        schedulers={"all": ending(Schedulers.ONE_CYCLE, 2)}, auto_step_schedulers=False,
    )  # fmt: skip
    assert Trainer(kit.model()).train(params, trainer_step_fn=step).idps[-1].epoch_idx == 2
