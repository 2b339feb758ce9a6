"""What a type checker sees of the lazy package; ``nox -s types`` checks it, nothing runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nnx import NNCheckpoint, NNModel, NNParams, NNRun, NNTrainParams, set_seed
from nnx.models import Model
from nnx.peft import apply_lora_to
from nnx.plugins import Registry
from nnx.result import Err, Ok, Result

if TYPE_CHECKING:
    from typing_extensions import assert_type

    def a_run_is_typed(model: NNModel, params: NNTrainParams, found: NNCheckpoint) -> None:
        set_seed(0)
        assert_type(model.train(params), NNRun)
        assert_type(NNModel.from_checkpoint(found), NNModel)
        assert_type(params.n_epochs, int)
        apply_lora_to(model.net, "*", r=4)
        NNParams(input_dim=2, output_dim=2, wrong=1)  # type: ignore[call-arg]

    def a_model_is_what_the_rooms_below_know(model: NNModel) -> Model:
        return model

    def a_registry_is_typed(registry: Registry[float]) -> None:
        assert_type(registry.resolve("acme.kappa", 1), float)

    def a_result_narrows(result: Result[int, str]) -> None:
        if isinstance(result, Ok):
            assert_type(result.value, int)
        else:
            assert_type(result, Err[str])
