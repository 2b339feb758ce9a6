"""``loss.backward()`` and ``optimizer.step()`` without the ceremony around them.

Torch's own entry points read their arguments in every form that they may have,
look for overriding subclasses and open profiler ranges. For a small model on
the CPU that is a tenth of a step. The functions here call what those end in,
and only where nobody could tell: with a subclass, a hook, a patched method, a
running profiler or an active mode they call the entry point itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph
from torch.optim import Optimizer, lr_scheduler
from torch.optim import optimizer as optim

# A function whose globals are a module's was defined there: nobody has put another in its place.
_TENSOR, _AUTOGRAD = vars(getattr(torch, "_tensor", torch)), vars(torch.autograd)
_OPTIM, _SCHEDULERS = vars(optim), vars(lr_scheduler)
_run_backward = getattr(graph, "_engine_run_backward", None)


def _always() -> bool:
    return True


# What says that somebody is watching; where a torch has no such name, somebody always is.
_function_mode = getattr(torch._C, "_is_torch_function_mode_enabled", _always)
_functorch = getattr(torch._C, "_are_functorch_transforms_active", _always)
_profiler = getattr(getattr(torch._C, "_autograd", None), "_profiler_enabled", _always)
_WATCHED = {"": None}  # stands for hooks where a torch keeps them elsewhere


def backward(loss: Tensor) -> None:
    """``loss.backward()`` of a scalar loss."""
    plain = (
        type(loss) is Tensor
        and loss.is_cpu  # elsewhere the host is not what a step waits for
        and loss.ndim == 0
        and loss.is_floating_point()
        and loss.requires_grad
        and _run_backward is not None
        and getattr(Tensor.backward, "__globals__", None) is _TENSOR
        and getattr(torch.autograd.backward, "__globals__", None) is _AUTOGRAD
        and not _function_mode()
        and not _functorch()
    )
    if plain:
        assert _run_backward is not None
        _run_backward(
            (loss,), (torch.ones_like(loss),), False, False, (),
            allow_unreachable=True, accumulate_grad=True,
        )  # fmt: skip
    else:
        loss.backward()


def step(optimizer: Optimizer) -> None:
    """``optimizer.step()``."""
    kind: Any = type(optimizer)
    entry, own = kind.step, vars(optimizer).get("step")
    plain = (
        getattr(entry, "__globals__", None) is _OPTIM  # the range and the hooks around a step
        and (own is None or _only_noted_by_a_scheduler(own, entry))
        and not getattr(optimizer, "_optimizer_step_pre_hooks", _WATCHED)
        and not getattr(optimizer, "_optimizer_step_post_hooks", _WATCHED)
        and not getattr(optim, "_global_optimizer_pre_hooks", _WATCHED)
        and not getattr(optim, "_global_optimizer_post_hooks", _WATCHED)
        and not _profiler()
    )
    if plain:
        if own is not None:
            optimizer._opt_called = True  # type: ignore[attr-defined]
        entry.__wrapped__(optimizer)
    else:
        optimizer.step()


def _only_noted_by_a_scheduler(own: Any, entry: Any) -> bool:
    """Whether a step on the instance does no more than set ``_opt_called`` and call ``entry``."""
    return (
        getattr(own, "__globals__", None) is _SCHEDULERS
        and getattr(own, "__wrapped__", None) is entry
    )
