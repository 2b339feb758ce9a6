"""A batch that the net or the loss cannot take: what, which batch, and the way out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from nnx import Losses, Nets, NNModel, NNModelParams, NNParams, NNTrainParams, ProbabilitySpec
from torch.utils.data import DataLoader, TensorDataset

X, Y = torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 2
OUTSIDE = Y.clone()
OUTSIDE[9] = 7
CLASS = r"row 1 has the class 7, but the net has 2 outputs, for the classes 0 to 1; correct the"
WIDE = torch.randn(16, 5)
WIDTH = "the inputs have 5 features, but the net takes 4; give it the columns of .* input_dim=5"
DTYPE = r"the inputs are torch\.float64 and the net is torch\.float32; convert the data"


def model() -> NNModel:
    return NNModel(
        net_params=NNParams(input_dim=4, output_dim=2, hidden_dims=[8], dropout_prob=0.0),
        params=NNModelParams(net=Nets.FEED_FWD, loss=Losses.CROSS_ENTROPY),
    )


def loader(x: torch.Tensor, y: torch.Tensor) -> DataLoader[Any]:
    return DataLoader(TensorDataset(x, y), batch_size=4)


def train(train_loader: Any, val_loader: Any = None) -> Any:
    params = NNTrainParams(n_epochs=2, train_loader=train_loader, val_loader=val_loader, seed=0)
    return model().train(params)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: train(loader(X.double(), Y)), f"epoch 0, batch 0: {DTYPE}"),
        (lambda: train(loader(X, OUTSIDE)), f"epoch 0, batch 2: {CLASS}"),
        (
            lambda: train(loader(X, Y.float())),
            r"epoch 0, batch 0: the targets are torch\.float32, and a loss of classes takes",
        ),
        (lambda: train(loader(X, Y), loader(X, OUTSIDE)), f"evaluation, batch 2: {CLASS}"),
        (lambda: model().evaluate(loader(X.double(), Y)), f"evaluation, batch 0: {DTYPE}"),
        (lambda: model().predict(X.double()), DTYPE),
        (lambda: train(loader(WIDE, Y)), f"epoch 0, batch 0: {WIDTH}"),
        (lambda: model().evaluate(loader(WIDE, Y)), f"evaluation, batch 0: {WIDTH}"),
        (lambda: model().predict(WIDE), WIDTH),
        (lambda: model().predict(torch.randn(3, 2, 3)), WIDTH.replace("5", "6")),
        (
            lambda: train([(X, Y[:3])]),
            "epoch 0, batch 0: 16 rows of outputs cannot be compared with 3 targets; a batch has",
        ),
    ],
)
def test_a_batch_that_does_not_fit_is_named(
    call: Callable[[], Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert isinstance(caught.value.__cause__, (RuntimeError, IndexError, ValueError))


def test_a_table_of_pandas_is_no_loader() -> None:
    frame = pd.DataFrame(X.numpy(), columns=list("abcd"))
    for refused in (lambda: train(frame), lambda: train(loader(X, Y), frame["a"])):
        with pytest.raises(
            ValueError, match=r"_loader is a pandas .* gives no batches; nnx.NNTabu"
        ):
            refused()
    with pytest.raises(TypeError, match=r"a pandas DataFrame is neither .*; give batches of inp"):
        model().evaluate(frame)
    with pytest.raises(ValueError, match=r"got Tensor; a loader gives them: DataLoader\(TensorDat"):
        model().evaluate(X)


def test_another_error_of_the_net_stays_as_it_is() -> None:
    broken = model()
    broken.net.layers[1] = torch.nn.Linear(9, 2)
    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        broken.predict(X)
    assert not isinstance(caught.value, ValueError)


def test_an_ignored_target_is_not_the_one_that_is_named() -> None:
    ignored = OUTSIDE.clone()
    ignored[8] = -100
    with pytest.raises(ValueError, match=CLASS):
        model().evaluate(loader(X, ignored))


@pytest.mark.parametrize("table", [pd.DataFrame(X.numpy()), pd.DataFrame(X.numpy())[0]])
def test_a_table_is_no_batch(table: Any) -> None:
    for call in (
        lambda: model().predict(table),
        lambda: model().predict_proba(table, ProbabilitySpec("categorical")),
        lambda: model().iter_predict(table),
    ):
        with pytest.raises(TypeError, match=r"a pandas \w+ is neither .*to_numpy"):
            call()
    frame = pd.DataFrame(X.numpy())
    net = model()
    assert (
        net.predict(frame[[0, 1, 2, 3]].to_numpy("float32")).classes == net.predict(X).classes
    ).all()
