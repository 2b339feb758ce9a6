"""The plan: a frozen value with a method for each change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nnx.params import NNModelParams, NNParams, NNTrainParams
from nnx.plans.outcomes import FitResult, PlanValidation, ProbeResult

if TYPE_CHECKING:
    from nnx.data_splits import SplitManifest
    from nnx.plans.folds import Folds
    from nnx.plans.replicates import Replicates

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
class _Resume:
    """Which run a fit continues; ``mode`` and ``epochs`` of ``None`` are the training's own."""

    run_id: Any
    checkpoint: Any = "last"
    mode: Any = None
    epochs: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class ExperimentPlan:
    """Configuration, data, seed and what trains: everything that one fit needs.

    ``train_data=None`` and ``val_data=INHERIT`` are the loaders of ``train``, and
    ``data_identity=INHERIT`` is its ``data_id``. Data may be re-iterable batches or a
    function without arguments that makes them, called once per fit after seeding.
    ``seed=None`` is the training's own. What is not an immutable parameter object is
    borrowed: shared by all branches and fits, never copied or reset.
    """

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
    resume: _Resume | None = None
    batch_adapter: Any = None

    def __post_init__(self) -> None:
        for name in ("callbacks", "callback_factories", "components"):
            value = getattr(self, name)
            whole = isinstance(value, Iterable) and not isinstance(value, (str, bytes))
            object.__setattr__(self, name, tuple(value) if whole else (value,))

    # Branches ----------------------------------------------------------------------------

    def with_net(self, net: NNParams | None) -> ExperimentPlan:
        """A branch with another network."""
        return self._with(net=net)

    def with_model(self, model: NNModelParams) -> ExperimentPlan:
        """A branch with another model."""
        return self._with(model=model)

    def with_train(self, train: NNTrainParams) -> ExperimentPlan:
        """A branch with another training configuration."""
        return self._with(train=train)

    def with_epochs(self, n_epochs: int) -> ExperimentPlan:
        """A branch that trains for ``n_epochs``."""
        return self._with_train(n_epochs=n_epochs)

    def with_optim(self, optim: Any) -> ExperimentPlan:
        """A branch with another optimizer."""
        return self._with_train(optim=optim)

    def with_scheduler(self, scheduler: Any) -> ExperimentPlan:
        """A branch with another schedule."""
        return self._with_train(scheduler=scheduler)

    def with_metrics(
        self,
        metrics: Iterable[Any] = KEEP,  # type: ignore[assignment]
        *,
        monitor: Any = KEEP,
    ) -> ExperimentPlan:
        """A branch with other declared metrics or another monitor."""
        given = {"metrics": metrics, "monitor": monitor}
        return self._with_train(**{k: v for k, v in given.items() if v is not KEEP})

    def with_extra_metrics(
        self, extra_metrics: Mapping[str, Callable[..., float]] | None
    ) -> ExperimentPlan:
        """A branch with other metric functions."""
        return self._with_train(extra_metrics=extra_metrics)

    def with_data(
        self, train: Any = KEEP, val: Any = KEEP, *, identity: Any = KEEP
    ) -> ExperimentPlan:
        """A branch with other data; ``val=None`` trains without validation."""
        given = {"train_data": train, "val_data": val, "data_identity": identity}
        return self._with(**{k: v for k, v in given.items() if v is not KEEP})

    def with_seed(self, seed: int | None) -> ExperimentPlan:
        """A branch with another seed; ``None`` is the training's own."""
        return self._with(seed=seed)

    def with_callbacks(self, *callbacks: Any) -> ExperimentPlan:
        """A branch with these callbacks, the same objects in every fit."""
        return self._with(callbacks=callbacks)

    def with_callback_factories(self, *factories: Callable[[], Any]) -> ExperimentPlan:
        """A branch whose every fit calls each of ``factories`` once for a callback."""
        return self._with(callback_factories=factories)

    def with_step_fns(self, train_step_fn: Any = KEEP, eval_step_fn: Any = KEEP) -> ExperimentPlan:
        """A branch with another training or evaluation step."""
        given = {"train_step_fn": train_step_fn, "eval_step_fn": eval_step_fn}
        return self._with(**{k: v for k, v in given.items() if v is not KEEP})

    def with_objective(self, objective: Any) -> ExperimentPlan:
        """A branch that trains by an objective."""
        return self._with(objective=objective)

    def with_components(self, *components: Any) -> ExperimentPlan:
        """A branch with these components, whose state its checkpoints carry."""
        return self._with(components=components)

    def with_provenance(self, manifest: Any) -> ExperimentPlan:
        """A branch that records ``manifest`` with its runs."""
        return self._with(provenance=manifest)

    def with_batch_adapter(self, adapter: Any) -> ExperimentPlan:
        """A branch that reads batches with ``adapter``."""
        return self._with(batch_adapter=adapter)

    def resuming(
        self,
        run_id: str,
        *,
        checkpoint: str = "last",
        mode: str | None = None,
        epochs: str | None = None,
    ) -> ExperimentPlan:
        """A branch that continues a run, as a new run with that one as its parent.

        ``mode`` and ``epochs`` are ``resume_mode`` and ``resume_epochs`` of the training,
        whose own hold where they are ``None``.
        """
        return self._with(resume=_Resume(run_id, checkpoint, mode, epochs))

    def without_resume(self) -> ExperimentPlan:
        """A branch that starts afresh."""
        return self._with(resume=None)

    def _with(self, **changes: Any) -> ExperimentPlan:
        return dataclasses.replace(self, **changes)

    def _with_train(self, **changes: Any) -> ExperimentPlan:
        if not isinstance(self.train, NNTrainParams):
            raise ValueError(
                f"the plan has no training to change ({', '.join(changes)}): with_train(...) first"
            )
        return self._with(train=dataclasses.replace(self.train, **changes))

    # What is done with it ----------------------------------------------------------------

    def validate(self) -> PlanValidation:
        """Every problem that shows without reading data, calling a factory or building a net."""
        from nnx.plans.validation import validate

        return validate(self)

    def probe(self, example_batch: Any) -> ProbeResult:
        """Try one batch on a temporary model; the process is left as it was.

        A tensor, or a tuple of one, is inputs alone. The loss is that of the default
        step in train mode; ``None`` without a target, for a step or objective of one's
        own, and for a batch whose every target is masked. Raises :class:`PlanError` for
        a plan without a valid model, network and seed.
        """
        from nnx.plans.probe import probe

        return probe(self, example_batch)

    def fit(self, *, attempt: str | None = None) -> FitResult:
        """Train once, as an equally seeded script would, into a run of its own.

        ``attempt`` names the fit; by default the name is random. It takes part in the
        run's id, so that repeated fits are different runs. Raises :class:`PlanError` for a plan
        with a problem, ``FileExistsError`` for an attempt that was made before, and
        ``RuntimeError`` in a process group of several ranks.
        """
        from nnx.plans.fitting import fit

        return fit(self, attempt=attempt)

    def run_id(self, attempt: str) -> str:
        """The id of the run that ``fit(attempt=attempt)`` writes; nothing is built.

        A run of a module that changes its own description while it is built may differ.
        """
        from nnx.plans.fitting import planned_run

        return planned_run(self, attempt).id

    def replicates(self, seeds: Iterable[int], *, label: str = "replicate") -> Replicates:
        """This experiment under several seeds; ``train()`` fits those that are missing."""
        from nnx.plans.replicates import Replicates

        return Replicates(self, tuple(seeds), label)

    def folds(
        self,
        data: Any,
        splits: Iterable[SplitManifest],
        *,
        ids: Iterable[Any] | None = None,
        batch_size: int = 32,
        label: str = "fold",
    ) -> Folds:
        """This experiment cross-validated on ``splits``, as ``plan_folds`` gives them.

        ``data`` is a map-style dataset, whose rows are batched here (training shuffled), or a
        function of ``SplitIndices`` that returns the loaders ``(train, validation)``, the
        second in the order of ``indices.validation``. ``ids`` names the rows where the splits
        were planned with ids. ``train()`` fits the folds that are missing.
        """
        from nnx.plans.folds import Folds

        return Folds(
            self, data, tuple(splits), None if ids is None else tuple(ids), batch_size, label
        )
