"""One experiment cross-validated: a run for each fold, and what each predicted of its fold."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from nnx import Checkpoints
from nnx.data_splits import SplitError, SplitIndices, SplitManifest
from nnx.models import adapter_for
from nnx.nn_model import NNModel
from nnx.plans.continuing import newest, train_or_continue
from nnx.plans.experiment import Experiment
from nnx.plans.fitting import manifest_of
from nnx.plans.outcomes import PlanError
from nnx.plans.validation import validate
from nnx.store import NNCheckpoint, NNRun
from nnx.store.predictions import load_predictions, save_predictions
from nnx.utils import validation as check
from torch.utils.data import DataLoader, Subset

SPLIT = "out-of-fold"
P = TypeVar("P", bound=Experiment)


@dataclass(frozen=True, slots=True)
class OutOfFold:
    """What was predicted of each row by the model that did not train on it, as it is stored.

    Rows are in the order of their folds; ``folds`` says which. All values are text, as in
    the run's CSV.
    """

    sample_ids: tuple[str, ...]
    targets: tuple[str, ...]
    predicted: tuple[str, ...]
    folds: tuple[int, ...]

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.sample_ids)


@dataclass(frozen=True, slots=True, eq=False)
class Folds(Generic[P]):
    """The fits of ``plan`` on each of ``splits``; ``label`` names the attempt of all.

    A fold's run has the digest of its split as data identity, in its id and provenance: the
    same plan and split is the same run, and one that was interrupted goes on from its last
    committed epoch. Its predictions of its own fold lie in the run
    (``predictions/out-of-fold.csv``).
    """

    plan: P
    data: Any = field(repr=False)
    splits: tuple[SplitManifest, ...]
    ids: tuple[Any, ...] | None = field(default=None, repr=False)
    batch_size: int = 32
    label: str = "fold"

    def __post_init__(self) -> None:
        check.count("folds", "batch_size", self.batch_size)
        check.salt("folds", "label", self.label)
        if not self.splits or not all(isinstance(s, SplitManifest) for s in self.splits):
            raise ValueError("splits must be split manifests, as plan_folds(...) gives them")
        if not callable(self.data) and not hasattr(self.data, "__getitem__"):
            raise ValueError(
                f"data must be a map-style dataset or a function of SplitIndices that returns "
                f"(train, validation) loaders, not {type(self.data).__name__}"
            )
        if callable(self.data) and self.ids is None and self.splits[0].ids == "sample":
            raise ValueError("the splits were planned with ids: give the rows' ids=")
        for split in self.splits:
            if not split.validation:
                raise SplitError("a split without validation rows is no fold")
            self._indices(split)  # a split of other data is refused before anything trains

    def plans(self) -> tuple[P, ...]:
        """The plan of each fold."""
        return tuple(self._plan(split) for split in self.splits)

    def missing(self) -> tuple[int, ...]:
        """The folds whose training is not complete."""
        return tuple(
            i for i, plan in enumerate(self.plans()) if not newest(plan, self.label).complete
        )

    def train(self, *, checkpoint: str = "last") -> Mapping[int, NNRun]:
        """Train what is missing and predict each fold; the runs by fold.

        ``checkpoint`` is what predicts: the weights at the end of training. Those of
        ``"best"`` were elected on the fold itself, and look better than they are.
        """
        if checkpoint not in ("last", "best"):
            raise ValueError(f'checkpoint is "last" or "best", not {checkpoint!r}')
        runs: dict[int, NNRun] = {}
        for fold, (split, plan) in enumerate(zip(self.splits, self.plans())):
            fitted = train_or_continue(plan, self.label)
            runs[fold] = fitted.run
            stored = any(one.split == SPLIT for one in load_predictions(fitted.run.id))
            if not fitted.reused or not stored:
                self._predict(fitted.run.id, split, checkpoint)
        return MappingProxyType(runs)

    def out_of_fold(self) -> OutOfFold:
        """The stored predictions of every fold; ``ValueError`` while one is missing."""
        if missing := self.missing():
            raise ValueError(f"fold {', '.join(map(str, missing))} is not trained: call train()")
        rows: list[tuple[str, str, str, int]] = []
        for fold, plan in enumerate(self.plans()):
            found = [
                one
                for one in load_predictions(str(newest(plan, self.label).run_id))
                if one.split == SPLIT
            ]
            if not found:
                raise ValueError(f"fold {fold} was not predicted: call train()")
            rows += zip(
                found[0].sample_ids, found[0].targets, found[0].predicted,
                [fold] * len(found[0].targets),
            )  # fmt: skip
        return OutOfFold(*zip(*rows))

    # -- one fold ----------------------------------------------------------------------

    def _plan(self, split: SplitManifest) -> P:
        indices = self._indices(split)
        plan = self.plan.with_data(
            train=lambda: self._loaders(indices)[0],
            val=lambda: self._loaders(indices)[1],
            identity=split.digest(),
        )
        if problems := validate(plan).diagnostics:
            raise PlanError(problems)
        manifest = self.plan.provenance or manifest_of(plan)
        splits = {**manifest.splits, "fold": split}
        return plan.with_provenance(dataclasses.replace(manifest, splits=splits))

    def _indices(self, split: SplitManifest) -> SplitIndices:
        rows = (
            self.ids
            if self.ids is not None
            else range(split.n_rows if callable(self.data) else len(self.data))
        )
        return split.resolve(rows, source=split.source if split.source.kind != "unknown" else None)

    def _loaders(self, indices: SplitIndices) -> tuple[Any, Any]:
        if callable(self.data):
            train, validation = self.data(indices)
            return train, validation
        return (
            DataLoader(Subset(self.data, indices.train), self.batch_size, shuffle=True),
            DataLoader(Subset(self.data, indices.validation), self.batch_size),
        )

    def _predict(self, run_id: str, split: SplitManifest, checkpoint: str) -> None:
        """Store what a fold's model predicts of its fold."""
        model = NNModel.from_checkpoint(_checkpoint(run_id, checkpoint))
        model.batch_adapter = self.plan.batch_adapter
        indices = self._indices(split)
        loader = self._loaders(indices)[1]
        adapter = adapter_for(model.net, model.batch_adapter)
        targets = np.concatenate([_column(adapter.split(batch)[2]) for batch in loader])
        result = model.predict(loader)
        if len(targets) != len(indices.validation):
            raise ValueError(
                f"the validation loader gave {len(targets)} rows for the {len(indices.validation)} "
                "of the fold"
            )
        floats = targets.dtype.kind == "f"
        predicted = _column(torch.from_numpy(result.logits)) if floats else _column(result.classes)
        save_predictions(
            run_id, SPLIT, targets=targets.tolist(), predicted=predicted.tolist(),
            sample_ids=_names(self.ids, indices.validation),
        )  # fmt: skip


def _checkpoint(run_id: str, tag: str) -> NNCheckpoint:
    found = NNCheckpoint.load(run_id, Checkpoints[tag.upper()])
    if found is None:
        raise ValueError(f"run {run_id} has no checkpoint {tag!r}")
    return found


def _names(ids: Sequence[Any] | None, rows: Sequence[int]) -> list[Any]:
    return [row if ids is None else ids[row] for row in rows]


def _column(values: Any) -> np.ndarray:
    """One number for each row."""
    array = np.asarray(values.cpu() if hasattr(values, "cpu") else values)
    array = array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array
    if array.ndim != 1:
        raise ValueError(
            f"out-of-fold predictions are kept of one target for each row, not of {array.shape[1:]}"
        )
    return array
