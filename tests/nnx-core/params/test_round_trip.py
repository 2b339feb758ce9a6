"""Properties of generated configurations: the round trip, and what leaves an id alone."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import random

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from nnx import (
    Activations,
    Checkpoints,
    Devices,
    Losses,
    MetricSpec,
    ModelSpec,
    MonitorSpec,
    Nets,
    NNCheckpointTransform,
    NNConvParams,
    NNModelParams,
    NNMoEParams,
    NNOptimFactoryParams,
    NNOptimParams,
    NNParamGroupSpec,
    NNParams,
    NNSchedulerParams,
    NNTrainerParams,
    NNTrainParams,
    NNTransformerParams,
    NNViTParams,
    OptimizerFactorySpec,
    Optims,
    PrecisionPolicy,
    RunConfig,
    RuntimeModule,
    Schedulers,
    TaskSpec,
)
from nnx.params import run_id

counts = st.integers(1, 10**6)
small = st.integers(1, 6)
probabilities = st.floats(0, 1)
positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False, allow_nan=False)
non_negative = st.floats(min_value=0, allow_infinity=False, allow_nan=False) | st.integers(0, 9)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
words = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=12)
lines = st.text(st.characters(exclude_categories=["C", "Zl", "Zp"]), max_size=12).map(
    lambda text: text.strip() or "a name"
)
json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
configs = st.dictionaries(names, json_like, max_size=3)


def maybe(strategy):
    return st.none() | strategy


@st.composite
def nets(draw):
    hidden = draw(maybe(st.lists(counts, max_size=3)))
    base = {
        "input_dim": draw(counts),
        "output_dim": draw(counts),
        "dropout_prob": draw(probabilities),
        "hidden_dims": hidden,
        "n_heads": draw(maybe(small)),
        "activation": draw(st.sampled_from(Activations)),
    }
    kind = draw(
        st.sampled_from([NNParams, NNConvParams, NNMoEParams, NNTransformerParams, NNViTParams])
    )
    layers = len(hidden or ())
    heads = draw(small)
    if kind is NNConvParams:
        side, channels, blocks = draw(st.integers(10, 40)), draw(small), draw(st.integers(1, 2))
        base |= {
            "input_dim": channels * side * side,
            "in_channels": channels,
            "conv_channels": draw(st.lists(counts, min_size=blocks, max_size=blocks)),
            "kernel_size": 3,
            "padding": draw(st.integers(0, 2)),
        }
    elif kind is NNMoEParams:
        experts = draw(st.integers(2, 9))
        base |= {"num_experts": experts, "top_k": draw(st.integers(1, experts))}
    elif kind is NNTransformerParams:
        base |= {
            "n_heads": heads,
            "d_model": heads * 2 * draw(small),
            "vocab_size": draw(counts),
            "n_layers": draw(small),
            "max_seq_len": draw(counts),
            "ffn_mult": draw(small),
            "rope_base": draw(positive),
            "tie_embeddings": draw(st.booleans()),
            "attn_dropout": draw(probabilities),
            "resid_dropout": draw(probabilities),
        }
    elif kind is NNViTParams:
        patch = draw(small)
        base |= {
            "n_heads": heads,
            "d_model": heads * draw(small),
            "patch_size": patch,
            "image_size": patch * draw(small),
            "n_layers": draw(small),
            "in_channels": draw(small),
            "ffn_mult": draw(small),
        }
    per_layer = {"min_size": layers, "max_size": layers}
    base["activations"] = draw(maybe(st.lists(st.sampled_from(Activations), **per_layer)))
    base["dropout_probs"] = draw(maybe(st.lists(probabilities, **per_layer)))
    return kind(**base)


@st.composite
def groups(draw):
    rate = draw(st.sampled_from(["lr", "lr_multiplier", None]))
    return NNParamGroupSpec(
        name_pattern=draw(names),
        weight_decay=draw(maybe(non_negative)),
        **({} if rate is None else {rate: draw(positive)}),
    )


@st.composite
def optims(draw):
    shared = {
        "max_lr": draw(non_negative),
        "weight_decay": draw(non_negative),
        "grad_clip_norm": draw(maybe(positive)),
        "accumulate_grad_batches": draw(small),
        "param_groups": draw(maybe(st.lists(groups(), max_size=3))),
    }
    if draw(st.booleans()):
        spec = OptimizerFactorySpec(draw(words), draw(counts), draw(configs))
        return NNOptimFactoryParams(factory=spec, **shared)
    name = draw(st.sampled_from(Optims))
    beta = st.floats(0, 1, exclude_max=True)
    if name.is_adam:
        return NNOptimParams(
            name=name, momentum=(draw(beta), draw(beta)), eps=draw(positive), **shared
        )
    return NNOptimParams(name=name, momentum=draw(non_negative), **shared)


@st.composite
def schedules(draw):
    kind = draw(maybe(st.sampled_from(Schedulers)))
    plateau = kind in (None, Schedulers.REDUCE_LR_ON_PLATEAU)
    return NNSchedulerParams(
        min_lr=draw(non_negative),
        factor=draw(st.floats(0, 1, exclude_min=True, exclude_max=True)),
        patience=draw(st.integers(0, 9)),
        cooldown=draw(st.integers(0, 9)),
        threshold=draw(non_negative),
        kind=kind,
        max_lr=draw(maybe(positive)),
        clock="epoch" if plateau else draw(st.sampled_from(["epoch", "optimizer_update"])),
        **{k: draw(maybe(counts)) for k in ("step_size", "T_max", "total_steps", "warmup_steps")},
    )


@st.composite
def trainings(draw):
    metrics = draw(
        st.lists(
            st.builds(MetricSpec, words, small, configs, maybe(lines)),
            max_size=3,
            unique_by=lambda spec: spec.label,
        )
    )
    watched = [m.label for m in metrics if m.label not in ("loss", "error")]
    if len(watched) == len(metrics):
        watched += ["loss", "error"]
    monitor = None
    if watched:
        monitor = draw(
            maybe(
                st.builds(
                    MonitorSpec,
                    st.sampled_from(watched),
                    st.sampled_from(["train", "val"]),
                    maybe(st.sampled_from(["min", "max"])),
                    non_negative,
                    st.sampled_from(["skip", "error"]),
                    st.sampled_from(["skip", "error"]),
                )
            )
        )
    return {
        "n_epochs": draw(counts),
        "seed": draw(maybe(st.integers(0, 2**32 - 1))),
        "data_id": draw(maybe(names)),
        "save_phase_checkpoints": draw(st.booleans()),
        "checkpoint_every": draw(maybe(counts)),
        "metrics": metrics,
        "monitor": monitor,
        "resume_from_run_id": draw(maybe(names)),
        "resume_from_checkpoint": draw(st.sampled_from(["last", "best", Checkpoints.Q1])),
        "parent_run_id": draw(maybe(names)),
    }


@st.composite
def train_params(draw):
    return NNTrainParams(
        **draw(trainings()),
        optim=draw(optims()),
        scheduler=draw(schedules()),
        resume_epochs=draw(st.sampled_from(["additional", "planned"])),
    )


@st.composite
def trainer_params(draw):
    named = draw(st.dictionaries(names, optims(), min_size=1, max_size=3))
    return NNTrainerParams(
        **draw(trainings()),
        optims=named,
        schedulers={name: draw(schedules()) for name in list(named)[: draw(st.integers(0, 3))]},
        auto_step_schedulers=draw(st.booleans()),
    )


tasks = st.one_of(
    st.builds(TaskSpec.categorical, maybe(counts), ignore_index=maybe(st.integers(-100, 3))),
    st.builds(TaskSpec.multilabel, maybe(counts), threshold=probabilities),
    st.builds(TaskSpec.regression, st.just(2), labels=st.sampled_from([None, ("a", "b")])),
)
descriptors = st.one_of(
    st.builds(ModelSpec, words, small, configs, seed=st.integers(0, 9)),
    st.builds(RuntimeModule, names, names),
)
OWN_NET = {
    NNConvParams: Nets.CONV,
    NNMoEParams: Nets.FEED_FWD_MOE,
    NNTransformerParams: Nets.TRANSFORMER,
    NNViTParams: Nets.VIT,
    NNParams: Nets.FEED_FWD,
}


@st.composite
def runs(draw):
    net = draw(maybe(nets()))
    transforms = st.lists(st.builds(NNCheckpointTransform, words, small, configs), max_size=2)
    modes = st.sampled_from(["fp32", "fp16", "bf16"])
    precision = draw(maybe(st.builds(PrecisionPolicy, modes, st.sampled_from(["error", "fp32"]))))
    return RunConfig(
        net=net,
        model=NNModelParams(
            net=draw(descriptors) if net is None else OWN_NET[type(net)],
            device=draw(st.sampled_from(Devices)),
            loss=draw(st.sampled_from(Losses)),
            mixed_precision=precision is None and draw(st.booleans()),
            task=draw(maybe(tasks)),
            precision=precision,
        ),
        train=draw(train_params()),
        trainer=draw(maybe(trainer_params())),
        salt=draw(maybe(lines)),
        transforms=tuple(draw(transforms)),
    )


def parts(run):
    yield run.model
    yield run.train
    yield run.train.optim
    yield run.train.scheduler
    if run.net is not None:
        yield run.net
    if run.trainer is not None:
        yield run.trainer


@given(runs())
@settings(max_examples=30)
def test_every_state_is_rebuilt_to_the_same_state_and_id(run):
    for part in parts(run):
        again = type(part).from_state(part.state())
        assert again.state() == part.state()
        assert str(again.state()) == str(part.state())
        assert type(part).from_state(again.state()) == again
    again = RunConfig.from_state(run.state())
    assert str(again.state()) == str(run.state())
    assert again.id == run.id == run_id(run.state())


@given(runs(), st.randoms(use_true_random=False))
@settings(max_examples=30)
def test_the_order_of_fields_and_keys_leaves_the_id_alone(run, rng):
    assert RunConfig.from_state(shuffled(run.state(), rng)).id == run.id
    for part in parts(run):
        fields = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
        assert str(type(part)(**shuffled(fields, rng, deep=False)).state()) == str(part.state())


def shuffled(value, rng: random.Random, deep=True):
    """The same data with the keys of every mapping in another order."""
    if isinstance(value, dict):
        items = list(value.items())
        rng.shuffle(items)
        return {k: shuffled(v, rng) if deep else v for k, v in items}
    if isinstance(value, list):
        return [shuffled(item, rng) for item in value]
    return value


@given(runs())
@settings(max_examples=30)
def test_every_default_spelled_out_leaves_the_id_alone(run):
    for part in parts(run):
        everything = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
        assert type(part)(**everything) == part
        state = part.state()
        for field in type(part)._STATE:
            state.setdefault(
                field.key or field.name, field.encode(getattr(part, field.name))
            ) if getattr(part, field.name) is not None else None
        if (
            isinstance(part, (NNTrainParams, NNTrainerParams))
            and "parent_run_id" not in part.state()
        ):
            state.pop("parent_checkpoint", None)
        assert str(type(part).from_state(state).state()) == str(part.state())


@given(runs())
@settings(max_examples=30)
def test_yaml_pickle_and_copies_hold_the_same_configuration(run):
    stored = RunConfig.from_state(run.state())
    text = run.to_yaml()
    assert RunConfig.from_yaml(text) == stored
    assert yaml.safe_load(text) == run.state()
    for other in (pickle.loads(pickle.dumps(run)), copy.copy(run), copy.deepcopy(run)):
        assert other == run
        assert hash(other) == hash(run)
        assert other.id == run.id
    assert dataclasses.replace(run) == run


def test_a_default_that_is_not_set_is_not_in_the_state():
    assert NNModelParams(net=Nets.FEED_FWD).state() == {
        "net": "feed_fwd",
        "loss": "cross_entropy",
        "device": "cpu",
    }
    assert set(NNTrainParams(n_epochs=1).state()) == {"n_epochs", "optim", "scheduler"}
    optim = NNOptimParams.builder().adam(max_lr=1).build()
    assert set(optim.state()) == {"max_lr", "momentum", "name", "weight_decay"}
    assert set(NNTrainerParams(n_epochs=1, optims={"a": optim}).state()) == {"n_epochs", "optims"}


def test_a_repeated_net_wide_value_is_a_default():
    base = {"input_dim": 8, "output_dim": 3, "hidden_dims": [4, 4], "dropout_prob": 0.1}
    same = NNParams(**base, dropout_probs=[0.1, 0.1], activations=[Activations.LEAKY_RELU] * 2)
    assert same.state() == NNParams(**base).state()
    other = NNParams(
        **base, dropout_probs=[0.1, 0.2], activations=[Activations.LEAKY_RELU, Activations.RELU]
    )
    assert other.state()["dropout_probs"] == "[0.1, 0.2]"
    assert other.state()["activations"] == "['leaky_relu', 'relu']"
    assert NNParams.from_state(other.state()) == other
    by_hand = {**other.state(), "dropout_probs": [0.1, 0.2], "activations": ["leaky_relu", "relu"]}
    assert NNParams.from_state(by_hand) == other
