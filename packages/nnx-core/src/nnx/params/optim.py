"""Optimizers: torch's own by name, or a registered factory, with parameter groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from nnx.enums import Optims
from nnx.params.base import (
    Converted,
    Params,
    StateField,
    always,
    converted,
    each_state,
    encode_enum,
    frozen_list,
    member,
    optional,
    put,
    read_literal,
)
from nnx.params.builder import Builder
from nnx.params.registered import OptimizerFactorySpec
from nnx.utils import validation as check


@dataclass(frozen=True, kw_only=True, slots=True)
class NNParamGroupSpec(Params):
    """Overrides for the parameters whose dotted name matches ``name_pattern``.

    The pattern is a shell glob over the whole name ("encoder.*"; ``*`` crosses
    dots). Set ``lr`` (absolute) or ``lr_multiplier`` (times the optimizer's
    ``max_lr``), or neither. Freeze a group with :func:`nnx.finetune.freeze`,
    not with a rate of zero.
    """

    name_pattern: str
    lr: float | None = None
    lr_multiplier: float | None = None
    weight_decay: float | None = None

    _STATE: ClassVar[tuple[StateField, ...]] = (
        always("name_pattern"),
        optional("lr"),
        optional("lr_multiplier"),
        optional("weight_decay"),
    )

    def __post_init__(self) -> None:
        owner = type(self).__name__
        put(self, name_pattern=check.text(owner, "name_pattern", self.name_pattern))
        for name in ("lr", "lr_multiplier"):
            value = getattr(self, name)
            if value is not None:
                put(self, **{name: check.real(owner, name, value, above=0)})
        if self.lr is not None and self.lr_multiplier is not None:
            check.refuse(
                owner, "lr_multiplier", self.lr_multiplier, f"None when lr is set ({self.lr})"
            )
        if self.weight_decay is not None:
            decay = check.real(owner, "weight_decay", self.weight_decay, at_least=0)
            put(self, weight_decay=decay)


_GROUPS = optional(
    "param_groups",
    encode=each_state,
    decode=lambda states: states and [NNParamGroupSpec.from_state(s) for s in states],
)


@dataclass(frozen=True, kw_only=True, slots=True)
class NNOptimParams(Params):
    """One of torch's optimizers.

    ``momentum`` is SGD's coefficient, or Adam's pair of betas.
    ``grad_clip_norm`` is a global L2 norm; ``accumulate_grad_batches`` is how
    many microbatches one update averages.
    """

    name: Converted[Optims, str] = converted(field())
    max_lr: float
    weight_decay: float
    momentum: float | tuple[float, float]
    grad_clip_norm: float | None = None
    accumulate_grad_batches: int = 1
    param_groups: list[NNParamGroupSpec] | None = None
    eps: float = 1e-8

    _STATE: ClassVar[tuple[StateField, ...]] = (
        always("max_lr"),
        always("momentum", encode=str, decode=read_literal),
        always("name", encode=encode_enum, decode=member(Optims)),
        always("weight_decay"),
        optional("grad_clip_norm"),
        optional("accumulate_grad_batches"),
        _GROUPS,
        optional("eps"),
    )

    def __post_init__(self) -> None:
        owner = type(self).__name__
        put(self, name=check.member(owner, "name", self.name, Optims))
        _check_common(self)
        put(self, momentum=check_momentum(owner, self.name, self.momentum))
        put(self, eps=check.real(owner, "eps", self.eps, above=0))
        if not self.name.is_adam and self.eps != _EPS:
            check.refuse(owner, "eps", self.eps, f"left at {_EPS} for {self.name.value}")

    @classmethod
    def builder(cls) -> NNOptimParamsBuilder:
        """A builder with one method per optimizer."""
        return NNOptimParamsBuilder()

    def is_valid(self) -> bool:
        """Whether ``momentum`` has the shape that the optimizer reads."""
        return isinstance(self.momentum, tuple) == self.name.is_adam


_EPS = 1e-8


@dataclass(frozen=True, kw_only=True, slots=True)
class NNOptimFactoryParams(Params):
    """An optimizer that a registered factory builds; see :mod:`nnx.optimizers`."""

    factory: OptimizerFactorySpec
    max_lr: float
    weight_decay: float = 0.0
    grad_clip_norm: float | None = None
    accumulate_grad_batches: int = 1
    param_groups: list[NNParamGroupSpec] | None = None

    _STATE: ClassVar[tuple[StateField, ...]] = (
        always("factory", encode=lambda f: f.state(), decode=OptimizerFactorySpec.from_state),
        always("max_lr"),
        always("weight_decay"),
        optional("grad_clip_norm"),
        optional("accumulate_grad_batches"),
        _GROUPS,
    )

    def __post_init__(self) -> None:
        check.instance(type(self).__name__, "factory", self.factory, OptimizerFactorySpec)
        _check_common(self)

    def is_valid(self) -> bool:
        """Always true: everything was checked at construction."""
        return True


AnyOptimParams = NNOptimParams | NNOptimFactoryParams


def optim_params_from_state(state: Mapping[str, Any]) -> AnyOptimParams:
    """Rebuild a built-in or a registered optimizer's params; nothing has to be registered."""
    if isinstance(state, Mapping) and "factory" in state:
        return NNOptimFactoryParams.from_state(state)
    return NNOptimParams.from_state(state)


def check_momentum(owner: str, name: Optims, value: Any, field: str = "momentum") -> Any:
    """SGD's coefficient (>= 0) or Adam's two betas (each in [0, 1))."""
    if not name.is_adam:
        return check.real(owner, field, value, at_least=0)
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        check.refuse(owner, field, value, f"a pair of betas for {name.value}")
    return tuple(
        check.real(owner, f"{field}[{i}]", beta, at_least=0, below=1)
        for i, beta in enumerate(value)
    )


def _check_common(params: Any) -> None:
    owner = type(params).__name__

    def group(field: str, value: Any) -> Any:
        return check.instance(owner, field, value, NNParamGroupSpec)

    clip = params.grad_clip_norm
    put(
        params,
        max_lr=check.real(owner, "max_lr", params.max_lr, at_least=0),
        weight_decay=check.real(owner, "weight_decay", params.weight_decay, at_least=0),
        grad_clip_norm=None if clip is None else check.real(owner, "grad_clip_norm", clip, above=0),
        accumulate_grad_batches=check.count(
            owner, "accumulate_grad_batches", params.accumulate_grad_batches
        ),
        param_groups=frozen_list(owner, "param_groups", params.param_groups, group),
    )


class NNOptimParamsBuilder(Builder[NNOptimParams]):
    """One method per optimizer, and three modifiers that survive a change of optimizer."""

    _builds = NNOptimParams
    _needs: ClassVar[Mapping[str, str]] = {
        "name": "one of .adam(...), .adam_amsgrad(...), .adamw(...), .sgd(...), .sgd_nesterov(...)"
    }
    _VARIANT = ("name", "max_lr", "momentum", "weight_decay", "eps")

    def adam(
        self,
        *,
        max_lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        eps: float | None = None,
    ) -> NNOptimParamsBuilder:
        """``torch.optim.Adam``: the decay is an L2 term of the gradient."""
        return self._adam(Optims.ADAM, max_lr, betas, weight_decay, eps)

    def adam_amsgrad(
        self,
        *,
        max_lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        eps: float | None = None,
    ) -> NNOptimParamsBuilder:
        """``torch.optim.Adam`` with ``amsgrad=True``."""
        return self._adam(Optims.ADAM_AMSGRAD, max_lr, betas, weight_decay, eps)

    def adamw(
        self,
        *,
        max_lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.01,
        eps: float | None = None,
    ) -> NNOptimParamsBuilder:
        """``torch.optim.AdamW``: the decay scales the weights, apart from the gradient."""
        return self._adam(Optims.ADAMW, max_lr, betas, weight_decay, eps)

    def sgd(
        self, *, max_lr: float, momentum: float = 0.9, weight_decay: float = 0.0
    ) -> NNOptimParamsBuilder:
        """``torch.optim.SGD``."""
        return self._sgd(Optims.SGD, max_lr, momentum, weight_decay)

    def sgd_nesterov(
        self, *, max_lr: float, momentum: float = 0.9, weight_decay: float = 0.0
    ) -> NNOptimParamsBuilder:
        """``torch.optim.SGD`` with ``nesterov=True``."""
        return self._sgd(Optims.SGD_NESTEROV, max_lr, momentum, weight_decay)

    def grad_clip(self, norm: float) -> NNOptimParamsBuilder:
        """Clip the global L2 norm of the gradients to ``norm`` before each step."""
        return self._set(grad_clip_norm=norm)

    def accumulate_grad(self, batches: int) -> NNOptimParamsBuilder:
        """Step once in ``batches`` microbatches."""
        return self._set(accumulate_grad_batches=batches)

    def param_groups(self, groups: list[NNParamGroupSpec]) -> NNOptimParamsBuilder:
        """Override rates and decays by parameter name; the first match wins."""
        return self._set(param_groups=groups)

    def _adam(
        self, name: Optims, max_lr: Any, betas: Any, weight_decay: Any, eps: Any
    ) -> NNOptimParamsBuilder:
        chosen = {} if eps is None else {"eps": eps}
        return self._replace(
            self._VARIANT,
            name=name,
            max_lr=max_lr,
            momentum=betas,
            weight_decay=weight_decay,
            **chosen,
        )

    def _sgd(
        self, name: Optims, max_lr: Any, momentum: Any, weight_decay: Any
    ) -> NNOptimParamsBuilder:
        return self._replace(
            self._VARIANT, name=name, max_lr=max_lr, momentum=momentum, weight_decay=weight_decay
        )
