"""A stored run as a comparison reads it: each file once, no checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nnx.comparison.observations import ComparisonError
from nnx.provenance import load_provenance
from nnx.provenance.attempts import Attempt
from nnx.provenance.manifest import canonical_bytes
from nnx.provenance.records import ProvenanceRecord
from nnx.records import NNIterationDataPoint, ResumeStatus
from nnx.store.history_of import iterate_committed
from nnx.store.metadata import read_metadata
from nnx.store.paths import BEST_POINTER, RunPaths
from nnx.store.pointer import locate_run
from nnx.store.run import NNRun, from_file


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run's configuration, provenance and where its files are."""

    id: str
    run: NNRun
    paths: RunPaths
    provenance: ProvenanceRecord | None
    resume: ResumeStatus | None

    @staticmethod
    def read(run_id: str, root: str | None) -> StoredRun:
        """Raises :class:`ComparisonError` for the moving ``best`` and for unreadable files."""
        if run_id == BEST_POINTER:
            raise ComparisonError("'best' may name another run tomorrow; name the run itself")
        try:
            paths = locate_run(run_id, root)
            if not os.path.isfile(paths.run_yaml):
                raise ComparisonError(f"there is no run {run_id!r} in {paths.root}")
            resume = read_metadata(paths).get("resume")
            return StoredRun(
                id=paths.id,
                run=from_file(paths),
                paths=paths,
                provenance=load_provenance(paths.id, paths.root),
                resume=None if resume is None else ResumeStatus.from_state(resume),
            )
        except ComparisonError:
            raise
        except (ValueError, OSError, TypeError, KeyError, AttributeError) as error:
            raise ComparisonError(f"run {run_id!r} cannot be read: {error}") from None

    @property
    def attempt(self) -> Attempt | None:
        """The latest attempt, as the run's provenance recorded it."""
        return None if self.provenance is None else self.provenance.attempt

    @property
    def status(self) -> str:
        return "unknown" if self.attempt is None else self.attempt.status

    @property
    def data(self) -> str | None:
        """What its provenance says of the data, or its ``data_id``."""
        declared = self.declared("data")
        training = self.run.trainer or self.run.train
        return declared if declared is not None else training.data_id

    @property
    def split_id(self) -> str | None:
        """What its provenance says of the splits."""
        return self.declared("splits")

    def declared(self, kind: str) -> str | None:
        """The identities under ``kind`` of the manifest; ``None`` unless all are known."""
        if self.provenance is None:
            return None
        refs = getattr(self.provenance.manifest, kind)
        if not refs or any(ref.value is None for ref in refs.values()):
            return None
        if len(refs) == 1:
            (ref,) = refs.values()
            return str(ref.value)
        return canonical_bytes({name: ref.state() for name, ref in refs.items()}).decode()

    def epochs(self) -> Iterator[NNIterationDataPoint]:
        """The last record of each committed epoch; nothing while it is not known which are."""
        last: int | None = None
        if self.attempt is not None:
            committed = self.attempt.last_committed
            if committed is None:
                return
            last = int(committed["epoch"])
        elif os.path.exists(self.paths.marker) or _has_journal(self.paths):
            return
        before: NNIterationDataPoint | None = None
        try:
            for record in iterate_committed(self.paths, last):
                if before is not None and record.epoch_idx != before.epoch_idx:
                    yield before
                before = record
        except (ValueError, OSError) as error:
            raise ComparisonError(f"the history of run {self.id} cannot be read: {error}") from None
        if before is not None:
            yield before

    def configuration(self) -> dict[str, Any]:
        """``run.yaml`` without its id, salt, seeds and device, and without a parent."""
        state = self.run.state()
        for key in ("id", "salt"):
            state.pop(key, None)
        model = dict(state["model"])
        model.pop("device", None)
        if isinstance(model.get("net"), dict):
            model["net"] = {k: v for k, v in model["net"].items() if k != "seed"}
        state["model"] = model
        for part in ("train", "trainer"):
            if state.get(part) is not None:
                dropped = ("seed", "parent_run_id", "parent_checkpoint")
                state[part] = {k: v for k, v in state[part].items() if k not in dropped}
        return state


def _has_journal(paths: RunPaths) -> bool:
    return os.path.isdir(paths.history)
