"""Distillation from a teacher's stored distributions, without the teacher.

The student's distribution is compared at temperature 1 with the probabilities as they
were recorded: there are no logits to soften, and none are made up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from nnx.components import ComponentSpec
from nnx.objectives import LossTerm, Objective, ObjectiveContext, ObjectiveResult
from nnx.paradigms.teacher_records import PROBABILITY_TOLERANCE as PROBABILITY_TOLERANCE
from nnx.paradigms.teacher_records import RECORD_FORMAT as RECORD_FORMAT
from nnx.paradigms.teacher_records import SEMANTICS as SEMANTICS
from nnx.paradigms.teacher_records import TeacherRecord as TeacherRecord
from nnx.paradigms.teacher_records import TeacherRecordError as TeacherRecordError
from nnx.paradigms.teacher_records import read_teacher_records as read_teacher_records
from nnx.paradigms.teacher_records import write_teacher_records as write_teacher_records
from nnx.prediction.batches import inference_context
from nnx.records import NNEvaluationDataPoint
from nnx.utils import validation as check
from nnx.utils.modes import eval_mode
from torch.utils.data import DataLoader, Dataset

if TYPE_CHECKING:
    from nnx.models import Model

VERSION = 1
UNLABELLED = -100

_Item = tuple[torch.Tensor, torch.Tensor, torch.Tensor, str]


@dataclass(frozen=True, slots=True, eq=False)
class TeacherBatch:
    """Rows of a :class:`TeacherDataset`.

    ``inputs`` (B, ...), ``teacher`` (B, C) probabilities in the student's order,
    ``target`` (B,) class indices (−100 without a label), ``labelled`` (B,) booleans.
    """

    inputs: torch.Tensor
    teacher: torch.Tensor
    target: torch.Tensor
    labelled: torch.Tensor
    sample_ids: tuple[str, ...]
    schema_digest: str
    candidates: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.sample_ids)


class TeacherDataset(Dataset[_Item]):
    """Teacher records joined with a student's inputs.

    ``inputs`` are the samples by id; ``candidates`` is the order of the student's outputs.
    Every distribution is put into that order by the candidates' ids, never by position.

    Raises :class:`TeacherRecordError` for no records, a sample that is there twice or has
    no input, other candidates than these, and another ``schema_digest``.
    """

    def __init__(
        self,
        records: Iterable[TeacherRecord],
        inputs: Mapping[str, Any],
        *,
        candidates: Sequence[str],
        schema_digest: str,
    ) -> None:
        self.candidates = _order(candidates)
        self.schema_digest = check.text("TeacherDataset", "schema_digest", schema_digest)
        self.records = tuple(records)
        if not self.records:
            raise TeacherRecordError("TeacherDataset needs at least one record")
        self._check(inputs)
        order = [[r.candidates.index(c) for c in self.candidates] for r in self.records]
        self._teacher = torch.tensor(
            [[r.probabilities[i] for i in at] for r, at in zip(self.records, order)],
            dtype=torch.float32,
        )
        self._target = torch.tensor(
            [
                UNLABELLED if r.label is None else self.candidates.index(r.label)
                for r in self.records
            ]
        )
        self._inputs = [torch.as_tensor(inputs[r.sample_id]) for r in self.records]

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> _Item:
        name = self.records[index].sample_id
        return self._inputs[index], self._teacher[index], self._target[index], name

    @property
    def labelled(self) -> int:
        """How many records have a label."""
        return int((self._target != UNLABELLED).sum())

    @property
    def sample_ids(self) -> tuple[str, ...]:
        """The samples' ids, in the order of the records."""
        return tuple(record.sample_id for record in self.records)

    def collate(self, items: Sequence[_Item]) -> TeacherBatch:
        """One batch of some items."""
        inputs, teacher, target, names = zip(*items)
        targets = torch.stack(target)
        return TeacherBatch(
            torch.stack(inputs), torch.stack(teacher), targets, targets != UNLABELLED,
            tuple(names), self.schema_digest, self.candidates,
        )  # fmt: skip

    def loader(
        self, batch_size: int, *, shuffle: bool = False, seed: int | None = None
    ) -> DataLoader[_Item]:
        """A loader of :class:`TeacherBatch`; ``seed`` gives it a shuffling of its own."""
        size = check.count("TeacherDataset.loader", "batch_size", batch_size)
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return DataLoader(
            self, batch_size=size, shuffle=shuffle, collate_fn=self.collate, generator=generator
        )

    def objective(
        self, *, alpha: float = 0.5, nonfinite: str = "fail"
    ) -> OfflineDistillationObjective:
        """The objective that trains on this dataset's batches.

        Raises :class:`TeacherRecordError` when ``alpha`` is below 1 and a label is missing.
        """
        made = OfflineDistillationObjective(
            schema_digest=self.schema_digest,
            candidates=self.candidates,
            alpha=alpha,
            nonfinite=nonfinite,
        )
        missing = len(self) - self.labelled
        if made.alpha < 1 and missing:
            raise TeacherRecordError(
                f"{missing} of {len(self)} records have no label, which alpha={made.alpha} needs of "
                "every one; label them, leave them out, or train with alpha=1"
            )
        return made

    def eval_step(self) -> OfflineDistillationEval:
        """The ``eval_step_fn`` for a validation loader of such batches."""
        return OfflineDistillationEval(schema_digest=self.schema_digest, candidates=self.candidates)

    def _check(self, inputs: Mapping[str, Any]) -> None:
        seen: set[str] = set()
        for record in self.records:
            if not isinstance(record, TeacherRecord):
                check.refuse_type("TeacherDataset", "records", record, "TeacherRecord objects")
            name = record.sample_id
            if name in seen:
                raise TeacherRecordError(f"the sample {name!r} has two records")
            seen.add(name)
            if name not in inputs:
                raise TeacherRecordError(f"the sample {name!r} has a record but no input")
            if record.schema_digest != self.schema_digest:
                raise TeacherRecordError(
                    f"the record of {name!r} answers the schema {record.schema_digest!r}, not "
                    f"{self.schema_digest!r}"
                )
            if set(record.candidates) != set(self.candidates):
                lacks = sorted(set(self.candidates) - set(record.candidates))
                more = sorted(set(record.candidates) - set(self.candidates))
                raise TeacherRecordError(
                    f"the record of {name!r} has other candidates than the student: missing "
                    f"{lacks}, unknown {more}"
                )


class OfflineDistillationObjective(Objective):
    """``alpha · KL(teacher || student) + (1 − alpha) · CE(student, label)``, at temperature 1.

    The terms are ``"imitation"`` and ``"supervised"``, each over the rows of a batch. Its
    identity is a required component, so that a resume with another one is refused.

    Raises ``ValueError`` for ``alpha`` outside [0, 1].
    """

    def __init__(
        self,
        *,
        schema_digest: str,
        candidates: Sequence[str],
        alpha: float = 0.5,
        nonfinite: str = "fail",
    ) -> None:
        super().__init__(nonfinite=nonfinite)
        owner = "OfflineDistillationObjective"
        self.schema_digest = check.text(owner, "schema_digest", schema_digest)
        self.candidates = _order(candidates)
        self.alpha = float(check.real(owner, "alpha", alpha, at_least=0, at_most=1))

    def __call__(self, ctx: ObjectiveContext) -> ObjectiveResult:
        batch = _checked(ctx.batch, self.schema_digest, self.candidates)
        if self.alpha < 1 and not bool(batch.labelled.all()):
            raise TeacherRecordError(
                f"a batch has rows without a label, which alpha={self.alpha} needs of every one"
            )
        logits = ctx.full_precision(_logits(ctx.model, batch, self.candidates))
        logarithms = F.log_softmax(logits, dim=1)
        rows, terms = len(batch), []
        if self.alpha > 0:
            imitation = _divergence(batch.teacher.to(logits), logarithms).sum()
            terms.append(LossTerm("imitation", imitation, rows, weight=self.alpha))
        if self.alpha < 1:
            target = batch.target.to(logits.device)
            supervised = F.nll_loss(logarithms, target, reduction="sum")
            terms.append(LossTerm("supervised", supervised, rows, weight=1 - self.alpha))
        metrics = {term.name: term.value for term in terms if term.value is not None}
        return ObjectiveResult(terms, NNEvaluationDataPoint(metrics=metrics, count=rows))

    def identity(self) -> dict[str, Any]:
        """What the training means, as plain values, for a manifest's ``objective``."""
        return {
            "id": "offline_distillation",
            "version": VERSION,
            "schema_digest": self.schema_digest,
            "alpha": self.alpha,
            "candidates": list(self.candidates),
        }

    def component_spec(self) -> ComponentSpec:
        return ComponentSpec("offline_distillation.objective", version=1)

    def component_state(self) -> dict[str, Any]:
        return self.identity()

    def check_component_state(self, state: Mapping[str, Any], *, version: int) -> list[str]:
        """Every part of the identity that differs."""
        return [
            f"{name} is {value!r}, but the checkpoint was trained with {state.get(name)!r}"
            for name, value in self.identity().items()
            if state.get(name) != value
        ]

    def load_component_state(self, state: Mapping[str, Any], *, version: int) -> None:
        """Nothing moves: the identity was checked."""


@dataclass(frozen=True, slots=True)
class Measure:
    """One number and how many records it is over; ``reason`` says why there is none."""

    value: float | None
    denominator: int
    reason: str | None = None

    def state(self) -> dict[str, Any]:
        return {"value": self.value, "denominator": self.denominator, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class DistillationReport:
    """How a student does, in three separate ways.

    ``agreement`` (share of equal best answers) and ``imitation_loss`` (mean
    KL(teacher || student)) are over every record; ``label_accuracy`` and ``label_nll``
    over the labelled ones alone. Imitating a teacher is not being right.
    """

    agreement: Measure
    imitation_loss: Measure
    label_accuracy: Measure
    label_nll: Measure
    candidates: tuple[str, ...] = ()
    schema_digest: str = ""

    def state(self) -> dict[str, Any]:
        """Plain values."""
        return {
            **{name: getattr(self, name).state() for name in _MEASURES},
            "candidates": list(self.candidates),
            "schema_digest": self.schema_digest,
        }

    def text(self) -> str:
        """One line for each measure."""
        lines = []
        for name, title in _MEASURES.items():
            measure: Measure = getattr(self, name)
            shown = "unknown" if measure.value is None else f"{measure.value:.6g}"
            why = f" ({measure.reason})" if measure.reason else ""
            lines.append(f"{title}: {shown} over {measure.denominator} records{why}")
        return "\n".join(lines)


_MEASURES = {
    "agreement": "teacher agreement",
    "imitation_loss": "imitation loss",
    "label_accuracy": "labelled accuracy",
    "label_nll": "labelled NLL",
}


class OfflineDistillationEval:
    """An ``eval_step_fn``: the record's loss is the imitation loss, whatever ``alpha`` is.

    Its metrics are ``agreement``, ``imitation_loss`` and, where there are labels,
    ``label_accuracy`` and ``label_nll``.
    """

    def __init__(self, *, schema_digest: str, candidates: Sequence[str]) -> None:
        self.schema_digest = check.text("OfflineDistillationEval", "schema_digest", schema_digest)
        self.candidates = _order(candidates)

    def __call__(self, ctx: Any) -> NNEvaluationDataPoint:
        report = _report(ctx.model, ctx.val_loader, self.schema_digest, self.candidates)
        values = {name: getattr(report, name).value for name in _MEASURES}
        return NNEvaluationDataPoint(
            loss=report.imitation_loss.value,
            count=report.agreement.denominator,
            metrics={name: value for name, value in values.items() if value is not None},
        )


def evaluate_offline(
    model: Model, data: TeacherDataset | Iterable[TeacherBatch], *, batch_size: int = 256
) -> DistillationReport:
    """Compare ``model`` with its teacher and with the labels, over all of ``data``.

    The net runs in eval mode without gradients and gets its modes back. Raises
    :class:`TeacherRecordError` for no batches and for batches of several schemas.
    """
    if isinstance(data, TeacherDataset):
        batches: Iterable[Any] = data.loader(batch_size)
        return _report(model, batches, data.schema_digest, data.candidates)
    batches = iter(data)
    first = next(batches, None)
    if first is None:
        raise TeacherRecordError("evaluate_offline needs at least one batch")
    first = _checked(first)

    def chained() -> Iterable[Any]:
        yield first
        yield from batches

    return _report(model, chained(), first.schema_digest, first.candidates)


def _report(
    model: Model, batches: Iterable[Any], schema_digest: str, candidates: tuple[str, ...]
) -> DistillationReport:
    sums = torch.zeros(4, dtype=torch.float64)
    rows = labelled = 0
    with inference_context(model), eval_mode(model.net):
        for given in batches:
            batch = _checked(given, schema_digest, candidates)
            logits = _logits(model, batch, candidates).double()
            logarithms = F.log_softmax(logits, dim=1)
            teacher = batch.teacher.to(logits)
            valid = batch.labelled.to(logits.device)
            target = batch.target.to(logits.device)[valid]
            best = logits.argmax(dim=1)
            sums += torch.stack(
                (
                    (best == teacher.argmax(dim=1)).double().sum(),
                    _divergence(teacher, logarithms).sum(),
                    (best[valid] == target).double().sum(),
                    F.nll_loss(logarithms[valid], target, reduction="sum")
                    if len(target)
                    else logits.new_zeros(()),
                )
            ).cpu()
            rows, labelled = rows + len(batch), labelled + len(target)
    if not rows:
        raise TeacherRecordError("there are no records to evaluate on")
    agreement, imitation, right, nll = sums.tolist()
    unknown = None if labelled else "no record has a label"
    return DistillationReport(
        Measure(agreement / rows, rows),
        Measure(imitation / rows, rows),
        Measure(right / labelled if labelled else None, labelled, unknown),
        Measure(nll / labelled if labelled else None, labelled, unknown),
        candidates,
        schema_digest,
    )


def _divergence(teacher: torch.Tensor, logarithms: torch.Tensor) -> torch.Tensor:
    """KL(teacher || student) of each row."""
    return (torch.special.xlogy(teacher, teacher) - teacher * logarithms).sum(dim=1)


def _logits(model: Model, batch: TeacherBatch, candidates: tuple[str, ...]) -> torch.Tensor:
    logits = model.net(batch.inputs.to(model.device))
    if logits.shape != (len(batch), len(candidates)):
        raise TeacherRecordError(
            f"the student gives outputs of shape {tuple(logits.shape)} for {len(batch)} samples and "
            f"{len(candidates)} candidates"
        )
    return logits


def _checked(
    batch: Any, schema_digest: str | None = None, candidates: tuple[str, ...] | None = None
) -> TeacherBatch:
    if not isinstance(batch, TeacherBatch):
        raise TypeError(
            "offline distillation reads the batches of TeacherDataset.loader(...), not "
            f"{type(batch).__name__}"
        )
    if schema_digest is not None and batch.schema_digest != schema_digest:
        raise TeacherRecordError(
            f"the batch is of the schema {batch.schema_digest!r}, not {schema_digest!r}"
        )
    if candidates is not None and batch.candidates != candidates:
        raise TeacherRecordError(
            f"the batch has its candidates in the order {batch.candidates}, the student in "
            f"{candidates}"
        )
    return batch


def _order(candidates: Any) -> tuple[str, ...]:
    if isinstance(candidates, str) or not isinstance(candidates, Sequence) or len(candidates) < 2:
        raise TeacherRecordError(
            f"candidates must be at least two ids in the order of the student's outputs, not "
            f"{check.show(candidates)}"
        )
    names = tuple(candidates)
    if len(set(names)) != len(names) or not all(isinstance(n, str) and n for n in names):
        raise TeacherRecordError(f"candidates must be ids that differ, not {check.show(names)}")
    return names
