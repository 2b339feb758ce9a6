"""Builders: variants, modifiers, branches and ownership."""

from __future__ import annotations

import dataclasses

import pytest
from nnx import (
    Activations,
    MetricSpec,
    MonitorSpec,
    NNOptimFactoryParams,
    NNOptimParams,
    NNParamGroupSpec,
    NNParams,
    NNSchedulerParams,
    NNSchedulerParamsBuilder,
    NNTrainerParams,
    NNTrainerParamsBuilder,
    NNTransformerParams,
    NNTransformerParamsBuilder,
    OptimizerFactorySpec,
    Optims,
    Schedulers,
)

PLATEAU = {"min_lr": 1e-7, "factor": 0.5, "patience": 10, "cooldown": 2, "threshold": 1e-3}
ADAM = NNOptimParams.builder().adam(max_lr=0.1).build()
SCHEDULE = NNSchedulerParams.builder().reduce_on_plateau(**PLATEAU).build()


def transformer():
    return NNTransformerParams.builder().vocab(64).layers(n=2, heads=2, d_model=32)


def trainer():
    return NNTrainerParams.builder().n_epochs(3).optimizer("head", ADAM)


# -- optimizers ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "name", "decay"),
    [
        ("adam", Optims.ADAM, 0.0),
        ("adam_amsgrad", Optims.ADAM_AMSGRAD, 0.0),
        ("adamw", Optims.ADAMW, 0.01),
    ],
)
def test_the_adam_variants_spell_betas_as_torch_does(method, name, decay):
    built = getattr(NNOptimParams.builder(), method)(max_lr=1e-3, betas=(0.8, 0.9)).build()
    assert built == NNOptimParams(name=name, max_lr=1e-3, momentum=(0.8, 0.9), weight_decay=decay)
    assert "eps" not in built.state()
    assert getattr(NNOptimParams.builder(), method)(max_lr=1, eps=1e-6).build().eps == 1e-6


@pytest.mark.parametrize(
    ("method", "name"), [("sgd", Optims.SGD), ("sgd_nesterov", Optims.SGD_NESTEROV)]
)
def test_the_sgd_variants_keep_one_momentum(method, name):
    built = getattr(NNOptimParams.builder(), method)(max_lr=0.1, weight_decay=5e-5).build()
    assert built == NNOptimParams(name=name, max_lr=0.1, momentum=0.9, weight_decay=5e-5)


def test_modifiers_survive_a_variant_change_and_the_last_variant_wins():
    groups = [NNParamGroupSpec(name_pattern="*.bias", weight_decay=0.0)]
    builder = NNOptimParams.builder().grad_clip(1.0).accumulate_grad(4).param_groups(groups)
    built = builder.adam(max_lr=0.1, eps=1e-5).sgd(max_lr=0.2).build()
    assert (built.name, built.max_lr, built.momentum) == (Optims.SGD, 0.2, 0.9)
    assert built.eps == 1e-8, "the eps of the earlier variant is gone"
    assert (built.grad_clip_norm, built.accumulate_grad_batches) == (1.0, 4)
    assert built.param_groups == groups


def test_building_without_a_variant_names_the_methods():
    with pytest.raises(
        ValueError, match=r"one of \.adam.*\.adam_amsgrad.*\.adamw.*\.sgd.*\.sgd_nesterov"
    ):
        NNOptimParams.builder().grad_clip(1.0).build()
    with pytest.raises(
        ValueError,
        match=r"\.reduce_on_plateau.*\.step.*\.cosine_annealing.*\.one_cycle.*\.linear_warmup",
    ):
        NNSchedulerParams.builder().clock("epoch").build()


@pytest.mark.parametrize(
    "build",
    [
        lambda: NNOptimParams.builder().adam(max_lr=-1).build(),
        lambda: NNOptimParams.builder().sgd(max_lr=0.1, momentum=True).build(),
        lambda: NNOptimParams.builder().adam(max_lr=0.1).grad_clip(0).build(),
        lambda: NNOptimParams.builder().adam(max_lr=0.1).accumulate_grad(0).build(),
        lambda: NNOptimParams.builder().adam(max_lr=0.1).param_groups("*.bias").build(),
        lambda: NNSchedulerParams.builder().step(step_size=0, **PLATEAU).build(),
        lambda: transformer().context(max_seq_len=16, rope_base=0).build(),
        lambda: NNTransformerParams.builder().layers(n=1, heads=2, d_model=7),
        lambda: NNTransformerParams.builder().layers(n=1, heads=2, d_model=6),
        lambda: NNTransformerParams.builder().layers(n=1, heads=0, d_model=6),
        lambda: NNTransformerParams.builder().layers(n=1.0, heads=2, d_model=8),
        lambda: trainer().n_epochs(0).build(),
    ],
)
def test_builders_refuse_what_the_constructor_refuses(build):
    with pytest.raises(ValueError, match=r"NN\w+Params\.\w+ must be"):
        build()


# -- schedules -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "kind", "own"),
    [
        ("reduce_on_plateau", None, {}),
        ("step", Schedulers.STEP, {"step_size": 2}),
        ("cosine_annealing", Schedulers.COSINE_ANNEALING, {"T_max": 5}),
        ("one_cycle", Schedulers.ONE_CYCLE, {"max_lr": 0.1, "total_steps": 9}),
        (
            "linear_warmup_decay",
            Schedulers.LINEAR_WARMUP_DECAY,
            {"warmup_steps": 1, "total_steps": 9},
        ),
    ],
)
def test_each_schedule_writes_its_own_fields_only(method, kind, own):
    built = getattr(NNSchedulerParams.builder(), method)(**own, **PLATEAU).build()
    assert built == NNSchedulerParams(kind=kind, **own, **PLATEAU)
    earlier = NNSchedulerParams.builder().one_cycle(max_lr=1, total_steps=7, **PLATEAU)
    assert getattr(earlier, method)(**own, **PLATEAU).build() == built


def test_the_clock_is_kept_before_and_after_a_variant():
    before = NNSchedulerParams.builder().clock("optimizer_update").step(step_size=2, **PLATEAU)
    after = NNSchedulerParams.builder().step(step_size=2, **PLATEAU).clock("optimizer_update")
    assert before.build() == after.build()
    loaded = NNSchedulerParamsBuilder.from_params(before.build())
    assert loaded.cosine_annealing(T_max=4, **PLATEAU).build().clock == "optimizer_update"
    with pytest.raises(ValueError, match=r"clock must be one of epoch, optimizer_update.*did you"):
        NNSchedulerParams.builder().step(step_size=2, **PLATEAU).clock("optimizer_updates").build()
    with pytest.raises(ValueError, match="clock must be 'epoch' for a plateau schedule"):
        NNSchedulerParams.builder().clock("optimizer_update").reduce_on_plateau(**PLATEAU).build()


# -- transformers --------------------------------------------------------------------


def test_group_setters_replace_their_whole_group():
    base = transformer().context(max_seq_len=16, rope_base=5e5).dropout(attn=0.5, resid=0.3)
    built = base.context(max_seq_len=128).dropout(attn=0.1).vocab(32).build()
    assert (built.rope_base, built.max_seq_len) == (10000.0, 128)
    assert (built.attn_dropout, built.resid_dropout) == (0.1, 0.0)
    assert (built.vocab_size, built.input_dim, built.output_dim) == (32, 32, 32)


def test_the_missing_setters_are_named():
    with pytest.raises(ValueError) as refusal:
        NNTransformerParams.builder().ffn(mult=2).build()
    for name in (".vocab(", ".layers(", ".context("):
        assert name in str(refusal.value)


def test_a_loaded_transformer_keeps_fields_that_no_setter_has():
    params = NNTransformerParams(
        input_dim=5, output_dim=6, dropout_prob=0.2, hidden_dims=[3], vocab_size=64, n_layers=1,
        n_heads=2, d_model=8, max_seq_len=4, activation=Activations.TANH,
        activations=[Activations.RELU], dropout_probs=[0.7], rope_base=5e5, tie_embeddings=False,
    )  # fmt: skip
    again = NNTransformerParamsBuilder.from_params(params).build()
    assert again == params
    assert str(again.state()) == str(params.state())
    resized = NNTransformerParamsBuilder.from_params(params).vocab(9).build()
    assert (resized.input_dim, resized.output_dim, resized.hidden_dims) == (9, 9, [3])
    longer = (
        NNTransformerParamsBuilder.from_params(params)
        .context(max_seq_len=2048, rope_base=params.rope_base)
        .build()
    )
    assert (longer.rope_base, longer.max_seq_len) == (5e5, 2048)
    assert (
        NNTransformerParamsBuilder.from_params(params)
        .tied_embeddings(True)
        .ffn(mult=2)
        .build()
        .state()["ffn_mult"]
        == 2
    )


# -- trainers ------------------------------------------------------------------------


def test_a_schedule_without_its_optimizer_is_refused_at_build():
    builder = trainer().scheduler("haed", SCHEDULE)
    with pytest.raises(ValueError, match=r"\.scheduler\('haed', \.\.\.\).*did you mean 'head'"):
        builder.build()
    assert builder.optimizer("haed", ADAM).build().schedulers["haed"] is SCHEDULE
    with pytest.raises(ValueError, match=r"NNTrainerParams\.schedulers names 'x'"):
        NNTrainerParams(n_epochs=1, optims={"a": ADAM}, schedulers={"x": SCHEDULE})


def test_a_trainer_needs_epochs_and_an_optimizer():
    with pytest.raises(ValueError, match=r"\.n_epochs\(N\), \.optimizer\(name, params\)"):
        NNTrainerParams.builder().build()
    with pytest.raises(ValueError, match="optims must be at least one named optimizer"):
        NNTrainerParams(n_epochs=1, optims={})


def test_a_registered_optimizer_goes_straight_into_a_trainer():
    factory = NNOptimFactoryParams(factory=OptimizerFactorySpec("acme.lion", 1), max_lr=0.1)
    built = NNTrainerParams.builder().n_epochs(1).optimizer("a", factory).build()
    assert built.optims["a"] is factory
    assert NNTrainerParams.from_state(built.state()) == built


def test_every_trainer_setter_reaches_its_field():
    loader, val, metric = [1], [2], MetricSpec("nll")
    watch = MonitorSpec(metric="nll", mode="min")
    extra = {"m": len}
    built = (
        trainer()
        .scheduler("head", SCHEDULE)
        .train_loader(loader)
        .val_loader(val)
        .seed(3)
        .data_id("split-a")
        .save_phase_checkpoints(False)
        .auto_step_schedulers(False)
        .overwrite_existing(True)
        .checkpoint_every(10)
        .extra_metrics(extra)
        .metrics(metric)
        .monitor(watch)
        .resume_from("a" * 32, checkpoint="best", mode="stateful")
        .build()
    )
    assert built == NNTrainerParams(
        n_epochs=3, optims={"head": ADAM}, schedulers={"head": SCHEDULE}, train_loader=loader,
        val_loader=val, seed=3, data_id="split-a", save_phase_checkpoints=False,
        auto_step_schedulers=False, overwrite_existing=True, checkpoint_every=10,
        extra_metrics=extra, metrics=(metric,), monitor=watch, resume_from_run_id="a" * 32,
        resume_from_checkpoint="best", resume_mode="stateful",
    )  # fmt: skip
    assert built.train_loader is loader


def test_a_resume_replaces_the_lineage_of_a_loaded_trainer():
    loaded = NNTrainerParams.from_state(
        trainer().resume_from("a" * 32, checkpoint="best").build().state()
    )
    assert loaded.parent_run_id == "a" * 32
    assert loaded.resume_from_run_id is None
    again = NNTrainerParamsBuilder.from_params(loaded).resume_from("b" * 32).build()
    assert again.state()["parent_run_id"] == "b" * 32
    assert again.state()["parent_checkpoint"] == "last"


# -- branching and ownership -----------------------------------------------------------

COMPLETE = [
    NNOptimParams.builder()
    .adamw(max_lr=0.1, eps=1e-6)
    .grad_clip(1.0)
    .param_groups([NNParamGroupSpec(name_pattern="*")]),
    NNSchedulerParams.builder().step(step_size=2, **PLATEAU).clock("optimizer_update"),
    transformer().context(max_seq_len=16, rope_base=5e5).dropout(attn=0.1).tied_embeddings(False),
    trainer().scheduler("head", SCHEDULE).train_loader([1]).extra_metrics({"m": len}).seed(1),
]


@pytest.mark.parametrize("builder", COMPLETE, ids=lambda b: type(b).__name__)
def test_a_loaded_builder_builds_an_equal_value_with_the_same_state(builder):
    params = builder.build()
    again = type(builder).from_params(params).build()
    assert again == params
    assert again is not params
    assert str(again.state()) == str(params.state())
    assert list(again.state()) == list(params.state())


@pytest.mark.parametrize("builder", COMPLETE, ids=lambda b: type(b).__name__)
def test_from_params_takes_exactly_its_own_class(builder):
    cls, own = type(builder), type(builder.build())
    with pytest.raises(TypeError, match=f"{cls.__name__}.from_params takes an? {own.__name__}"):
        cls.from_params(NNParams(input_dim=1, output_dim=1, dropout_prob=0))

    @dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
    class Sub(own):
        pass

    values = {f.name: getattr(builder.build(), f.name) for f in dataclasses.fields(own)}
    with pytest.raises(TypeError, match="not a Sub"):
        cls.from_params(Sub(**values))


def test_branches_and_built_values_never_affect_each_other():
    base = NNOptimParams.builder().grad_clip(1.0)
    adamw = base.copy().adamw(max_lr=1e-3).build()
    sgd = base.copy().sgd(max_lr=0.05).build()
    assert (adamw.name, sgd.name) == (Optims.ADAMW, Optims.SGD)
    assert adamw.grad_clip_norm == sgd.grad_clip_norm == 1.0
    with pytest.raises(ValueError, match="cannot build yet"):
        base.build()

    first = trainer()
    built = first.build()
    branch = first.copy().optimizer("D", ADAM).scheduler("D", SCHEDULE)
    assert list(first.build().optims) == ["head"]
    assert list(branch.build().optims) == ["head", "D"]
    first.optimizer("E", ADAM)
    assert list(branch.build().optims) == ["head", "D"]
    assert list(built.optims) == ["head"]
    assert built == trainer().build()


def test_containers_are_copied_and_what_they_hold_is_shared():
    groups = [NNParamGroupSpec(name_pattern="a")]
    builder = NNOptimParams.builder().adam(max_lr=0.1).param_groups(groups)
    groups.append(NNParamGroupSpec(name_pattern="b"))
    built = builder.build()
    assert built.param_groups == groups[:1]
    assert built.param_groups[0] is groups[0]
    builder.param_groups([])
    assert built.param_groups == groups[:1]

    optims, metrics, loader = {"a": ADAM}, {"m": len}, [object()]
    params = NNTrainerParams(n_epochs=1, optims=optims, extra_metrics=metrics, train_loader=loader)
    before = params.state()
    optims["b"], metrics["n"] = ADAM, max
    assert params.state() == before
    assert dict(params.extra_metrics) == {"m": len}
    assert params.train_loader is loader
    copy = NNTrainerParamsBuilder.from_params(params).copy().build()
    assert copy.train_loader is loader
    assert copy.optims["a"] is ADAM
    assert copy.extra_metrics["m"] is len


def test_built_mappings_are_read_only():
    params = trainer().extra_metrics({"m": len}).build()
    for mapping in (params.optims, params.schedulers, params.extra_metrics):
        with pytest.raises(TypeError):
            mapping["x"] = 1
        with pytest.raises(TypeError):
            del mapping["m"]
    for copy in (
        dataclasses.replace(params, seed=1),
        params.with_train_loader([1]),
        params.with_val_loader([1]),
        NNTrainerParams.from_state(params.state()),
    ):
        with pytest.raises(TypeError):
            copy.optims["x"] = ADAM


def test_data_ids_tell_sibling_branches_apart():
    base = trainer().train_loader([1])
    plain = base.copy().data_id("split-a").build()
    scheduled = base.copy().data_id("split-b").scheduler("head", SCHEDULE).build()
    assert plain.state()["data_id"] != scheduled.state()["data_id"]
    assert plain.train_loader is scheduled.train_loader
    bad = base.copy().scheduler("typo", SCHEDULE)
    assert base.build().data_id is None
    with pytest.raises(ValueError, match="typo"):
        bad.build()


def test_no_builder_reads_data():
    class Untouchable:
        def __iter__(self):
            raise AssertionError("a builder read data")

        def __len__(self):
            raise AssertionError("a builder measured data")

    loader = Untouchable()
    builder = trainer().train_loader(loader).val_loader(loader)
    params = builder.copy().build()
    again = NNTrainerParamsBuilder.from_params(params).build()
    assert again == params
    assert hash(again) == hash(params)
    assert again.train_loader is loader
    assert "Untouchable" not in repr(params)
