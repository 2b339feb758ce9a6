"""Plain words where there are enums: the same value, state and id as with the member."""

from __future__ import annotations

import pytest
import torch
from nnx import (
    Activations,
    Devices,
    Losses,
    Nets,
    NNModel,
    NNModelParams,
    NNOptimParams,
    NNParams,
    NNSchedulerParams,
    NNTrainerParams,
    NNTrainParams,
    Optims,
    Schedulers,
    SchedulerSpec,
)
from nnx.params import run_state
from nnx.params.scheduler import DEFAULT_SCHEDULER

SHAPE = {"input_dim": 3, "hidden_dims": [4], "output_dim": 2, "dropout_prob": 0.0}
RATES = {"max_lr": 0.1, "weight_decay": 0.0, "momentum": (0.9, 0.99)}
PLATEAU = {"min_lr": 0.0, "factor": 0.5, "patience": 1, "cooldown": 0, "threshold": 0.0}


@pytest.mark.parametrize(
    ("word", "member"),
    [
        (NNModelParams(net="Feed_Fwd"), NNModelParams(net=Nets.FEED_FWD)),
        (NNModelParams(device="CUDA"), NNModelParams(device=Devices.CUDA)),
        (NNModelParams(loss="mse"), NNModelParams(loss=Losses.MEAN_SQUARED_ERROR)),
        (NNModelParams(loss="BCE"), NNModelParams(loss=Losses.BINARY_CROSS_ENTROPY)),
        (NNModelParams(loss="nll"), NNModelParams(loss=Losses.NEGATIVE_LOG_LIKELIHOOD)),
        (NNParams(**SHAPE, activation="gelu"), NNParams(**SHAPE, activation=Activations.GELU)),
        (
            NNParams(**SHAPE, activations=["RELU"]),
            NNParams(**SHAPE, activations=[Activations.RELU]),
        ),
        (NNOptimParams(name="AdamW", **RATES), NNOptimParams(name=Optims.ADAMW, **RATES)),
        (
            NNSchedulerParams(**PLATEAU, kind="one_cycle"),
            NNSchedulerParams(**PLATEAU, kind=Schedulers.ONE_CYCLE),
        ),
        (
            NNTrainParams(n_epochs=2, scheduler="plateau"),
            NNTrainParams(n_epochs=2, scheduler=DEFAULT_SCHEDULER),
        ),
        (
            NNTrainParams(n_epochs=2, scheduler=None),
            NNTrainParams(n_epochs=2, scheduler=SchedulerSpec("constant")),
        ),
    ],
)
def test_a_word_is_the_member(word, member):
    assert word == member
    assert word.state() == member.state()
    assert type(word).from_state(word.state()) == member


def test_words_give_the_id_of_members():
    def id_of(net, loss, optim):
        state = run_state(
            net=NNParams(**SHAPE), model=NNModelParams(net=net, loss=loss),
            train=NNTrainParams(n_epochs=1, optim=NNOptimParams(name=optim, **RATES)),
        )  # fmt: skip
        return state["id"]

    words = id_of("FEED_FWD", "Cross_Entropy", "adam")
    assert words == id_of(Nets.FEED_FWD, Losses.CROSS_ENTROPY, Optims.ADAM)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NNModelParams(net="feedfwd"), "NNModelParams.net must be one of conv, feed_fwd, .*; did you mean 'feed_fwd'"),
        (lambda: NNModelParams(device="cude"), "NNModelParams.device must be one of cpu, mps, cuda, auto, not 'cude'; did you mean 'cuda'"),
        (lambda: NNModelParams(loss="crossentropy"), "NNModelParams.loss must be one of .*focal.*did you mean 'cross_entropy'"),
        (lambda: NNOptimParams(name="adamww", **RATES), "NNOptimParams.name must be one of sgd, .*did you mean 'adamw'"),
        (lambda: NNTrainParams(n_epochs=1, scheduler="warmup-cosine"), "NNTrainParams.scheduler must be one of .*did you mean 'warmup_cosine'"),
        (lambda: NNTrainerParams(n_epochs=1, optims={"a": NNOptimParams(name="sgd", max_lr=1, weight_decay=0, momentum=0)}, schedulers={"a": "exponentia"}), r"NNTrainerParams.schedulers\['a'\] must be one of .*did you mean 'exponential'"),
    ],
)  # fmt: skip
def test_a_wrong_word_names_what_is_allowed_and_what_is_closest(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_best_device_is_chosen_where_the_model_is_built(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    model = NNModel(NNParams(**SHAPE), NNModelParams(net="feed_fwd", device="auto"))
    assert model.params.device is Devices.AUTO
    assert model.params.state()["device"] == "auto"
    assert model.device == torch.device("cpu")
    assert Devices.AUTO.resolved is Devices.CPU
    assert Devices.AUTO.is_available
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert Devices.AUTO.resolved is Devices.CUDA
    assert Devices.AUTO() == torch.device("cuda")
