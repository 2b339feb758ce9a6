"""Whether a fit may be compiled, and the compiled forward for as long as it lasts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from nnx.callbacks import Callback
from nnx.enums import Nets
from nnx.params import CompileSpec

if TYPE_CHECKING:
    from nnx.compilation.forward import CompiledForward
    from nnx.engine.request import FitRequest
    from nnx.models import Model
    from nnx.precision import ResolvedPrecision

GRAPH_NETS = (Nets.GRAPH_CONV, Nets.GRAPH_SAGE, Nets.GRAPH_ATT)


def check_compile(
    request: FitRequest, callbacks: Sequence[Any], precision: ResolvedPrecision
) -> None:
    """Refuse a fit that ``compile=`` does not cover; called before a run is reserved."""
    if request.compile is None:
        return
    if not isinstance(request.compile, CompileSpec):
        raise TypeError(
            f"compile must be a CompileSpec or None, not {type(request.compile).__name__}"
        )
    net = request.model.params.net
    obstacle = None
    if not request.model.params.builtin:
        obstacle = "it needs a built-in net"
    elif net in GRAPH_NETS:
        obstacle = f"graph nets ({net}) are not covered"
    elif not request.owner.is_default:
        given = request.owner.kind.value
        obstacle = f"it compiles the default step's forward, and {given} is another step"
    elif precision.reduced:
        obstacle = f"it needs full precision, and this run resolves to {precision.effective}"
    elif request.distributed is not None:
        obstacle = "distributed training is not covered"
    else:
        for callback in callbacks:
            if type(callback).checkpoint_transforms is not Callback.checkpoint_transforms:
                obstacle = f"{type(callback).__name__} changes the net's topology"
    if obstacle is not None:
        raise ValueError(f"compile= cannot be used here: {obstacle}. Train without compile=.")


def compiled_forward(request: FitRequest) -> CompiledForward | None:
    """The wrapper of one fit; ``None`` when nothing is to be compiled."""
    if request.compile is None:
        return None
    from nnx.compilation.forward import CompiledForward

    return CompiledForward(request.model.net, request.compile)


@contextmanager
def compiling(model: Model, forward: CompiledForward | None) -> Iterator[None]:
    """Run the model's forwards through ``forward``; afterwards as before, always.

    Before is eager, unless a callback of a compiled fit trains the same model.
    """
    outer = model.compiled
    with forward or nullcontext():
        model.compiled = forward
        try:
            yield
        finally:
            model.compiled = outer
