"""Knowledge distillation from a frozen teacher's live logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from nnx.components import ComponentSpec
from nnx.objectives.base import Objective, ObjectiveContext
from nnx.objectives.supervised import SupervisedResult, score, single_input, supervised_terms_of
from nnx.objectives.terms import LossTerm, ObjectiveResult
from nnx.precision import inference_precision
from nnx.prediction.batches import forward_batch
from nnx.utils import validation as check
from nnx.utils.modes import eval_mode
from nnx.utils.weights import fingerprint_of

if TYPE_CHECKING:
    from nnx.models import Model


class KDObjective(Objective):
    """Distillation of a frozen teacher's softened logits (Hinton et al., 2015).

    ``alpha · T² · KL(teacher || student)`` over rows as the term
    ``"distillation"`` and ``1 − alpha`` times the supervised loss as
    ``"supervised"`` (alone at ``alpha=0``). The teacher runs in eval mode,
    without gradients, in its own inference precision. It is frozen here.

    Checkpoints hold the digest of the teacher's weights (the component
    ``kd.objective``), and a resume with another teacher is refused. ``teacher_run``
    and ``teacher_checkpoint`` say where it came from, for :meth:`identity`.
    """

    kind = "kd"

    def __init__(
        self,
        teacher: Model,
        *,
        alpha: float = 0.5,
        temperature: float = 4.0,
        nonfinite: str = "fail",
        teacher_run: str | None = None,
        teacher_checkpoint: str | None = None,
    ) -> None:
        super().__init__(nonfinite=nonfinite)
        self.alpha = float(check.real("kd_objective", "alpha", alpha, at_least=0, at_most=1))
        self.temperature = float(check.real("kd_objective", "temperature", temperature, above=0))
        self.source = {"run": teacher_run, "checkpoint": teacher_checkpoint}
        self._digest: str | None = None
        self.teacher = teacher
        teacher.net.requires_grad_(False)
        teacher.net.eval()

    def __call__(self, ctx: ObjectiveContext) -> ObjectiveResult:
        inputs = single_input(ctx.model, ctx.batch, owner="kd_objective")
        output, target = forward_batch(ctx.model, ctx.batch)
        output = ctx.full_precision(output)
        supervised = score(ctx, output, target)
        terms = supervised_terms_of(supervised, weight=1.0 - self.alpha)
        if self.alpha > 0.0:
            terms = (self._distillation(output, self._teacher_logits(inputs, output)), *terms)
        return SupervisedResult(terms, supervised, ctx)

    def check_run(
        self,
        model: Model,
        *,
        optimizers: Mapping[str, torch.optim.Optimizer],
        callbacks: Sequence[Any],
    ) -> None:
        """Refuse a student that shares parameters with its frozen teacher."""
        frozen = {id(parameter) for parameter in self.teacher.net.parameters()}
        if any(id(parameter) in frozen for parameter in model.net.parameters()):
            raise ValueError(
                "kd_objective: the student shares parameters with its teacher, which is frozen. "
                "Distil into a model of its own."
            )

    def identity(self) -> dict[str, Any]:
        """What the training means, as plain values, for a manifest's ``objective``."""
        if self._digest is None:  # frozen: once is enough
            try:
                self._digest = fingerprint_of(self.teacher.net.state_dict())
            except TypeError:  # quantized tensors, for one
                self._digest = "unknown"
        known = {name: value for name, value in self.source.items() if value is not None}
        return {
            "id": self.kind,
            "version": 1,
            "alpha": self.alpha,
            "temperature": self.temperature,
            "teacher": {"weights": self._digest, **known},
        }

    def component_spec(self) -> ComponentSpec:
        return ComponentSpec("kd.objective", version=1, required=False)

    def component_state(self) -> dict[str, Any]:
        return self.identity()

    def check_component_state(self, state: Mapping[str, Any], *, version: int) -> list[str]:
        """Another teacher than the one of the checkpoint."""
        saved = state["teacher"]["weights"]
        held = self.identity()["teacher"]["weights"]
        if saved == held:
            return []
        return [
            f"the teacher's weights are {held[:19]}, but the checkpoint was trained by a teacher "
            f"of {saved[:19]}"
        ]

    def load_component_state(self, state: Mapping[str, Any], *, version: int) -> None:
        """Nothing moves: the teacher was checked."""

    def _teacher_logits(self, inputs: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        teacher = self.teacher
        precision = inference_precision(teacher.params, teacher.device)
        dtype = precision.autocast_dtype
        with (
            torch.no_grad(),
            eval_mode(teacher.net),
            # The student's autocast must not reach the teacher.
            torch.autocast(precision.device_type, dtype=dtype, enabled=precision.reduced),
        ):
            logits = teacher.net(inputs.to(teacher.device))
        logits = precision.output(logits).to(output.device)
        if logits.shape != output.shape:
            raise ValueError(
                f"kd_objective: the teacher's output {tuple(logits.shape)} and the student's "
                f"{tuple(output.shape)} differ in shape"
            )
        return logits

    def _distillation(self, student: torch.Tensor, teacher: torch.Tensor) -> LossTerm:
        axis = 1 if student.ndim > 1 else 0
        divergence = F.kl_div(
            F.log_softmax(student / self.temperature, dim=axis),
            F.softmax(teacher / self.temperature, dim=axis),
            reduction="sum",
        )
        return LossTerm(
            "distillation",
            divergence * self.temperature**2,
            student.shape[0] if student.ndim > 1 else 1,
            weight=self.alpha,
        )


def kd_objective(
    teacher: Model,
    *,
    alpha: float = 0.5,
    temperature: float = 4.0,
    nonfinite: str = "fail",
    teacher_run: str | None = None,
    teacher_checkpoint: str | None = None,
) -> KDObjective:
    """Distil ``teacher`` into the trained model; see :class:`KDObjective`."""
    return KDObjective(
        teacher,
        alpha=alpha,
        temperature=temperature,
        nonfinite=nonfinite,
        teacher_run=teacher_run,
        teacher_checkpoint=teacher_checkpoint,
    )
