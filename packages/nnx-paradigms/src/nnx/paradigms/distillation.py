"""Distillation of a frozen teacher, by its outputs and by what is inside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from nnx.objectives import KDObjective, LossTerm, ObjectiveContext, ObjectiveResult
from nnx.objectives.supervised import SupervisedResult, single_input
from nnx.paradigms.imperative import ImperativeStep
from nnx.utils import validation as check
from nnx.utils.modes import eval_mode

if TYPE_CHECKING:
    from nnx.engine.contexts import TrainStepFn
    from nnx.models import Model
    from torch import nn


def kd_train_step_factory(
    teacher: Model, *, alpha: float = 0.5, temperature: float = 4.0
) -> TrainStepFn:
    """:func:`~nnx.objectives.kd_objective` as a ``train_step_fn`` in full precision.

    ``teacher`` is frozen and put into eval mode here. The record has the combined loss
    and the student's scores. Raises ``ValueError`` for ``alpha`` outside [0, 1] and
    ``temperature`` <= 0, before the teacher changes.
    """
    return _Distillation(KDObjective(teacher, alpha=alpha, temperature=temperature))


def feature_kd_train_step_factory(
    teacher: Model,
    *,
    auxiliary_layers: dict[str, str],
    alpha: float = 0.5,
    beta: float = 0.5,
    temperature: float = 4.0,
) -> TrainStepFn:
    """:class:`FeatureKDObjective` as a ``train_step_fn`` in full precision."""
    return _Distillation(
        FeatureKDObjective(
            teacher,
            auxiliary_layers=auxiliary_layers,
            alpha=alpha,
            beta=beta,
            temperature=temperature,
        )
    )


def feature_kd_objective(
    teacher: Model,
    *,
    auxiliary_layers: Mapping[str, str],
    alpha: float = 0.5,
    beta: float = 0.5,
    temperature: float = 4.0,
    nonfinite: str = "fail",
    teacher_run: str | None = None,
    teacher_checkpoint: str | None = None,
) -> FeatureKDObjective:
    """Distil outputs and layers of ``teacher``; see :class:`FeatureKDObjective`."""
    return FeatureKDObjective(
        teacher,
        auxiliary_layers=auxiliary_layers,
        alpha=alpha,
        beta=beta,
        temperature=temperature,
        nonfinite=nonfinite,
        teacher_run=teacher_run,
        teacher_checkpoint=teacher_checkpoint,
    )


class FeatureKDObjective(KDObjective):
    """Distillation that also matches named layers (Romero et al. 2014, arXiv:1412.6550).

    ``auxiliary_layers`` maps the teacher's submodules to the student's, by their names.
    The mean squared difference of a pair's outputs is averaged over the pairs and joins
    as the term ``"features"`` with weight ``beta``. Both outputs must have one shape.

    Raises ``ValueError`` for ``alpha`` or ``beta`` outside [0, 1], ``temperature`` <= 0
    and no pairs; for names that a net lacks, when the run is checked.
    """

    kind = "feature_kd"

    def __init__(
        self,
        teacher: Model,
        *,
        auxiliary_layers: Mapping[str, str],
        alpha: float = 0.5,
        beta: float = 0.5,
        temperature: float = 4.0,
        nonfinite: str = "fail",
        teacher_run: str | None = None,
        teacher_checkpoint: str | None = None,
    ) -> None:
        owner = "feature_kd"
        self.beta = float(check.real(owner, "beta", beta, at_least=0, at_most=1))
        if not isinstance(auxiliary_layers, Mapping) or not auxiliary_layers:
            check.refuse(
                owner, "auxiliary_layers", auxiliary_layers,
                "a mapping with at least one pair of layer names, teacher's to student's",
            )  # fmt: skip
        self.pairs = dict(auxiliary_layers)
        for name in self.pairs:
            _layer(teacher.net, name, "teacher")
        super().__init__(
            teacher,
            alpha=alpha,
            temperature=temperature,
            nonfinite=nonfinite,
            teacher_run=teacher_run,
            teacher_checkpoint=teacher_checkpoint,
        )

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "beta": self.beta, "layers": dict(self.pairs)}

    def __call__(self, ctx: ObjectiveContext) -> ObjectiveResult:
        theirs = {name: _layer(self.teacher.net, name, "teacher") for name in self.pairs}
        ours = {name: _layer(ctx.model.net, name, "student") for name in self.pairs.values()}
        with _outputs(theirs) as wanted, _outputs(ours) as given:
            result = super().__call__(ctx)
            if self.alpha == 0.0:  # without a soft term the teacher has not run
                inputs = single_input(ctx.model, ctx.batch, owner="feature_kd")
                with torch.no_grad(), eval_mode(self.teacher.net):
                    self.teacher.net(inputs.to(self.teacher.device))
        assert isinstance(result, SupervisedResult)
        term = self._features(ctx, wanted, given)
        return SupervisedResult((term, *result.terms), result.supervised, ctx)

    def check_run(self, model: Model, **others: Any) -> None:
        """Also refuse layers that the student lacks."""
        super().check_run(model, **others)
        for name in self.pairs.values():
            _layer(model.net, name, "student")

    def _features(
        self,
        ctx: ObjectiveContext,
        wanted: Mapping[str, torch.Tensor],
        given: Mapping[str, torch.Tensor],
    ) -> LossTerm:
        differences = []
        for theirs, ours in self.pairs.items():
            if theirs not in wanted or ours not in given:
                raise ValueError(
                    f"feature_kd: the layers {theirs!r} and {ours!r} are a pair, but a forward did "
                    "not run both"
                )
            target, output = wanted[theirs], ctx.full_precision(given[ours])
            if target.shape != output.shape:
                raise ValueError(
                    f"feature_kd: the teacher's layer {theirs!r} gives {tuple(target.shape)} and the "
                    f"student's {ours!r} {tuple(output.shape)}; a pair must have one shape"
                )
            squares = (output - target.detach().to(output)).square()
            differences.append(squares.flatten(1).mean(dim=1).sum())
        return LossTerm("features", torch.stack(differences).mean(), len(output), weight=self.beta)


class _Distillation(ImperativeStep):
    """The step of a distillation: its student is checked where the step meets it."""

    def __init__(self, objective: KDObjective) -> None:
        super().__init__(objective)
        self.objective = objective

    def __call__(self, ctx: Any) -> Any:
        self.objective.check_run(ctx.model, optimizers={}, callbacks=())
        return super().__call__(ctx)


def _layer(net: nn.Module, name: str, whose: str) -> nn.Module:
    try:
        return net.get_submodule(name)
    except AttributeError:
        known = [n for n, _ in net.named_modules() if n]
        raise ValueError(
            f"feature_kd: the {whose} has no layer {name!r}{check.close(name, known)}"
        ) from None


@contextmanager
def _outputs(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, torch.Tensor]]:
    """The outputs of named ``layers`` in the forward that runs meanwhile."""
    found: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            found[name] = output

        return hook

    handles = [layer.register_forward_hook(keep(name)) for name, layer in layers.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
