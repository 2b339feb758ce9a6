"""Post-training quantization: INT8 weights, no calibration data, no retraining."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, TypeVar

from nnx.peft.merging import unload_merged
from nnx.quantize.torchao import require

if TYPE_CHECKING:
    from nnx.nn_model import NNModel

_M = TypeVar("_M", bound="NNModel")


def quantize_int8(model: _M) -> _M:
    """A copy of ``model`` whose Linear weights are INT8 (per output channel, symmetric).

    Activations stay in the model's dtype. The copy is of the model's own class
    and shares everything with it but ``net``, which is a quantized deep copy:
    it predicts, evaluates and generates like the original. It is for inference:
    training and saving it are refused. Merged adapters are part of the copy's
    plain layers; unmerged ones stay beside an INT8 base. The original is
    untouched.

    Raises ``ImportError`` without torchao and ``TypeError`` for a bare module.
    """
    if not hasattr(model, "net"):
        raise TypeError(
            f"quantize_int8 takes an NNModel, not a {type(model).__name__}; wrap it in "
            "NNModel(module=..., params=...)"
        )
    quantize_ = require("torchao.quantization:quantize_", "INT8 quantization")
    config = require("torchao.quantization:Int8WeightOnlyConfig", "INT8 quantization")
    quantized = copy.copy(model)
    quantized.net = copy.deepcopy(model.net)
    unload_merged(quantized.net)
    quantize_(quantized.net, config())
    return quantized
