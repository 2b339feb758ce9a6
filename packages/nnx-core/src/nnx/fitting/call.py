"""From a network and data to a run, in one call."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn

from nnx.callbacks import EarlyStopping
from nnx.distributed import DDP, FSDP
from nnx.enums import Devices, Losses, Optims
from nnx.fitting.data import Batches
from nnx.fitting.fitted import Fitted
from nnx.nn_model import NNModel
from nnx.params import (
    AnyLoss,
    AnySchedulerParams,
    MetricSpec,
    ModelSpec,
    MonitorSpec,
    NNModelParams,
    NNOptimFactoryParams,
    NNOptimParams,
    NNParams,
    NNTrainParams,
    PrecisionPolicy,
    TaskSpec,
)
from nnx.params.loss import loss_of
from nnx.params.net import net_of
from nnx.params.scheduler import scheduler_of
from nnx.params.training import DEFAULT_OPTIM
from nnx.seeding import isolated_rng
from nnx.utils import validation as check

if TYPE_CHECKING:
    from nnx.history import HistoryJournal
    from nnx.models import BatchAdapter
    from nnx.params import CompileSpec

Network: TypeAlias = nn.Module | Callable[[], nn.Module] | ModelSpec | NNParams
Data: TypeAlias = Any  # a loader, a Dataset, (inputs, ..., targets), a DataFrame with target=
_OWNER = "nnx.fit()"


def fit(
    net: Network,
    train: Data,
    val: Data | None = None,
    *,
    epochs: int = 10,
    loss: str | AnyLoss | nn.Module = Losses.CROSS_ENTROPY,
    optimizer: str | Optims | NNOptimParams | NNOptimFactoryParams | None = None,
    lr: float | None = None,
    weight_decay: float | None = None,
    grad_clip_norm: float | None = None,
    accumulate: int = 1,
    schedule: str | AnySchedulerParams | None = "plateau",
    metrics: Sequence[str | MetricSpec] = (),
    monitor: str | MonitorSpec | None = None,
    early_stopping: int | None = None,
    precision: str | PrecisionPolicy | None = None,
    device: str | Devices = Devices.AUTO,
    seed: int | None = None,
    callbacks: Sequence[Any] = (),
    target: str | int | None = None,
    batch_size: int | None = None,
    task: TaskSpec | None = None,
    batch_adapter: BatchAdapter | None = None,
    objective: Callable[[Any], Any] | None = None,
    extra_metrics: Mapping[str, Callable[..., Any]] | None = None,
    data_id: str | None = None,
    salt: str | None = None,
    on_existing: str = "error",
    checkpoint_every: int | None = None,
    name: str | None = None,
    tags: Sequence[str] = (),
    history: HistoryJournal | None = None,
    compile: CompileSpec | None = None,
    distributed: DDP | FSDP | str | None = None,
) -> Fitted:
    """Train ``net`` on ``train`` and return the run with its model.

    ``net`` is a module, a function that makes one, a :class:`~nnx.ModelSpec`, or the params
    of a built-in network. ``train`` and ``val`` are each a loader, a ``Dataset``, a tuple of
    inputs and targets (tensors or arrays), or a DataFrame, whose column ``target`` is
    predicted from all others; see :class:`Batches` for the tensors that arrays and tables
    become. What is no loader is read in batches of ``batch_size`` (32), in random order for
    training.

    The rest says in words what ``NNModelParams``, ``NNTrainParams`` and ``NNModel.train`` say
    in values, which are taken too. Left out, it is as they have it, but for ``device``:
    "auto" is the best that the machine has. ``lr``, ``weight_decay``, ``grad_clip_norm`` and
    ``accumulate`` are the optimizer's ("adamw", ...; with its own defaults where one is
    named). ``schedule`` is "plateau" by default, and ``None`` keeps the rate constant.
    ``monitor="auroc"`` watches a declared metric on ``val`` ("train.auroc": on training),
    ``early_stopping=5`` stops after five epochs without an improvement of it. ``seed`` also
    decides the weights that a network made here begins with.

    Raises what those values raise, before anything is trained.
    """
    model_params = NNModelParams(
        net=net if isinstance(net, ModelSpec) else _builtin(net),
        device=check.member(_OWNER, "device", device, Devices),
        loss=loss_of(_OWNER, "loss", loss),
        task=task,
        precision=PrecisionPolicy(precision) if isinstance(precision, str) else precision,  # type: ignore[arg-type]
    )
    batches = Batches(
        target=target,
        batch_size=None if batch_size is None else check.count(_OWNER, "batch_size", batch_size),
        loss=model_params.loss,
    ).of(train)
    watched = _monitor(monitor)
    params = NNTrainParams(
        n_epochs=epochs,
        train_loader=batches.loader(train, "train", shuffle=True),
        val_loader=None if val is None else batches.loader(val, "val", shuffle=False),
        optim=_optimizer(optimizer, lr, weight_decay, grad_clip_norm, accumulate),
        scheduler=scheduler_of(_OWNER, "schedule", schedule),
        metrics=[MetricSpec(one) if isinstance(one, str) else one for one in metrics],
        monitor=watched, extra_metrics=extra_metrics, seed=seed, data_id=data_id,
        on_existing=on_existing, checkpoint_every=checkpoint_every, name=name, tags=tags,
    )  # fmt: skip
    processes = _distributed(distributed)
    asked = list(callbacks)
    if early_stopping is not None:
        asked.append(EarlyStopping(watched, patience=early_stopping))
    with contextlib.nullcontext() if seed is None else isolated_rng(seed):
        model = _model(net, model_params, batch_adapter)
    run = model.train(
        params, callbacks=asked, salt=salt, objective=objective, history=history,
        compile=compile, distributed=processes,
    )  # fmt: skip
    make = None if isinstance(net, (nn.Module, ModelSpec, NNParams)) else net
    return Fitted(model=model, run=run, batches=batches, val=params.val_loader, make=make)


def _model(net: Network, params: NNModelParams, adapter: BatchAdapter | None) -> NNModel:
    if isinstance(net, ModelSpec):
        return NNModel(params=params, batch_adapter=adapter)
    if isinstance(net, NNParams):
        return NNModel(net_params=net, params=params, batch_adapter=adapter)
    module = net if isinstance(net, nn.Module) else net()
    return NNModel(params=params, module=module, batch_adapter=adapter)


def _builtin(net: Network) -> Any:
    if isinstance(net, NNParams):
        return net_of(net)
    if not callable(net):
        raise check.WrongTypeError(
            "nnx.fit() takes a torch.nn.Module, a function that makes one, a ModelSpec or the "
            f"params of a built-in network as net, not {check.show(net)}"
        )
    return None


def _optimizer(
    optimizer: str | Optims | NNOptimParams | NNOptimFactoryParams | None,
    lr: float | None,
    weight_decay: float | None,
    grad_clip_norm: float | None,
    accumulate: int,
) -> NNOptimParams | NNOptimFactoryParams:
    words = {"lr": lr, "weight_decay": weight_decay, "grad_clip_norm": grad_clip_norm}
    given = [name for name, value in words.items() if value is not None]
    given += ["accumulate"] * (accumulate != 1)
    if isinstance(optimizer, (NNOptimParams, NNOptimFactoryParams)):
        if given:
            raise ValueError(
                f"nnx.fit(): optimizer= is complete; say {', '.join(given)} in its "
                f"{type(optimizer).__name__}"
            )
        return optimizer
    named = DEFAULT_OPTIM
    if optimizer is not None:
        if lr is None:
            raise ValueError(f"nnx.fit(optimizer={str(optimizer)!r}) needs a learning rate, lr=")
        member = check.member(_OWNER, "optimizer", optimizer, Optims)
        named = getattr(NNOptimParams.builder(), member.value)(max_lr=lr).build()
    changes = {"max_lr": lr, "weight_decay": weight_decay, "grad_clip_norm": grad_clip_norm}
    told: dict[str, Any] = {name: value for name, value in changes.items() if value is not None}
    return dataclasses.replace(named, **told, accumulate_grad_batches=accumulate)


def _monitor(monitor: str | MonitorSpec | None) -> MonitorSpec | None:
    if not isinstance(monitor, str):
        return monitor
    split, _, metric = monitor.partition(".")
    return MonitorSpec(metric, split) if split in ("train", "val") else MonitorSpec(monitor)


def _distributed(distributed: DDP | FSDP | str | None) -> DDP | FSDP | None:
    if not isinstance(distributed, str):
        return distributed
    return {"ddp": DDP, "fsdp": FSDP}[
        check.choice(_OWNER, "distributed", distributed.lower(), ("ddp", "fsdp"))
    ]()
