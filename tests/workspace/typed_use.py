"""What a type checker sees of the lazy package; ``nox -s types`` checks it, nothing runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import nnx
import numpy as np
import torch
from nnx import (
    Devices,
    NNCheckpoint,
    NNModel,
    NNModelParams,
    NNParams,
    NNRun,
    NNTrainParams,
    SchedulerSpec,
    set_seed,
)
from nnx.fitting import Fitted
from nnx.models import Model
from nnx.peft import apply_lora_to
from nnx.plugins import Registry
from nnx.result import Err, Ok, Result
from nnx.sklearn import NNClassifier, NNRegressor
from torch import nn

if TYPE_CHECKING:
    from typing_extensions import assert_type

    def a_run_is_typed(model: NNModel, params: NNTrainParams, found: NNCheckpoint) -> None:
        set_seed(0)
        assert_type(model.train(params), NNRun)
        assert_type(NNModel.from_checkpoint(found), NNModel)
        assert_type(params.n_epochs, int)
        apply_lora_to(model.net, "*", r=4)
        NNParams(input_dim=2, output_dim=2, wrong=1)  # type: ignore[call-arg]

    def a_fit_is_typed(make: Callable[[], nn.Module], x: torch.Tensor, y: torch.Tensor) -> None:
        fitted = nnx.fit(make, (x, y), loss="cross_entropy", epochs=2, on_existing="resume")
        assert_type(fitted, Fitted)
        assert_type(fitted.model, NNModel)
        assert_type(fitted.best().run, NNRun)
        assert_type(fitted.evaluate().accuracy, float | None)
        assert_type(NNRun.find("accuracy > 0.9")[0], NNRun)
        nnx.fit(make, (x, y), epoch=2)  # type: ignore[call-arg]

    def an_estimator_is_typed(x: np.ndarray, y: np.ndarray) -> None:
        assert_type(NNClassifier(epochs=2).fit(x, y), NNClassifier)
        assert_type(NNRegressor().fit(x, y).predict(x), np.ndarray)
        NNClassifier(epoch=2)  # type: ignore[call-arg]

    def a_word_is_read_as_its_member() -> None:
        params = NNModelParams(net="feed_fwd", device="auto", loss=nn.CrossEntropyLoss())
        assert_type(params.device, Devices)
        assert_type(NNTrainParams(n_epochs=1, scheduler=None).n_epochs, int)
        NNTrainParams(n_epochs=1, scheduler=SchedulerSpec("wsd", config={"floor": 0.1}))
        NNModelParams(device=3)  # type: ignore[arg-type]

    def a_model_is_what_the_rooms_below_know(model: NNModel) -> Model:
        return model

    def a_registry_is_typed(registry: Registry[float]) -> None:
        assert_type(registry.resolve("acme.kappa", 1), float)

    def a_result_narrows(result: Result[int, str]) -> None:
        if isinstance(result, Ok):
            assert_type(result.value, int)
        else:
            assert_type(result, Err[str])
