"""How a model is trained by one optimizer, and what training by several shares with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from nnx.enums import Checkpoints, Optims
from nnx.params.base import (
    Converted,
    Params,
    StateField,
    always,
    converted,
    each_state,
    field_names,
    optional,
    put,
)
from nnx.params.monitor import MonitorSpec
from nnx.params.optim import (
    AnyOptimParams,
    NNOptimFactoryParams,
    NNOptimParams,
    optim_params_from_state,
)
from nnx.params.registered import MetricSpec
from nnx.params.scheduler import (
    DEFAULT_SCHEDULER,
    AnySchedulerParams,
    scheduler_from_state,
    scheduler_of,
)
from nnx.utils import validation as check
from nnx.utils.jsonlike import FrozenDict

RESUME_MODES = ("auto", "stateful", "weights_only")
RESUME_EPOCHS = ("additional", "planned")
ON_EXISTING = ("error", "resume", "load", "replace")
# Fields that live only in this process: compared by identity, never stored.
_RUNTIME = ("train_loader", "val_loader", "extra_metrics")

DEFAULT_OPTIM = NNOptimParams(
    name=Optims.ADAM, max_lr=0.01, weight_decay=5e-5, momentum=(0.9, 0.999)
)


def _state(value: Any) -> Any:
    return value.state()


def _lineage(params: Any) -> str | None:
    return params.resume_from_run_id or params.parent_run_id


# A resume request is stored as lineage; the request itself belongs to one session.
LINEAGE = (
    StateField("parent_run_id", read=_lineage, omit=lambda p: _lineage(p) is None),
    StateField(
        "resume_from_checkpoint",
        key="parent_checkpoint",
        omit=lambda p: _lineage(p) is None or p.resume_from_checkpoint is None,
    ),
)
METRICS = (
    optional("metrics", encode=each_state, decode=lambda v: [MetricSpec.from_state(s) for s in v]),
    optional("monitor", encode=_state, decode=lambda s: s and MonitorSpec.from_state(s)),
)


T = TypeVar("T", bound="Training")


class Training(Params):
    """What both training configurations share."""

    __slots__ = ()

    def with_train_loader(self: T, value: Iterable[Any]) -> T:
        """A copy that trains on ``value``."""
        return dataclasses.replace(self, train_loader=value)  # type: ignore[type-var]

    def with_val_loader(self: T, value: Iterable[Any]) -> T:
        """A copy that validates on ``value``."""
        return dataclasses.replace(self, val_loader=value)  # type: ignore[type-var]

    def _key(self) -> tuple[Any, ...]:
        names = (name for name in field_names(type(self)) if name not in _RUNTIME)
        return tuple(getattr(self, name) for name in names)

    def __eq__(self, other: object) -> bool:
        # Loaders are compared by identity: comparing their batches would read data.
        if type(other) is not type(self):
            return NotImplemented
        same = all(getattr(self, n) is getattr(other, n) for n in _RUNTIME[:2])
        return same and self.extra_metrics == other.extra_metrics and self._key() == other._key()  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash(self._key())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NNTrainParams(Training):
    """A training with one optimizer.

    Loaders may be any iterable that can be read again. ``seed=None`` leaves the
    random streams alone. ``data_id`` tells runs over different data apart.
    ``checkpoint_every`` writes a resume point inside the epoch after so many
    committed updates. The ``resume_*`` fields ask this session to continue an
    earlier run; they are stored as ``parent_run_id`` and its checkpoint.

    ``scheduler`` may be a :class:`SchedulerSpec`, a name ("warmup_cosine", "plateau"), or
    ``None`` for a constant rate.

    ``on_existing`` says what becomes of a run of this very configuration that is there
    already: ``"error"`` refuses, ``"resume"`` continues it where it stopped and returns a
    finished one, ``"load"`` returns it as it stands, ``"replace"`` trains anew and keeps it
    until the first commit (as ``overwrite_existing`` does). ``name`` and ``tags`` are for
    finding the run again. None of these is stored with the configuration or moves its id.
    """

    n_epochs: int
    scheduler: Converted[AnySchedulerParams, str | None] = converted(DEFAULT_SCHEDULER)
    optim: AnyOptimParams = DEFAULT_OPTIM
    seed: int | None = None
    data_id: str | None = None
    save_phase_checkpoints: bool = True
    train_loader: Iterable[Any] | None = field(default=None, repr=False)
    val_loader: Iterable[Any] | None = field(default=None, repr=False)
    metrics: Sequence[MetricSpec] = ()
    monitor: MonitorSpec | None = None
    extra_metrics: Mapping[str, Callable[..., Any]] | None = None
    resume_from_run_id: str | None = None
    resume_from_checkpoint: str | None = "last"
    parent_run_id: str | None = None
    overwrite_existing: bool = False
    resume_mode: str = "auto"
    resume_epochs: str = "additional"
    checkpoint_every: int | None = None
    on_existing: str = "error"
    name: str | None = None
    tags: Sequence[str] = ()

    _SECTION: ClassVar[str] = "train"
    _STATE: ClassVar[tuple[StateField, ...]] = (
        always("n_epochs"),
        StateField("optim", always=True, encode=_state, decode=optim_params_from_state),
        StateField("scheduler", always=True, encode=_state, decode=scheduler_from_state),
        optional("seed"),
        optional("save_phase_checkpoints"),
        optional("data_id"),
        *LINEAGE,
        *METRICS,
        optional("resume_epochs"),
        optional("checkpoint_every"),
    )

    def __post_init__(self) -> None:
        owner = type(self).__name__
        put(self, scheduler=scheduler_of(owner, "scheduler", self.scheduler))
        check.instance(owner, "optim", self.optim, (NNOptimParams, NNOptimFactoryParams))
        check_training(self)
        put(
            self,
            resume_epochs=check.choice(owner, "resume_epochs", self.resume_epochs, RESUME_EPOCHS),
            on_existing=check.choice(owner, "on_existing", self.on_existing, ON_EXISTING),
        )
        self._check_on_existing()
        if self.resume_from_run_id and (self.resume_mode, self.resume_epochs) == (
            "weights_only",
            "planned",
        ):
            check.refuse(
                owner,
                "resume_epochs",
                self.resume_epochs,
                "'additional' with resume_mode='weights_only', which restores no plan",
            )

    def _check_on_existing(self) -> None:
        if self.overwrite_existing and self.on_existing in ("resume", "load"):
            raise ValueError(
                f"NNTrainParams.on_existing={self.on_existing!r} keeps the run that is there, "
                "overwrite_existing=True replaces it; leave one of them out"
            )
        if self.on_existing == "resume" and self.resume_from_run_id is not None:
            raise ValueError(
                "NNTrainParams.on_existing='resume' finds the run to continue by its configuration, "
                f"resume_from_run_id names another one ({self.resume_from_run_id}); leave one of "
                "them out"
            )


def check_training(params: Any) -> None:
    """Check and settle what both training configurations share."""
    owner = type(params).__name__
    put(
        params,
        n_epochs=check.count(owner, "n_epochs", params.n_epochs),
        save_phase_checkpoints=check.flag(
            owner, "save_phase_checkpoints", params.save_phase_checkpoints
        ),
        overwrite_existing=check.flag(owner, "overwrite_existing", params.overwrite_existing),
        resume_mode=check.choice(owner, "resume_mode", params.resume_mode, RESUME_MODES),
        metrics=_checked_metrics(owner, params.metrics),
        tags=check.tags(owner, "tags", params.tags),
    )
    if params.name is not None:
        put(params, name=check.name(owner, "name", params.name))
    if params.seed is not None:
        put(params, seed=check.count(owner, "seed", params.seed, at_least=0, at_most=2**32 - 1))
    if params.checkpoint_every is not None:
        every = check.count(owner, "checkpoint_every", params.checkpoint_every)
        put(params, checkpoint_every=every)
    if params.data_id is not None:
        put(params, data_id=check.text(owner, "data_id", params.data_id))
    for name in ("train_loader", "val_loader"):
        check_loader(owner, name, getattr(params, name))
    if params.monitor is not None:
        check.instance(owner, "monitor", params.monitor, MonitorSpec)
        params.monitor.check_names(params.metrics, f"{owner}.monitor")
    if params.extra_metrics is not None:
        put(params, extra_metrics=_checked_callables(owner, params.extra_metrics))
    _check_resume(owner, params)


def _check_resume(owner: str, params: Any) -> None:
    for name in ("resume_from_run_id", "parent_run_id"):
        value = getattr(params, name)
        if value is not None:
            put(params, **{name: check.text(owner, name, value)})
    tag = params.resume_from_checkpoint
    if isinstance(tag, Checkpoints):
        put(params, resume_from_checkpoint=tag.value)
    elif tag is not None:
        put(params, resume_from_checkpoint=check.text(owner, "resume_from_checkpoint", tag))
    # A stored lineage beside a new request is no contradiction: a loaded run may be resumed.
    if params.resume_from_run_id is not None and tag is None:
        check.refuse(
            owner, "resume_from_checkpoint", None, "the name of a checkpoint of the resumed run"
        )


def check_loader(owner: str, name: str, loader: Any) -> None:
    if loader is None:
        return
    if _is_one_shot(loader):
        raise ValueError(
            f"{owner}.{name} is a one-shot iterator ({check.show(loader)}): the second epoch "
            "would find it empty. Pass what can be read again: a DataLoader, a list of batches, "
            "or an object whose __iter__ starts anew"
        )
    if hasattr(loader, "iloc"):  # iterating a frame gives the names of its columns
        raise ValueError(
            f"{owner}.{name} is a pandas {type(loader).__name__}, which gives no batches; "
            "nnx.NNTabularDataset reads its columns, or pass "
            "DataLoader(TensorDataset(inputs, targets), batch_size=32)"
        )
    iterable = hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")
    if isinstance(loader, (str, bytes)) or not iterable:
        check.refuse(owner, name, loader, "an iterable of batches")


_RETURNS_ITSELF = (lambda self: self).__code__.co_code


def _is_one_shot(loader: Any) -> bool:
    """Whether ``iter(loader)`` can only go on where the last reader stopped.

    A class may be its own iterator and still start anew in ``__iter__``; one
    whose ``__iter__`` only returns itself (as generators, ``map``, ``zip`` and a
    DataLoader's iterator do) cannot. Nothing is read to find out.
    """
    if not isinstance(loader, Iterator):
        return False
    code = getattr(type(loader).__iter__, "__code__", None)
    return code is None or code.co_code == _RETURNS_ITSELF


def _checked_metrics(owner: str, metrics: Any) -> tuple[MetricSpec, ...]:
    if isinstance(metrics, (MetricSpec, str, Mapping)) or not isinstance(metrics, Iterable):
        check.refuse(owner, "metrics", metrics, "a sequence of MetricSpec")
    specs = tuple(metrics)
    seen: set[str] = set()
    for index, spec in enumerate(specs):
        check.instance(owner, f"metrics[{index}]", spec, MetricSpec)
        if spec.label in seen:
            check.refuse(
                owner, f"metrics[{index}]", spec.label, "named apart from the others (name=...)"
            )
        seen.add(spec.label)
    return specs


def _checked_callables(owner: str, metrics: Any) -> FrozenDict[str, Any]:
    if not isinstance(metrics, Mapping):
        check.refuse(owner, "extra_metrics", metrics, "a mapping from names to callables")
    for name, function in metrics.items():
        check.text(owner, "extra_metrics name", name)
        if not callable(function):
            check.refuse(owner, f"extra_metrics[{name!r}]", function, "a callable(y_true, y_pred)")
    return FrozenDict(metrics)
