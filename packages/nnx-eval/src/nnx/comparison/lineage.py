"""The identity of what was trained: a configuration and, of a continuation, what came before."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from nnx.comparison.observations import ComparisonError
from nnx.comparison.stored import StoredRun
from nnx.provenance.manifest import canonical_bytes
from nnx.store.paths import BEST_POINTER

_MOST_ANCESTORS = 64
_MOVING_TAGS = ("last", "best")


class Lineages:
    """Runs of one folder, each read once, and the identities of their configurations."""

    def __init__(self, root: str | None) -> None:
        self._root = root
        self._runs: dict[str, StoredRun] = {}

    def run(self, run_id: str) -> StoredRun:
        """The stored run; :class:`ComparisonError` when it cannot be read."""
        if run_id not in self._runs:
            self._runs[run_id] = StoredRun.read(run_id, self._root)
        return self._runs[run_id]

    def config_identity(self, run: StoredRun) -> str:
        """A digest of the run's configuration without salt, seeds and device.

        With a parent it also covers the parent's own identity, back through every ancestor
        that recorded facts allow to follow, the declared data and splits, the checkpoint's
        tag and the resume mode. An unknown lineage is an identity of its own: it equals no
        other run's. Raises :class:`ComparisonError` for a cycle or over 64 ancestors.
        """
        chain, seen = [run], {run.id}
        origin: dict[str, Any] | None = None
        while True:
            parent_id = _parent_id(chain[-1])
            if parent_id is None:
                break
            if parent_id in seen:
                raise ComparisonError(f"the lineage of run {run.id} returns to {parent_id}")
            parent = self._followed(chain[-1], parent_id)
            if parent is None:
                origin = _named(chain[-1], parent_id)
                break
            if len(chain) > _MOST_ANCESTORS:
                raise ComparisonError(f"run {run.id} has more than {_MOST_ANCESTORS} ancestors")
            chain.append(parent)
            seen.add(parent.id)
        identity: Any = origin
        for member in reversed(chain):
            before = self._runs.get(_parent_id(member) or "")
            state = member.configuration()
            if _parent_id(member) is not None:
                state["lineage"] = {"parent": identity, **_procedure(member, before)}
            identity = hashlib.sha256(canonical_bytes(state)).hexdigest()
        return str(identity)

    def _followed(self, child: StoredRun, parent_id: str) -> StoredRun | None:
        """The parent as the child found it; ``None`` when records cannot tell."""
        if parent_id == BEST_POINTER:
            return None
        try:
            parent = self.run(parent_id)
        except ComparisonError as error:
            if "there is no run" in str(error):
                return None
            raise
        link = _link(child)
        if _needs_start(child, parent) and _start(child) is None:
            return None
        recorded = link.get("attempt_id")
        if parent.attempt is None:
            return parent if recorded is None and _start(child) is not None else None
        if recorded is not None:
            return parent if recorded == parent.attempt.attempt_id else None
        return parent if _completed_before(parent, child) else None


def _parent_id(run: StoredRun) -> str | None:
    training = run.run.trainer or run.run.train
    return training.parent_run_id or training.resume_from_run_id or run.run.train.parent_run_id


def _tag(run: StoredRun) -> str | None:
    training = run.run.trainer or run.run.train
    return training.resume_from_checkpoint


def _link(run: StoredRun) -> Mapping[str, Any]:
    """What the run's attempt recorded of the checkpoint that it started from."""
    attempt = run.attempt
    return {} if attempt is None or attempt.parent is None else attempt.parent


def _start(run: StoredRun) -> int | None:
    epoch = _link(run).get("epoch")
    return None if epoch is None else int(epoch)


def _needs_start(child: StoredRun, parent: StoredRun | None) -> bool:
    """Whether the epoch it started from is part of the procedure, not an outcome."""
    if _tag(child) not in _MOVING_TAGS:
        return _mode(child) is not None
    return parent is not None and parent.attempt is not None and parent.status != "completed"


def _mode(run: StoredRun) -> str | None:
    return None if run.resume is None or run.resume.mode == "fresh" else run.resume.mode


def _procedure(run: StoredRun, parent: StoredRun | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "data": run.declared("data"),
        "splits": run.declared("splits"),
        "checkpoint": _tag(run),
        "mode": _mode(run),
    }
    if _needs_start(run, parent):
        found["start_epoch"] = _start(run)
    return found


def _named(child: StoredRun, parent_id: str) -> dict[str, Any]:
    """A parent that is not followed: its checkpoint, or attempt and epoch; else unknown."""
    link = _link(child)
    if link.get("checkpoint_id") is not None:
        return {"checkpoint": str(link["checkpoint_id"])}
    if link.get("attempt_id") is not None and link.get("epoch") is not None:
        return {"attempt": str(link["attempt_id"]), "epoch": int(link["epoch"])}
    return {"unknown": [child.id, parent_id]}  # of this run alone


def _completed_before(parent: StoredRun, child: StoredRun) -> bool:
    ended = None if parent.attempt is None else parent.attempt.finished_at
    began = None if child.attempt is None else child.attempt.started_at
    if parent.status != "completed" or ended is None or began is None:
        return False
    return datetime.fromisoformat(ended) <= datetime.fromisoformat(began)
