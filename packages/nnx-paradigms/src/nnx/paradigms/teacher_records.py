"""A teacher's stored answers: one distribution over named candidates for each sample."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from nnx.errors import NNxError
from nnx.utils import validation as check
from nnx.utils.files import atomic_write
from nnx.utils.jsonlike import FrozenDict

RECORD_FORMAT = "nnx.teacher-record/1"
PROBABILITY_TOLERANCE = 1e-06
SEMANTICS = ("predictive", "calibrated", "empirical")
_PROVENANCE = ("source", "training_rights")


class TeacherRecordError(ValueError, NNxError):
    """A teacher record, or a set of them, that a student cannot learn from."""


@dataclass(frozen=True, slots=True)
class TeacherRecord:
    """What a teacher said of one sample: probabilities, never logits.

    ``candidates`` are the answers' ids in the order of ``probabilities``, which are
    finite, not negative and sum to 1 within 1e-6. ``semantics`` says what they are:
    "predictive", "calibrated" or "empirical". ``provenance`` holds at least ``source``
    and the declared ``training_rights``; NNx records the declaration and verifies
    nothing. ``label`` is the id of the right answer, where it is known.

    Raises :class:`TeacherRecordError` for anything else.
    """

    sample_id: str
    question_id: str
    candidates: tuple[str, ...]
    probabilities: tuple[float, ...]
    teacher: str
    revision: str
    schema_digest: str
    semantics: str
    provenance: Mapping[str, str]
    label: str | None = None

    def __post_init__(self) -> None:
        for name in ("sample_id", "question_id", "teacher", "revision", "schema_digest"):
            _text(name, getattr(self, name))
        if self.semantics not in SEMANTICS:
            _refuse("semantics", self.semantics, f"one of {', '.join(SEMANTICS)}")
        object.__setattr__(self, "candidates", _candidates(self.candidates))
        object.__setattr__(
            self, "probabilities", _probabilities(self.probabilities, len(self.candidates))
        )
        object.__setattr__(self, "provenance", _provenance(self.provenance))
        if self.label is not None and self.label not in self.candidates:
            _refuse("label", self.label, f"one of the candidates {', '.join(self.candidates)}")

    def distribution(self) -> dict[str, float]:
        """The probabilities by candidate."""
        return dict(zip(self.candidates, self.probabilities))

    def state(self) -> dict[str, Any]:
        """Plain values with the format's name; an absent label is left out."""
        state: dict[str, Any] = {"format": RECORD_FORMAT}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple):
                value = list(value)
            elif isinstance(value, Mapping):
                value = dict(value)
            if value is not None:
                state[field.name] = value
        return state

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> TeacherRecord:
        """The record of :meth:`state`; unknown and missing fields are refused."""
        if not isinstance(state, Mapping):
            raise TeacherRecordError(f"a teacher record is an object, not {check.show(state)}")
        if state.get("format") != RECORD_FORMAT:
            _refuse("format", state.get("format"), repr(RECORD_FORMAT))
        names = [field.name for field in fields(TeacherRecord)]
        unknown = sorted(set(state) - {*names, "format"})
        missing = [name for name in names if name not in state and name != "label"]
        if unknown or missing:
            what = f"lacks {', '.join(missing)}" if missing else f"has unknown {', '.join(unknown)}"
            raise TeacherRecordError(f"the teacher record {what}")
        return TeacherRecord(**{name: state[name] for name in names if name in state})


def read_teacher_records(path: str | os.PathLike[str]) -> list[TeacherRecord]:
    """The records of a JSON Lines file: one strict JSON object a line.

    Raises :class:`TeacherRecordError` with ``path:line`` for a line that is no record
    (blank lines, repeated keys, NaN and numbers too large for a float included) and for a
    file without one.
    """
    records = []
    with open(path, encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                records.append(TeacherRecord.from_state(_strict(line)))
            except (TeacherRecordError, ValueError, RecursionError) as error:
                raise TeacherRecordError(f"{os.fspath(path)}:{number}: {error}") from None
    if not records:
        raise TeacherRecordError(f"{os.fspath(path)} has no teacher records")
    return records


def write_teacher_records(path: str | os.PathLike[str], records: Iterable[TeacherRecord]) -> None:
    """Write ``records`` as JSON Lines: the old file, or the whole new one."""
    lines = []
    for record in records:
        if not isinstance(record, TeacherRecord):
            check.refuse_type("write_teacher_records", "records", record, "TeacherRecord objects")
        lines.append(json.dumps(record.state(), ensure_ascii=False, allow_nan=False))
    if not lines:
        raise TeacherRecordError("write_teacher_records needs at least one record")
    with atomic_write(os.fspath(path), "w") as stream:
        stream.write("\n".join(lines) + "\n")


def _strict(line: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if len(set(keys)) != len(keys):
            raise TeacherRecordError("an object has a key twice")
        return dict(pairs)

    def constant(text: str) -> NoReturn:
        raise TeacherRecordError(f"{text} is no number of JSON")

    return json.loads(line, object_pairs_hook=unique, parse_constant=constant)


def _refuse(field: str, value: Any, domain: str) -> NoReturn:
    raise TeacherRecordError(f"TeacherRecord.{field} must be {domain}, not {check.show(value)}")


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        _refuse(field, value, "a string that is not blank")
    return value


def _candidates(value: Any) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or len(value) < 2:
        _refuse("candidates", value, "at least two candidate ids")
    names = tuple(_text("candidates", name) for name in value)
    if len(set(names)) != len(names):
        _refuse("candidates", names, "ids that differ")
    return names


def _probabilities(value: Any, count: int) -> tuple[float, ...]:
    if not isinstance(value, (list, tuple)) or len(value) != count:
        _refuse("probabilities", value, f"{count} numbers, one for each candidate")
    numbers = []
    for probability in value:
        try:
            numbers.append(
                float(check.real("TeacherRecord", "probabilities", probability, at_least=0))
            )
        except (ValueError, OverflowError):
            _refuse("probabilities", probability, "finite and not negative")
    if abs(sum(numbers) - 1.0) > PROBABILITY_TOLERANCE:
        _refuse("probabilities", value, f"a distribution: they sum to {sum(numbers):.9g}")
    return tuple(numbers)


def _provenance(value: Any) -> FrozenDict[str, str]:
    if not isinstance(value, Mapping):
        _refuse("provenance", value, "a mapping with source and training_rights")
    for name in _PROVENANCE:
        if name not in value:
            raise TeacherRecordError(
                f"TeacherRecord.provenance lacks {name!r}: say where the record came from (source) "
                "and under which rights a student may be trained on it (training_rights)"
            )
    return FrozenDict(
        {_text("provenance", n): _text(f"provenance[{n}]", v) for n, v in value.items()}
    )
