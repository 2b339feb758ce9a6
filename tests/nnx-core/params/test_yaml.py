"""Configurations written by hand: a whole run in one file, and its parts."""

from __future__ import annotations

import pytest
import yaml
from nnx import (
    Activations,
    Losses,
    MetricSpec,
    ModelSpec,
    MonitorSpec,
    Nets,
    NNCheckpointTransform,
    NNModelParams,
    NNOptimParams,
    NNParamGroupSpec,
    NNParams,
    NNSchedulerParams,
    NNTrainerParams,
    NNTrainParams,
    NNTransformerParams,
    Optims,
    RunConfig,
    TaskSpec,
)
from nnx.utils import yamlio

BY_HAND = """
model:
  net: feed_fwd
  loss: cross_entropy
  device: cpu
net:
  input_dim: 8
  output_dim: 3
  dropout_prob: 0.1
  hidden_dims: [16]
  activation: relu
train:
  n_epochs: 8
  seed: 42
  optim: {name: adam, max_lr: 1e-2, momentum: [0.9, 0.999], weight_decay: 5e-5}
"""


def config(**changes):
    values = {
        "net": NNParams(input_dim=8, output_dim=3, hidden_dims=[16], dropout_prob=0.1),
        "model": NNModelParams(net=Nets.FEED_FWD, loss=Losses.CROSS_ENTROPY),
        "train": NNTrainParams(
            n_epochs=3,
            metrics=[MetricSpec("f1", config={"average": "macro"}, name="macro")],
            monitor=MonitorSpec(metric="macro", mode="max"),
        ),
    }
    return RunConfig(**{**values, **changes})


def test_a_file_written_by_hand_has_the_id_of_the_same_configuration(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(BY_HAND)
    read = RunConfig.from_yaml(path)
    assert read.id == "61a82811ceda5519c0c3c29ea9ed4029"
    assert read.net.activation is Activations.RELU
    assert read.train.optim.max_lr == 0.01
    assert read == RunConfig.from_yaml(str(path)) == RunConfig.from_yaml(BY_HAND)


def test_a_run_comes_back_from_its_own_file_and_from_any_yaml_reader(tmp_path):
    run = config(
        salt="1e5",
        transforms=(NNCheckpointTransform("lora", 1, {"targets": ["a"], "r": 4}),),
    )
    text = run.to_yaml(tmp_path / "run.yaml")
    assert RunConfig.from_yaml(tmp_path / "run.yaml") == run
    assert (tmp_path / "run.yaml").read_text() == text
    assert yaml.safe_load(text) == run.state()
    assert "salt: '1e5'" in text


def test_a_trainer_alone_is_enough_and_has_no_id_of_its_own():
    trainer = (
        NNTrainerParams.builder()
        .n_epochs(2)
        .optimizer("G", NNOptimParams.builder().adamw(max_lr=1e-3).build())
        .build()
    )
    run = config(train=None, trainer=trainer)
    assert run.id is None
    assert set(run.state()) == {"model", "net", "trainer"}
    assert RunConfig.from_yaml(run.to_yaml()) == run


def test_a_registered_model_has_no_net_section():
    model = NNModelParams(net=ModelSpec("acme.encoder", 1, {"width": 64}))
    run = config(net=None, model=model)
    assert RunConfig.from_yaml(run.to_yaml()).model.net.config["width"] == 64
    with pytest.raises(ValueError, match=r"Nets.FEED_FWD is built from NNParams, not None"):
        config(net=None)


def test_the_data_is_given_to_a_stored_configuration():
    loader, val = [1], [2]
    run = config().with_data(loader, val)
    assert run.id == config().id
    assert run.train.train_loader is loader
    assert run.train.val_loader is val
    assert config().with_data(loader, data_id="fold-2").train.data_id == "fold-2"


@pytest.mark.parametrize(
    ("cls", "attribute"),
    [(NNTrainParams, "train"), (NNModelParams, "model"), (NNParams, "net")],
)
def test_a_part_is_read_from_a_whole_file_or_from_its_own(tmp_path, cls, attribute):
    run = config()
    run.to_yaml(tmp_path / "run.yaml")
    part = getattr(run, attribute)
    assert cls.from_yaml(tmp_path / "run.yaml") == part
    part.to_yaml(tmp_path / "part.yaml")
    assert cls.from_yaml(tmp_path / "part.yaml") == part


@pytest.mark.parametrize(
    "part",
    [
        NNOptimParams.builder().sgd(max_lr=0.1).build(),
        NNSchedulerParams.builder()
        .step(step_size=2, min_lr=0, factor=0.5, patience=1, cooldown=0, threshold=0)
        .build(),
        NNTransformerParams.builder()
        .vocab(64)
        .layers(n=1, heads=2, d_model=8)
        .context(max_seq_len=4)
        .build(),
        NNParamGroupSpec(name_pattern="*.bias", lr=0.1),
        NNModelParams(task=TaskSpec.categorical(3, labels=["yes", "no", "1e3"])),
    ],
)
def test_every_part_round_trips(part):
    assert type(part).from_yaml(part.to_yaml()) == part


def test_reading_a_net_finds_the_class_that_wrote_it():
    params = (
        NNTransformerParams.builder()
        .vocab(64)
        .layers(n=1, heads=2, d_model=8)
        .context(max_seq_len=4)
        .build()
    )
    assert NNParams.from_yaml(params.to_yaml()) == params


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("train:", "trian:", r"a run has no key 'trian'; did you mean 'train'"),
        ("n_epochs:", "n_epoch:", r"NNTrainParams has no key 'n_epoch'; did you mean 'n_epochs'"),
        ("max_lr:", "maxlr:", r"'optim': NNOptimParams has no key 'maxlr'; did you mean 'max_lr'"),
        ("feed_fwd", "feed_forward", r"no Nets is called 'feed_forward'; did you mean 'feed_fwd'"),
        ("name: adam,", "name: adma,", r"no Optims is called 'adma'; did you mean 'adam'"),
        ("n_epochs: 8", "n_epochs: '8'", r"n_epochs must be an integer >= 1, not '8'"),
        ("n_epochs: 8", "n_epochs: 8.0", r"n_epochs must be an integer >= 1, not 8.0"),
        ("max_lr: 1e-2", "max_lr: '1e-2'", r"max_lr must be a finite real number >= 0"),
        ("max_lr: 1e-2", "max_lr: .nan", r"max_lr must be a finite real number >= 0, not nan"),
        ("hidden_dims: [16]", "hidden_dims: 16", r"hidden_dims must be a list or None, not 16"),
        ("  n_epochs: 8\n", "", r"NNTrainParams lacks 'n_epochs'"),
        ("  seed: 42", "  seed: 42\n  seed: 43", r"the key 'seed' is given twice \(line 15\)"),
        ("  seed: 42", "  seed: [", r"run.yaml is not valid YAML"),
    ],
)
def test_a_mistake_is_named_with_its_file_and_the_way_out(tmp_path, old, new, message):
    path = tmp_path / "run.yaml"
    path.write_text(BY_HAND.replace(old, new, 1))
    with pytest.raises(ValueError, match=message) as refusal:
        RunConfig.from_yaml(path)
    assert "run.yaml" in str(refusal.value)


def test_a_run_needs_a_model_and_a_training():
    with pytest.raises(ValueError, match="a run needs the section 'model'"):
        RunConfig.from_yaml("train: {n_epochs: 1}\n")
    with pytest.raises(ValueError, match="train must be an NNTrainParams when there is no trainer"):
        RunConfig.from_yaml(BY_HAND[: BY_HAND.index("train:")])
    with pytest.raises(ValueError, match="salt must be a non-empty string, not 3"):
        config(salt=3)
    with pytest.raises(ValueError, match=r"RunConfig\.train must be an NNTrainParams"):
        config(train={"n_epochs": 1})


@pytest.mark.parametrize("text", ["", "[1, 2]", "word"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match="a run must be a mapping"):
        RunConfig.from_yaml(path)


def test_text_in_another_encoding_is_refused(tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"run\.yaml is not UTF-8 text"):
        RunConfig.from_yaml(tmp_path / "run.yaml")


def test_a_merge_gives_way_to_the_mappings_own_key():
    params = NNTrainParams.from_yaml("<<: {seed: 3, n_epochs: 2}\nseed: 4\n")
    assert (params.seed, params.n_epochs) == (4, 2)


@pytest.mark.parametrize("text", ["open('x')", "((((", "a", "(" * 10_000])
def test_a_stored_literal_is_data_only(text):
    state = {**NNOptimParams.builder().adam(max_lr=1).build().state(), "momentum": text}
    with pytest.raises(ValueError, match=r"cannot read 'momentum': .* is not a number, a list or"):
        NNOptimParams.from_state(state)


@pytest.mark.parametrize("transforms", ["lora", [{"name": ""}], [3]])
def test_transforms_are_a_list_of_transforms(transforms):
    with pytest.raises(ValueError, match=r"transform|Transform"):
        RunConfig.from_state({**config().state(), "transforms": transforms})
    with pytest.raises(ValueError, match=r"transforms\[0\] must be an NNCheckpointTransform"):
        config(transforms=["lora"])


def test_a_missing_file_says_so():
    with pytest.raises(FileNotFoundError, match=r"nowhere\.yaml"):
        RunConfig.from_yaml("nowhere.yaml")


def test_nothing_in_a_file_is_run():
    with pytest.raises(ValueError, match="not valid YAML"):
        RunConfig.from_yaml("model: !!python/object/apply:os.getcwd []\n")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E5", 1e5),
        ("-2e+3", -2000.0),
        ("1.5e-07", 1.5e-7),
        ("1e", "1e"),
        ("e5", "e5"),
    ],
)
def test_numbers_are_read_as_people_write_them(text, value):
    assert yamlio.load(text) == value
    assert type(yamlio.load(text)) is type(value)


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("old")
    with pytest.raises(FileNotFoundError):
        config().to_yaml(tmp_path / "absent" / "run.yaml")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["run.yaml"]


def test_an_optimizer_is_named_in_the_file():
    assert "name: adamw" in NNOptimParams.builder().adamw(max_lr=0.1).build().to_yaml()
    assert Optims("adamw") is Optims.ADAMW
