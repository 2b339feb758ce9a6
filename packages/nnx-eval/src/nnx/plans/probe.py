"""One batch through a temporary model, the process left as it was."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from nnx.engine.step import default_train_step
from nnx.enums import Devices
from nnx.nn_model import NNModel
from nnx.params import NNModelParams
from nnx.plans import validation
from nnx.plans.experiment import Experiment
from nnx.plans.fitting import seed_of
from nnx.plans.outcomes import PlanError, ProbeResult
from nnx.prediction.batches import forward_batch, forward_inputs, inference_context
from nnx.seeding import rng_state, set_rng_state, set_seed
from nnx.tasks.losses import supervised_terms
from nnx.utils.modes import eval_mode

_VARIABLES = ("PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG")


def probe(plan: Experiment, batch: Any) -> ProbeResult:
    """Forward and loss of ``batch`` on a fresh model of ``plan``."""
    if problems := tuple(validation.model_problems(plan)):
        raise PlanError(problems)
    assert isinstance(plan.model, NNModelParams)
    on_cpu = plan.model.device.resolved is Devices.CPU
    with _restored(on_cpu):
        _seed(seed_of(plan), on_cpu)
        model = NNModel(plan.net, plan.model, batch_adapter=plan.batch_adapter)
        with eval_mode(model.net), inference_context(model):
            output = forward_inputs(model, batch)
        target = _target(model, batch)
        loss = None if target is None or not _is_default(plan) else _loss(model, batch)
        parameters = list(model.net.parameters())
        shape = getattr(target, "shape", None)
        return ProbeResult(
            output_shape=tuple(output.shape),
            output_dtype=str(output.dtype).removeprefix("torch."),
            target_shape=None if shape is None else tuple(shape),
            loss=loss,
            n_parameters=sum(p.numel() for p in parameters),
            n_trainable=sum(p.numel() for p in parameters if p.requires_grad),
        )


def _is_default(plan: Experiment) -> bool:
    return plan.objective is None and plan.train_step_fn in (None, default_train_step)


def _target(model: NNModel, batch: Any) -> Any:
    alone = isinstance(batch, (torch.Tensor, np.ndarray))
    alone |= type(batch) in (tuple, list) and len(batch) == 1
    return None if alone else model.split_batch(batch)[2]


def _loss(model: NNModel, batch: Any) -> float | None:
    """The loss of the default step, in train mode and without a gradient."""
    model.net.train()
    with torch.no_grad():
        with model.resolved_precision.autocast():
            output, target = forward_batch(model, batch)
        terms = supervised_terms(model.loss_fn, model.task_adapter, output, target)
        if terms.masked:
            return None
        return float(terms.loss)


def _seed(seed: int | None, on_cpu: bool) -> None:
    if seed is None:
        return
    if not on_cpu:
        set_seed(seed)
        return
    # torch.manual_seed would queue a seed for CUDA's first use, which nothing here waits for.
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


@contextlib.contextmanager
def _restored(on_cpu: bool) -> Iterator[None]:
    """Give random streams, determinism and the environment back."""
    cudnn = torch.backends.cudnn
    flags = cudnn.deterministic, cudnn.benchmark
    strict = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    variables = {name: os.environ.get(name) for name in _VARIABLES}
    if not on_cpu and torch.cuda.is_available():
        torch.cuda.init()  # runs any seed that waits for it, so that its streams are known
    state = rng_state()
    cuda_was_idle = "cuda" not in state
    try:
        yield
    finally:
        if cuda_was_idle and not torch.cuda.is_initialized():
            _restore_host_streams(state)
        else:
            set_rng_state(state)
        cudnn.deterministic, cudnn.benchmark = flags
        torch.use_deterministic_algorithms(strict, warn_only=warn_only)
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _restore_host_streams(state: dict[str, Any]) -> None:
    version, words, gauss_next = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss_next))
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if "mps" in state:
        torch.mps.set_rng_state(state["mps"])
