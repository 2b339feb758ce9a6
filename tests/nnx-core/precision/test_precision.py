from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from nnx.enums import Nets
from nnx.params import NNModelParams
from nnx.precision import (
    PRECISION_MODES,
    REFERENCE_TOLERANCES,
    PrecisionPolicy,
    PrecisionUnsupportedError,
    ReferenceTolerance,
    ResolvedPrecision,
    inference_precision,
    precision_support,
    resolve_precision,
)


def params(precision=None, mixed_precision=False):
    return SimpleNamespace(precision=precision, mixed_precision=mixed_precision)


def test_a_record_speaks_in_the_words_of_the_arguments_that_asked():
    asked = {
        "policy": {"precision": PrecisionPolicy("bf16")},
        "mixed_precision": {"mixed_precision": True},
        "default": {},
    }
    for source, arguments in asked.items():
        record = resolve_precision(NNModelParams(net=Nets.FEED_FWD, **arguments), "cpu").record()
        assert record["source"] == source
        assert {record["requested"], record["effective"]} <= {"fp32", "fp16", "bf16"}
        assert ResolvedPrecision.from_record(record).record() == record


def test_the_public_constants():
    assert PRECISION_MODES == ("fp32", "fp16", "bf16")
    assert REFERENCE_TOLERANCES["fp16"] == ReferenceTolerance(loss=0.005, weights=0.0005)
    assert REFERENCE_TOLERANCES["bf16"] == ReferenceTolerance(loss=0.05, weights=0.005)


def test_a_policy_is_data_and_comes_back_from_it():
    policy = PrecisionPolicy("bf16", fallback="fp32")
    assert policy.state() == {"mode": "bf16", "fallback": "fp32"}
    assert PrecisionPolicy.from_state(policy.state()) == policy
    assert PrecisionPolicy() == PrecisionPolicy("fp32", "error")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "float16"}, "PrecisionPolicy.mode must be one of fp32, fp16, bf16"),
        ({"mode": True}, "PrecisionPolicy.mode"),
        ({"mode": []}, "PrecisionPolicy.mode"),
        ({"fallback": "bf16"}, "PrecisionPolicy.fallback must be one of error, fp32"),
    ],
)
def test_a_policy_refuses_values_outside_its_domain(arguments, message):
    with pytest.raises(ValueError, match=message):
        PrecisionPolicy(**arguments)


def test_an_unknown_key_of_a_saved_policy_is_refused():
    with pytest.raises(ValueError, match="PrecisionPolicy has no key 'scale'"):
        PrecisionPolicy.from_state({"mode": "fp16", "scale": 2})


def test_bf16_on_cpu_autocasts_for_real_and_needs_no_scaler():
    precision = PrecisionPolicy("bf16").resolve("cpu")
    assert (precision.requested, precision.effective, precision.source) == (
        "bf16",
        "bf16",
        "policy",
    )
    assert precision.reduced
    assert not precision.uses_scaler
    assert precision.build_scaler() is None
    assert precision.autocast_dtype is torch.bfloat16
    layer = torch.nn.Linear(3, 2)
    with precision.autocast():
        output = layer(torch.ones(4, 3))
    assert output.dtype is torch.bfloat16
    full = precision.output(output)
    assert full.dtype is torch.float32
    full.sum().backward()
    assert layer.weight.grad.dtype is torch.float32
    assert torch.equal(layer.bias.grad, torch.full((2,), 4.0))


def test_output_leaves_full_precision_tensors_alone():
    precision = ResolvedPrecision("fp32", "fp32", "cpu")
    double = torch.ones(2, dtype=torch.float64)
    assert precision.output(double) is double


def test_fp16_without_cuda_is_refused_with_the_way_out():
    with pytest.raises(
        PrecisionUnsupportedError, match=r"'fp16' is not supported on cpu.*fallback"
    ):
        PrecisionPolicy("fp16").resolve("cpu")
    assert issubclass(PrecisionUnsupportedError, ValueError)


def test_a_fallback_trains_in_full_precision_and_says_why():
    precision = PrecisionPolicy("fp16", fallback="fp32").resolve(torch.device("cpu"))
    assert (precision.requested, precision.effective) == ("fp16", "fp32")
    assert "needs CUDA" in precision.fallback_reason
    assert not precision.reduced
    with precision.autocast():
        assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype is torch.float32


def test_the_default_is_full_precision():
    precision = resolve_precision(params(), "cpu")
    assert (precision.requested, precision.effective, precision.source) == (
        "fp32",
        "fp32",
        "default",
    )
    assert precision.fallback_reason is None
    assert precision.applies_to == ("training", "validation", "inference")


def test_the_legacy_flag_is_full_precision_on_cpu_and_covers_training_only():
    precision = resolve_precision(params(mixed_precision=True), "cpu")
    assert (precision.requested, precision.effective) == ("fp16", "fp32")
    assert precision.source == "mixed_precision"
    assert precision.fallback_reason
    assert precision.covers == precision.applies_to == ("training",)
    assert precision.record()["covers"] == ["training"]


def test_the_legacy_flag_is_fp16_on_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    precision = resolve_precision(params(mixed_precision=True), "cuda:0")
    assert (precision.effective, precision.device_type) == ("fp16", "cuda")
    assert precision.uses_scaler
    assert set(precision.tf32) == {"matmul", "cudnn"}
    assert all(isinstance(value, bool) for value in precision.tf32.values())
    assert inference_precision(params(mixed_precision=True), "cuda").effective == "fp32"


def test_an_explicit_policy_wins_over_the_legacy_flag_and_governs_inference():
    asked = params(PrecisionPolicy("bf16"), mixed_precision=True)
    assert resolve_precision(asked, "cpu").source == "policy"
    assert inference_precision(asked, "cpu").effective == "bf16"
    assert resolve_precision(asked, "cpu").covers == ("training", "validation", "inference")


def test_support_names_a_reason_for_what_is_missing():
    support = precision_support("cpu")
    assert support["cpu"]["fp32"] == support["cpu"]["bf16"] == "supported"
    assert "CUDA" in support["cpu"]["fp16"]
    everywhere = precision_support()
    assert set(everywhere) == {"cpu", "cuda", "mps"}
    if not torch.cuda.is_available():
        assert everywhere["cuda"]["fp32"] == "CUDA is not available"


def test_a_device_may_be_an_enum_member_that_builds_it():
    member = SimpleNamespace()
    assert resolve_precision(params(), lambda: torch.device("cpu")).device_type == "cpu"
    assert member is not None


def test_the_record_holds_plain_values_and_comes_back():
    precision = PrecisionPolicy("fp16", fallback="fp32").resolve("cpu").scoped(("objective",))
    record = precision.record()
    assert record["covers"] == ["objective"]
    assert record["tf32"] == {"matmul": None, "cudnn": None}
    assert ResolvedPrecision.from_record(record) == precision
    assert precision.applies_to == ("objective",)
    assert "covers" not in ResolvedPrecision("fp32", "fp32", "cpu").record()


def test_an_unknown_mode_in_a_record_is_refused():
    with pytest.raises(ValueError, match=r"ResolvedPrecision\.effective"):
        ResolvedPrecision.from_record(
            {"requested": "fp32", "effective": "fp8", "device_type": "cpu"}
        )


def test_a_resolved_precision_is_a_value():
    first, again = (PrecisionPolicy("bf16").resolve("cpu") for _ in range(2))
    assert first == again
    assert len({first, again}) == 1
    with pytest.raises(TypeError):
        first.tf32["matmul"] = True


@pytest.mark.parametrize("device", ["cuda", "cuda:7", "mps"])
def test_full_precision_needs_no_device(monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    resolved = PrecisionPolicy("fp32").resolve(device)
    assert (resolved.effective, resolved.fallback_reason) == ("fp32", None)
    assert resolved.device_type == device.partition(":")[0]


def test_a_second_gpu_is_not_the_first(monkeypatch):
    """Its own number and its own arithmetic are asked for."""
    asked = []

    class On:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            asked.append(str(self.device))

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", On)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation: asked[-1] == "cuda:1"
    )
    assert PrecisionPolicy("bf16").resolve("cuda:1").effective == "bf16"
    with pytest.raises(PrecisionUnsupportedError, match="on cuda:0: this GPU has no bfloat16"):
        PrecisionPolicy("bf16").resolve("cuda:0")
    with pytest.raises(PrecisionUnsupportedError, match="has 2 CUDA devices, and no cuda:2"):
        PrecisionPolicy("fp16").resolve("cuda:2")
    assert precision_support("cuda:1")["cuda"]["bf16"] == "supported"


@pytest.mark.skipif(
    not hasattr(torch.backends, "fp32_precision"), reason="torch has no such switch"
)
@pytest.mark.parametrize("setting", ["tf32", "ieee"])
def test_tf32_switches_are_read_through_either_interface(setting):
    """torch refuses to read the older switches once the newer ones were set."""
    code = f"""
import torch
from nnx import NNModelParams, Losses, PrecisionPolicy
from nnx.precision import resolve_precision
torch.backends.cuda.matmul.fp32_precision = {setting!r}
torch.backends.cudnn.conv.fp32_precision = {setting!r}
torch.backends.cudnn.rnn.fp32_precision = "tf32" if {setting!r} == "ieee" else "ieee"
params = NNModelParams(loss=Losses.CROSS_ENTROPY, precision=PrecisionPolicy("fp32"))
print(dict(resolve_precision(params, "cuda").tf32))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    on = setting == "tf32"
    assert done.stdout.strip() == str({"matmul": on, "cudnn": on})
