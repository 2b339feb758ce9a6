"""One execution of a plan: a fresh attempt for every fit."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import datetime, timezone
from typing import Any

from nnx.provenance.manifest import ExperimentManifest
from nnx.utils import files as fs
from nnx.utils.caller import warn_caller
from nnx.utils.jsonlike import thaw

STATUSES = ("running", "completed", "failed", "cancelled")
ATTEMPT_FILE = "attempt.json"
PROVENANCE_FILE = "provenance.json"
ATTEMPT_FORMAT = "nnx.attempt/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What became of one call of ``train``.

    Times are UTC in ISO 8601. ``parent`` links the attempt and the checkpoint
    it resumed from, ``last_committed`` names the last committed checkpoint
    (tag, epoch, generation), ``error`` the exception that ended it.
    """

    attempt_id: str
    fingerprint: str
    run_id: str
    status: str
    started_at: str
    finished_at: str | None = None
    parent: Mapping[str, Any] | None = None
    last_committed: Mapping[str, Any] | None = None
    error: Mapping[str, Any] | None = None
    compile: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(
                f"Attempt.status must be one of {', '.join(STATUSES)}, not {self.status!r}"
            )

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "attempt_id": self.attempt_id,
            "fingerprint": self.fingerprint,
            "run_id": self.run_id,
            "status": self.status,
            "started_at": self.started_at,
        }
        for name in ("finished_at", "parent", "last_committed", "error", "compile"):
            value = getattr(self, name)
            if value is not None:
                state[name] = thaw(value) if isinstance(value, Mapping) else value
        return state

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Attempt:
        """Rebuild from :meth:`state`; keys of other writers are left out."""
        return Attempt(**{name: state[name] for name in _FIELDS if name in state})


_FIELDS = tuple(field.name for field in fields(Attempt))


class AttemptRecorder:
    """Keeps ``attempt.json`` of one fit true; does nothing without a manifest."""

    def __init__(
        self,
        folder: str,
        run_id: str,
        manifest: ExperimentManifest | None,
        parent: Mapping[str, Any] | None,
    ) -> None:
        self._folder = folder
        self.manifest = manifest
        self.attempt: Attempt | None = None
        if manifest is not None:
            self.attempt = Attempt(
                attempt_id=uuid.uuid4().hex,
                fingerprint=manifest.fingerprint(),
                run_id=run_id,
                status="running",
                started_at=_now(),
                parent=parent,
            )

    def start(self) -> None:
        """Write both files: the plan, and that an attempt at it runs."""
        if self.attempt is not None and self.manifest is not None:
            write_json(
                os.path.join(self._folder, PROVENANCE_FILE),
                {
                    "fingerprint": self.attempt.fingerprint,
                    "manifest": self.manifest.document(),
                },
            )
            self._write()

    def committed(self, tag: str, epoch: int, generation: int) -> None:
        """Record the last committed checkpoint, of which a killed process leaves word.

        Not being able to is a warning: the epoch is committed.
        """
        if self.attempt is not None:
            last = {"tag": tag, "epoch": epoch, "generation": generation}
            self.attempt = replace(self.attempt, last_committed=last)
            try:
                self._write()
            except OSError as problem:
                warn_caller(
                    f"the attempt's last checkpoint could not be recorded: {problem}",
                    RuntimeWarning,
                )

    def complete(self, compile: Mapping[str, Any] | None = None) -> None:
        self._end("completed", None, compile)

    def fail(self, error: BaseException, compile: Mapping[str, Any] | None = None) -> None:
        """Record a failure; not being able to is a warning, not another error."""
        status = "cancelled" if isinstance(error, KeyboardInterrupt) else "failed"
        record = {"type": type(error).__name__, "message": str(error)}
        try:
            self._end(status, record, compile)
        except Exception as problem:
            warn_caller(
                f"the {status} attempt could not be recorded: {problem}",
                RuntimeWarning,
            )

    def remove(self) -> None:
        """Take both files back, for a fit that wrote nothing else."""
        if self.attempt is not None:
            for name in (ATTEMPT_FILE, PROVENANCE_FILE):
                fs.remove_quietly(os.path.join(self._folder, name))

    def _end(
        self, status: str, error: Mapping[str, Any] | None, compile: Mapping[str, Any] | None
    ) -> None:
        if self.attempt is not None:
            self.attempt = replace(
                self.attempt, status=status, finished_at=_now(), error=error, compile=compile
            )
            self._write()

    def _write(self) -> None:
        assert self.attempt is not None
        path = os.path.join(self._folder, ATTEMPT_FILE)
        write_json(path, {"format": ATTEMPT_FORMAT, **self.attempt.state()})


def write_json(path: str, document: Mapping[str, Any]) -> None:
    text = json.dumps(document, sort_keys=True, indent=1, ensure_ascii=False)
    with fs.atomic_write(path, "wb") as stream:
        stream.write(text.encode("utf-8", "surrogatepass") + b"\n")


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="microseconds")
