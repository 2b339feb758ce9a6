"""Find a learning rate by a short sweep (Smith 2017, "Cyclical Learning Rates").

``from nnx import lr_finder`` gives the function; the module itself can be
called too, whichever was imported first.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from nnx.viz._common import PALETTE, require, unwrap

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from nnx.nn_model import NNModel
    from torch import nn
    from torch.utils.data import DataLoader


@dataclass(frozen=True, slots=True)
class LRFinderResult:
    """What a sweep saw.

    ``lrs`` and ``losses`` are the learning rates that were tried and the loss
    at each, fewer than ``num_iter`` when the loss diverged. ``suggested_lr`` is
    the rate where the smoothed loss falls fastest; ``figure`` draws it all.
    """

    lrs: list[float]
    losses: list[float]
    suggested_lr: float
    figure: go.Figure


def lr_finder(
    model: nn.Module | NNModel,
    train_loader: DataLoader,
    *,
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    optimizer_cls: type[torch.optim.Optimizer] = torch.optim.Adam,
    start_lr: float = 1e-7,
    end_lr: float = 10.0,
    num_iter: int = 100,
    diverge_threshold: float = 4.0,
    device: torch.device | None = None,
    ema_alpha: float = 0.5,
) -> LRFinderResult:
    """Train ``num_iter`` steps while the learning rate grows, and suggest one.

    The rate grows geometrically from ``start_lr`` to ``end_lr``, one step per
    batch (the loader is repeated when it is shorter). The loss is smoothed by
    an exponential moving average, ``ema_alpha`` being the weight of the newest
    value. The sweep stops when the smoothed loss exceeds the lowest one by
    more than ``(diverge_threshold - 1) * |lowest|``, or is not finite.
    ``device`` is the model's own by default. An NNModel reads its batches by its
    batch adapter, as in training.

    Nothing of the sweep stays: weights, buffers, extra state, gradients, modes,
    the loader's generators and workers, and all random streams are as before,
    also on an error.

    Raises ``ValueError`` for arguments out of their domain, an empty loader, an
    iterator in place of a loader or a loader whose persistent workers are in
    use (the sweep would use up what the caller reads), a model without
    trainable parameters, or a loss that is never finite.
    """
    require("plotly.graph_objects", "nnx.lr_finder")
    _check(start_lr, end_lr, num_iter, diverge_threshold, ema_alpha)
    _check_loader(train_loader)
    net = unwrap(model)
    trainable = [p for p in net.parameters() if p.requires_grad]
    if not trainable:
        raise ValueError("the model has no trainable parameter; nothing can be swept")
    rates = [start_lr * (end_lr / start_lr) ** (i / (num_iter - 1)) for i in range(num_iter)]
    with _untouched(net, train_loader, device) as place:
        net.train()
        build: Callable[..., torch.optim.Optimizer] = optimizer_cls
        optimizer = build(trainable, lr=start_lr)
        swept = SimpleNamespace(
            net=net, device=place, batch_adapter=getattr(model, "batch_adapter", None)
        )
        losses, smoothed = _sweep(
            swept, train_loader, loss_fn, optimizer, rates, diverge_threshold, ema_alpha
        )
    lrs = rates[: len(losses)]
    suggested = lrs[_steepest(lrs, smoothed)]
    return LRFinderResult(lrs, losses, suggested, _draw(lrs, losses, smoothed, suggested))


def _check(start: float, end: float, n: int, threshold: float, alpha: float) -> None:
    for name, value, good, domain in (
        ("start_lr", start, start > 0, "a finite number > 0"),
        ("end_lr", end, end > start, "a finite number > start_lr"),
        ("diverge_threshold", threshold, threshold > 1, "a finite number > 1"),
        ("ema_alpha", alpha, 0 < alpha <= 1, "in (0, 1]"),
    ):
        if isinstance(value, bool) or not math.isfinite(value) or not good:
            raise ValueError(f"lr_finder: {name} must be {domain}, not {value!r}")
    if isinstance(n, bool) or not isinstance(n, int) or n < 3:
        raise ValueError(f"lr_finder: num_iter must be an integer >= 3, not {n!r}")


def _check_loader(loader: Any) -> None:
    """Refuse what a sweep would take away from the caller."""
    if hasattr(loader, "__next__"):
        raise ValueError(
            f"lr_finder: train_loader is an iterator ({type(loader).__name__}), which the sweep "
            "would use up; pass the loader itself"
        )
    if getattr(loader, "persistent_workers", False) and loader._iterator is not None:
        raise ValueError(
            "lr_finder: the persistent workers of train_loader are in use, and a sweep would reset "
            "the iterator that they serve; pass a loader of its own, or finish with that one and "
            "delete it"
        )


def _sweep(
    model: Any,
    loader: Iterable[Any],
    loss_fn: Callable[..., torch.Tensor],
    optimizer: torch.optim.Optimizer,
    rates: list[float],
    threshold: float,
    alpha: float,
) -> tuple[list[float], list[float]]:
    from nnx.prediction.batches import forward_batch

    losses: list[float] = []
    smoothed: list[float] = []
    with closing(_forever(loader)) as batches:  # its workers end with it, also on an error
        for rate, batch in zip(rates, batches):
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad()
            loss = loss_fn(*forward_batch(model, batch))
            value = float(loss.detach())
            if not math.isfinite(value):
                break
            losses.append(value)
            smoothed.append(value if not smoothed else alpha * value + (1 - alpha) * smoothed[-1])
            lowest = min(smoothed)
            if smoothed[-1] > lowest + (threshold - 1) * abs(lowest):
                break
            loss.backward()
            optimizer.step()
    if not losses:
        raise ValueError("the loss was not finite at the first learning rate")
    return losses, smoothed


def _forever(loader: Iterable[Any]) -> Generator[Any, None, None]:
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise ValueError("the loader yields no batch")


def _steepest(lrs: list[float], smoothed: list[float]) -> int:
    """The index where the smoothed loss falls fastest per decade."""
    if len(lrs) < 2:
        return 0
    logs = [math.log10(r) for r in lrs]

    def slope(i: int) -> float:
        a, b = max(i - 1, 0), min(i + 1, len(lrs) - 1)
        return (smoothed[b] - smoothed[a]) / (logs[b] - logs[a])

    return min(range(len(lrs)), key=slope)


@contextmanager
def _untouched(net: nn.Module, loader: Any, device: torch.device | None) -> Iterator[torch.device]:
    """Yield the device of the sweep; put back all that a sweep changes."""
    from nnx.engine import rng
    from nnx.utils.modes import restored_modes

    home = next(itertools.chain(net.parameters(), net.buffers())).device
    place = torch.device(device) if device is not None else home
    saved = [_Saved(module) for module in net.modules()]
    gradients = [(p, p.grad) for p in net.parameters()]
    streams = rng.capture({"train": loader})
    try:
        with restored_modes(net):
            for parameter, _ in gradients:
                parameter.grad = None
            if place != home:
                net.to(place)
            yield place
    finally:
        _end_workers(loader)
        if place != home:
            net.to(home)
        for module in saved:
            module.restore()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        rng.restore(streams, {"train": loader})


class _Saved:
    """The tensors and the extra state of one module, without its submodules."""

    def __init__(self, module: nn.Module) -> None:
        from torch import nn

        self.module = module
        self.buffers = dict(module._buffers)
        self.tensors = {
            tensor: tensor.detach().clone()
            for tensor in (*module._parameters.values(), *module._buffers.values())
            if tensor is not None
        }
        self.has_extra = type(module).get_extra_state is not nn.Module.get_extra_state
        self.extra = copy.deepcopy(module.get_extra_state()) if self.has_extra else None

    def restore(self) -> None:
        self.module._buffers.update(self.buffers)
        with torch.no_grad():
            for tensor, value in self.tensors.items():
                tensor.copy_(value)
        if self.has_extra:
            self.module.set_extra_state(self.extra)


def _end_workers(loader: Any) -> None:
    """Stop the persistent workers that the sweep started; there were none before."""
    iterator = getattr(loader, "_iterator", None)
    if iterator is not None and getattr(loader, "persistent_workers", False):
        loader._iterator = None
        iterator._shutdown_workers()


def _draw(
    lrs: list[float], losses: list[float], smoothed: list[float], suggested: float
) -> go.Figure:
    graph = require("plotly.graph_objects", "nnx.lr_finder")
    figure = graph.Figure()
    figure.add_trace(
        graph.Scatter(x=lrs, y=losses, name="loss", line={"color": PALETTE[5], "width": 1})
    )
    figure.add_trace(
        graph.Scatter(x=lrs, y=smoothed, name="smoothed", line={"color": PALETTE[0], "width": 2})
    )
    figure.add_vline(x=suggested, line_dash="dash", line_color=PALETTE[1])
    figure.add_annotation(
        x=math.log10(suggested),  # annotations of a log axis stand at the exponent
        y=1.0,
        yref="paper",
        xanchor="left",
        text=f" suggested {suggested:.2e}",
        showarrow=False,
    )
    figure.update_layout(
        title="Learning-rate sweep",
        template="plotly_white",
        xaxis={"type": "log", "title": "learning rate", "exponentformat": "power"},
        yaxis_title="loss",
    )
    return figure


class _CallableModule(ModuleType):
    """``nnx.lr_finder`` is a module and, in ``from nnx import lr_finder``, a function."""

    __signature__ = inspect.signature(lr_finder)

    def __call__(self, *args: Any, **kwargs: Any) -> LRFinderResult:
        return lr_finder(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
