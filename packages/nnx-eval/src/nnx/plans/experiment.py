"""An experiment: a frozen value with a method for each change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nnx.params import NNModelParams, NNParams, NNTrainParams

if TYPE_CHECKING:
    from typing_extensions import Self

ATTEMPT_SALT_PREFIX = "plan-attempt:"


class _Marker:
    """A default that is no value: what is not given is kept, or inherited."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name

    def __reduce__(self) -> str:
        return self._name


KEEP = _Marker("KEEP")
INHERIT = _Marker("INHERIT")


@dataclass(frozen=True, slots=True)
class Resume:
    """Which run a fit continues; ``mode`` and ``epochs`` of ``None`` are the training's own."""

    run_id: Any
    checkpoint: Any = "last"
    mode: Any = None
    epochs: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class Experiment:
    """What an :class:`ExperimentPlan` holds; what is done with one asks for no more."""

    net: NNParams | None = None
    model: NNModelParams | None = None
    train: NNTrainParams | None = None
    train_data: Any = field(default=None, repr=False)
    val_data: Any = field(default=INHERIT, repr=False)
    data_identity: Any = INHERIT
    seed: Any = None
    callbacks: tuple[Any, ...] = ()
    callback_factories: tuple[Any, ...] = ()
    train_step_fn: Any = None
    eval_step_fn: Any = None
    objective: Any = None
    components: tuple[Any, ...] = ()
    provenance: Any = None
    resume: Resume | None = None
    batch_adapter: Any = None

    def __post_init__(self) -> None:
        for name in ("callbacks", "callback_factories", "components"):
            value = getattr(self, name)
            whole = isinstance(value, Iterable) and not isinstance(value, (str, bytes))
            object.__setattr__(self, name, tuple(value) if whole else (value,))

    def with_net(self, net: NNParams | None) -> Self:
        """A branch with another network."""
        return self._with(net=net)

    def with_model(self, model: NNModelParams) -> Self:
        """A branch with another model."""
        return self._with(model=model)

    def with_train(self, train: NNTrainParams) -> Self:
        """A branch with another training configuration."""
        return self._with(train=train)

    def with_epochs(self, n_epochs: int) -> Self:
        """A branch that trains for ``n_epochs``."""
        return self._with_train(n_epochs=n_epochs)

    def with_optim(self, optim: Any) -> Self:
        """A branch with another optimizer."""
        return self._with_train(optim=optim)

    def with_scheduler(self, scheduler: Any) -> Self:
        """A branch with another schedule."""
        return self._with_train(scheduler=scheduler)

    def with_metrics(
        self,
        metrics: Iterable[Any] = KEEP,  # type: ignore[assignment]
        *,
        monitor: Any = KEEP,
    ) -> Self:
        """A branch with other declared metrics or another monitor."""
        given = {"metrics": metrics, "monitor": monitor}
        return self._with_train(**{k: v for k, v in given.items() if v is not KEEP})

    def with_extra_metrics(self, extra_metrics: Mapping[str, Callable[..., float]] | None) -> Self:
        """A branch with other metric functions."""
        return self._with_train(extra_metrics=extra_metrics)

    def with_data(self, train: Any = KEEP, val: Any = KEEP, *, identity: Any = KEEP) -> Self:
        """A branch with other data; ``val=None`` trains without validation."""
        given = {"train_data": train, "val_data": val, "data_identity": identity}
        return self._with(**{k: v for k, v in given.items() if v is not KEEP})

    def with_seed(self, seed: int | None) -> Self:
        """A branch with another seed; ``None`` is the training's own."""
        return self._with(seed=seed)

    def with_callbacks(self, *callbacks: Any) -> Self:
        """A branch with these callbacks, the same objects in every fit."""
        return self._with(callbacks=callbacks)

    def with_callback_factories(self, *factories: Callable[[], Any]) -> Self:
        """A branch whose every fit calls each of ``factories`` once for a callback."""
        return self._with(callback_factories=factories)

    def with_step_fns(self, train_step_fn: Any = KEEP, eval_step_fn: Any = KEEP) -> Self:
        """A branch with another training or evaluation step."""
        given = {"train_step_fn": train_step_fn, "eval_step_fn": eval_step_fn}
        return self._with(**{k: v for k, v in given.items() if v is not KEEP})

    def with_objective(self, objective: Any) -> Self:
        """A branch that trains by an objective."""
        return self._with(objective=objective)

    def with_components(self, *components: Any) -> Self:
        """A branch with these components, whose state its checkpoints carry."""
        return self._with(components=components)

    def with_provenance(self, manifest: Any) -> Self:
        """A branch that records ``manifest`` with its runs."""
        return self._with(provenance=manifest)

    def with_batch_adapter(self, adapter: Any) -> Self:
        """A branch that reads batches with ``adapter``."""
        return self._with(batch_adapter=adapter)

    def resuming(
        self,
        run_id: str,
        *,
        checkpoint: str = "last",
        mode: str | None = None,
        epochs: str | None = None,
    ) -> Self:
        """A branch that continues a run, as a new run with that one as its parent.

        ``mode`` and ``epochs`` are ``resume_mode`` and ``resume_epochs`` of the training,
        whose own hold where they are ``None``.
        """
        return self._with(resume=Resume(run_id, checkpoint, mode, epochs))

    def without_resume(self) -> Self:
        """A branch that starts afresh."""
        return self._with(resume=None)

    def _with(self, **changes: Any) -> Self:
        return dataclasses.replace(self, **changes)

    def _with_train(self, **changes: Any) -> Self:
        if not isinstance(self.train, NNTrainParams):
            raise ValueError(
                f"the plan has no training to change ({', '.join(changes)}): with_train(...) first"
            )
        return self._with(train=dataclasses.replace(self.train, **changes))
