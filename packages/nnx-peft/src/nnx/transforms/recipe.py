"""Operations as data, and the recipe that applies and records them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from nnx.models import (
    build_module,
    check_state_topology,
    check_topology,
    current_net_params,
    state_topology,
)
from nnx.params import ModelSpec, NNCheckpointTransform, RuntimeModule
from nnx.peft.placement import meta_copy
from nnx.plugins.manager import registry
from nnx.seeding import isolated_rng
from nnx.transforms.errors import Problem, RecipeError
from nnx.transforms.optimizers import optimizer_problems, remember_replaced
from nnx.utils import validation as check
from nnx.utils.jsonlike import canonical, freeze_mapping, thaw
from torch import nn

if TYPE_CHECKING:
    from nnx.nn_model import NNModel


@dataclass(frozen=True)
class TransformOp:
    """One topology change: what (``id``, ``version``), where (``targets``), how (``config``).

    ``targets`` are dotted submodule names, no patterns. ``config`` is JSON-like
    and read-only. The id names a replay in the registry "transform".
    """

    id: str
    targets: tuple[str, ...]
    config: Mapping[str, Any] = field(default_factory=dict)
    version: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", check.text("TransformOp", "id", self.id))
        object.__setattr__(self, "version", check.count("TransformOp", "version", self.version))
        given: Any = self.targets
        if isinstance(given, str):
            raise ValueError(f"TransformOp.targets must be names in a tuple, not {given!r}")
        targets = tuple(given)
        if not targets or not all(isinstance(t, str) and t for t in targets):
            raise ValueError(f"TransformOp.targets must name submodules, not {targets!r}")
        object.__setattr__(self, "targets", targets)
        config = freeze_mapping(self.config, "TransformOp.config")
        if "targets" in config:
            raise ValueError("TransformOp.config cannot hold 'targets': give them as targets=")
        object.__setattr__(self, "config", config)

    def state(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "version": self.version,
            "targets": list(self.targets),
            "config": thaw(self.config),
        }

    def checkpoint_transform(self) -> NNCheckpointTransform:
        """The operation as checkpoints and runs record it."""
        options = {**self.config, "targets": list(self.targets)}
        return NNCheckpointTransform(name=self.id, version=self.version, options=options)

    @staticmethod
    def from_checkpoint_transform(transform: NNCheckpointTransform) -> TransformOp:
        """The operation that ``transform`` records; ``ValueError`` when it is of another kind."""
        config = dict(transform.options)
        targets = config.pop("targets", None)
        if not isinstance(targets, (list, tuple)):
            raise ValueError(
                f"{transform.name}@v{transform.version} records no targets, so it is no recipe "
                "operation"
            )
        return TransformOp(
            id=transform.name, version=transform.version, targets=tuple(targets), config=config
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TransformOp):
            return NotImplemented
        return canonical(self.state()) == canonical(other.state())

    def __hash__(self) -> int:
        return hash((self.id, self.version, self.targets))


@dataclass(frozen=True)
class TransformRecipe:
    """Operations in order, and whether they change the given model or a copy.

    ``materialization="in_place"`` changes ``model.net`` and returns the same
    model; ``"fresh"`` leaves the model alone and returns one of its class around
    a new base, built from the model's descriptor and given its weights.
    """

    operations: tuple[TransformOp, ...]
    materialization: Literal["fresh", "in_place"] = "in_place"

    def __post_init__(self) -> None:
        operations = tuple(self.operations)
        if not operations or not all(isinstance(op, TransformOp) for op in operations):
            raise ValueError(
                "TransformRecipe.operations must be TransformOps, at least one; see "
                "nnx.transforms.lora and nnx.transforms.low_rank"
            )
        if self.materialization not in ("fresh", "in_place"):
            raise ValueError(
                "TransformRecipe.materialization must be 'fresh' or 'in_place', not "
                f"{self.materialization!r}"
            )
        object.__setattr__(self, "operations", operations)

    def checkpoint_transforms(self) -> tuple[NNCheckpointTransform, ...]:
        return tuple(op.checkpoint_transform() for op in self.operations)

    def validate(self, model: NNModel, *, optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
        """Raise :class:`RecipeError` with every reason why ``model`` cannot take the recipe.

        Nothing is changed: the operations are tried on a copy without data.
        ``optimizers`` are those the caller holds; one that was built over the
        model before an in-place change would train tensors that are frozen or
        gone, and miss the new ones.
        """
        problems = list(_model_problems(model))
        if not problems:
            problems += self._attached_problems(model)
        if not problems:
            problems += self._try(model.net)
        if self.materialization == "in_place":
            problems += _training_problems(model)
            problems += optimizer_problems(model.net, optimizers)
        if problems:
            raise RecipeError(problems)

    def materialize(
        self, model: NNModel, *, optimizers: Iterable[torch.optim.Optimizer] = ()
    ) -> NNModel:
        """Apply the operations and record them on the model that is returned.

        Build optimizers from the returned model. Raises :class:`RecipeError`,
        and changes nothing, when :meth:`validate` would.
        """
        self.validate(model, optimizers=optimizers)
        source = model.net
        if self.materialization == "fresh":
            model = fresh_base(model)
        before = {p: p.requires_grad for p in source.parameters()}
        with unchanged_on_error(model):
            for op in self.operations:
                apply = registry("transform").resolve(op.id, op.version)
                apply = getattr(apply, "materialize", apply)
                model.net = apply(model.net, op.checkpoint_transform().options)
        model.transforms = (*model.transforms, *self.checkpoint_transforms())
        model.recorded_topology = state_topology(model.net)
        remember_replaced(model.net, source, before)
        return model

    def _attached_problems(self, model: Any) -> Iterator[Problem]:
        """Targets that the model's descriptor does not build: a rebuild would lack them."""
        built = {name.partition(".")[0] for name in model.recorded_topology}
        for index, op in enumerate(self.operations):
            for target in op.targets:
                top = target.partition(".")[0]
                if top in model.net._modules and top not in built:
                    reason = (
                        f"{top!r} was attached to the net, whose base does not build it, so a "
                        "checkpoint could not be rebuilt; put it into the net's factory"
                    )
                    yield Problem(index, target, reason)

    def _try(self, net: nn.Module) -> Iterable[Problem]:
        """Replay on a meta copy, operation by operation, up to the first that fails."""
        try:
            trial = meta_copy(net)
        except Exception as error:  # a module may hold anything, a lock or an open file
            reason = f"the net cannot be copied for a trial: {type(error).__name__}: {error}"
            return [Problem(None, None, reason)]
        for index, op in enumerate(self.operations):
            try:
                replay = registry("transform").resolve(op.id, op.version)
            except (LookupError, ImportError) as error:
                return [Problem(index, None, str(error))]
            twice = sorted({t for t in op.targets if op.targets.count(t) > 1})
            if twice:
                return [Problem(index, target, "it is named twice") for target in twice]
            options = op.checkpoint_transform().options
            examine = getattr(replay, "problems", None)
            found = [] if examine is None else list(examine(trial, options))
            if found:
                return [Problem(index, target, message) for target, message in found]
            try:
                trial = replay(trial, options)
            except (ValueError, TypeError, KeyError) as error:
                return [Problem(index, None, str(error))]
        return []


@contextlib.contextmanager
def unchanged_on_error(model: Any) -> Iterator[None]:
    """Put back every submodule and ``requires_grad`` flag of ``model.net`` on an error."""
    net = model.net
    children = [(module, dict(module._modules)) for module in net.modules()]
    flags = [(p, p.requires_grad) for p in net.parameters()]
    try:
        yield
    except BaseException:
        model.net = net
        for module, held in children:
            module._modules.clear()
            module._modules.update(held)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
        raise


def fresh_base(model: Any) -> Any:
    """A model like ``model`` around a new net: built from the descriptor, with the same weights.

    Flags and modes are those of the tensors and modules of the same names. No
    random stream moves. Raises :class:`RecipeError` for a net that its
    descriptor does not build.
    """
    spec = model.params.net
    with isolated_rng():
        net = (
            build_module(spec)
            if isinstance(spec, ModelSpec)
            else spec(params=current_net_params(model))
        )
        for transform in model.transforms:
            replay = registry("transform").resolve(transform.name, transform.version)
            net = replay(net, transform.options)
    try:
        check_state_topology(net, model.net.state_dict(), what="the new base")
    except ValueError as error:
        way_out = "detach it first, or use materialization='in_place'"
        raise RecipeError([Problem(None, None, f"{error}; {way_out}")]) from None
    _take_over(net, model.net)
    fresh = copy.copy(model)
    fresh.net, fresh.in_training = net, False
    return fresh


@torch.no_grad()
def _take_over(net: nn.Module, source: nn.Module) -> None:
    """The values, dtypes, devices, flags and modes of ``source``, by name."""
    net.load_state_dict(source.state_dict())
    for mine, theirs in ((net.named_parameters(), source.named_parameters()),
                         (net.named_buffers(), source.named_buffers())):  # fmt: skip
        values = dict(theirs)
        for name, tensor in mine:
            if name in values:
                tensor.data = values[name].detach().clone()
                tensor.requires_grad_(values[name].requires_grad)
    modes = {name: module.training for name, module in source.named_modules()}
    for name, module in net.named_modules():
        module.training = modes.get(name, module.training)


def _training_problems(model: Any) -> Iterator[Problem]:
    if getattr(model, "in_training", False):
        yield Problem(
            None,
            None,
            "the model is in training, and its run and optimizers were made for the net as it was; "
            "materialize the recipe before train()",
        )


def _model_problems(model: Any) -> Iterable[Problem]:
    if isinstance(model.params.net, RuntimeModule):
        yield Problem(
            None,
            None,
            f"{model.params.net.module} is a runtime-only module, which no checkpoint can rebuild; "
            "register a factory (nnx.register_model_factory) and build the model from a ModelSpec",
        )
        return
    try:
        check_topology(model)
    except ValueError as error:
        yield Problem(None, None, str(error))
