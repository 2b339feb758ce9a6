"""The plan: an experiment, and what can be done with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nnx.plans import fitting, probe, validation
from nnx.plans.experiment import Experiment
from nnx.plans.folds import Folds
from nnx.plans.outcomes import FitResult, PlanValidation, ProbeResult
from nnx.plans.replicates import Replicates

if TYPE_CHECKING:
    from nnx.data_splits import SplitManifest


@dataclass(frozen=True, slots=True, eq=False)
class ExperimentPlan(Experiment):
    """Configuration, data, seed and what trains: everything that one fit needs.

    ``train_data=None`` and ``val_data=INHERIT`` are the loaders of ``train``, and
    ``data_identity=INHERIT`` is its ``data_id``. Data may be re-iterable batches or a
    function without arguments that makes them, called once per fit after seeding.
    ``seed=None`` is the training's own. What is not an immutable parameter object is
    borrowed: shared by all branches and fits, never copied or reset.
    """

    def validate(self) -> PlanValidation:
        """Every problem that shows without reading data, calling a factory or building a net."""
        return validation.validate(self)

    def probe(self, example_batch: Any) -> ProbeResult:
        """Try one batch on a temporary model; the process is left as it was.

        A tensor, or a tuple of one, is inputs alone. The loss is that of the default
        step in train mode; ``None`` without a target, for a step or objective of one's
        own, and for a batch whose every target is masked. Raises :class:`PlanError` for
        a plan without a valid model, network and seed.
        """
        return probe.probe(self, example_batch)

    def fit(self, *, attempt: str | None = None) -> FitResult:
        """Train once, as an equally seeded script would, into a run of its own.

        ``attempt`` names the fit; by default the name is random. It takes part in the
        run's id, so that repeated fits are different runs. Raises :class:`PlanError` for a plan
        with a problem, ``FileExistsError`` for an attempt that was made before, and
        ``RuntimeError`` in a process group of several ranks.
        """
        return fitting.fit(self, attempt=attempt)

    def run_id(self, attempt: str) -> str:
        """The id of the run that ``fit(attempt=attempt)`` writes; nothing is built.

        A run of a module that changes its own description while it is built may differ.
        """
        return fitting.planned_run(self, attempt).id

    def replicates(
        self, seeds: Iterable[int], *, label: str = "replicate"
    ) -> Replicates[ExperimentPlan]:
        """This experiment under several seeds; ``train()`` fits those that are missing."""
        return Replicates(self, tuple(seeds), label)

    def folds(
        self,
        data: Any,
        splits: Iterable[SplitManifest],
        *,
        ids: Iterable[Any] | None = None,
        batch_size: int = 32,
        label: str = "fold",
    ) -> Folds[ExperimentPlan]:
        """This experiment cross-validated on ``splits``, as ``plan_folds`` gives them.

        ``data`` is a map-style dataset, whose rows are batched here (training shuffled), or a
        function of ``SplitIndices`` that returns the loaders ``(train, validation)``, the
        second in the order of ``indices.validation``. ``ids`` names the rows where the splits
        were planned with ids. ``train()`` fits the folds that are missing.
        """
        return Folds(
            self, data, tuple(splits), None if ids is None else tuple(ids), batch_size, label
        )
