"""The operations that ship: LoRA wrappers and low-rank factors on named Linears.

Each is one object with what the registry asks of a replay, called as
``operation(net, options)``, and what is used beside it: ``problems(net, options)``
and ``materialize(net, options)`` by a recipe, and ``changes(net, options)``, what
about the net is not as recorded any more, before a checkpoint is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nnx.peft.lora import LoRALinear
from nnx.peft.low_rank import check_hyperparameters
from nnx.peft.ownership import (
    freeze_unowned,
    mark_travelling,
    note_statistics,
    select_travelling,
)
from nnx.peft.placement import examine, wrap
from nnx.seeding import isolated_rng
from nnx.surgery.low_rank import allocate_factors, check_rank, low_rank_factorize
from nnx.transforms.recipe import TransformOp
from nnx.utils import validation as check
from torch import nn

LORA, LOW_RANK = "lora", "low_rank"


def lora(
    *targets: str,
    r: int = 8,
    alpha: float = 16.0,
    dropout: float = 0.0,
    freeze_base: bool = False,
    modules_to_save: Sequence[str] = (),
) -> TransformOp:
    """LoRA wrappers on exactly these Linears (see :func:`nnx.peft.apply_lora_to`).

    ``freeze_base`` and ``modules_to_save`` are recorded when they are given.
    """
    r, alpha, dropout = check_hyperparameters(r, alpha, dropout)
    config: dict[str, Any] = {"r": r, "alpha": alpha, "dropout": dropout}
    if check.flag("lora", "freeze_base", freeze_base):
        config["freeze_base"] = True
    if modules_to_save:
        if isinstance(modules_to_save, str):
            raise TypeError(
                f"modules_to_save must be names in a list, not the string {modules_to_save!r}"
            )
        config["modules_to_save"] = list(modules_to_save)
    return TransformOp(id=LORA, targets=targets, config=config)


def low_rank(*targets: str, rank: int, method: str = "svd") -> TransformOp:
    """Truncated-SVD factors in place of exactly these Linears.

    See :func:`nnx.surgery.low_rank_factorize`.
    """
    rank = check.count("low_rank", "rank", rank)
    if method != "svd":
        raise ValueError(f"method must be 'svd', not {method!r}")
    return TransformOp(id=LOW_RANK, targets=targets, config={"rank": rank, "method": method})


def _config(options: Mapping[str, Any]) -> dict[str, Any]:
    """How, of options that also say where."""
    return {key: value for key, value in options.items() if key != "targets"}


class _LinearOperation:
    """An operation that replaces named Linears one by one."""

    keys: frozenset[str]
    optional: frozenset[str] = frozenset()

    def problems(self, net: nn.Module, options: Mapping[str, Any]) -> list[tuple[str | None, str]]:
        config = _config(options)
        if set(config) - self.optional != self.keys:
            return [(None, f"its config must hold {sorted(self.keys)}, not {sorted(config)}")]
        slots, found = examine(net, options["targets"], kinds=(nn.Linear,))
        problems: list[tuple[str | None, str]] = list(found)
        for slot in slots:
            try:
                self.check(slot.module, config)
            except ValueError as error:
                problems.append((slot.path, str(error)))
        return problems

    def check(self, layer: nn.Module, config: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def build(self, layer: nn.Linear, config: Mapping[str, Any]) -> nn.Module:
        """The replacement, with its initial values."""
        raise NotImplementedError

    def allocate(self, layer: nn.Linear, config: Mapping[str, Any]) -> nn.Module:
        """The replacement, to be filled by a checkpoint."""
        return self.build(layer, config)

    # What the registry calls a replay: it moves no random stream.
    def __call__(self, net: nn.Module, options: Mapping[str, Any]) -> nn.Module:
        with isolated_rng():
            return self._replace(net, options, self.allocate)

    def materialize(self, net: nn.Module, options: Mapping[str, Any]) -> nn.Module:
        return self._replace(net, options, self.build)

    def _replace(self, net: nn.Module, options: Mapping[str, Any], build: Any) -> nn.Module:
        found = self.problems(net, options)
        if found:
            shown = "; ".join(f"{target!r}: {problem}" for target, problem in found)
            raise ValueError(f"the net cannot take a recorded transform: {shown}")
        slots, _ = examine(net, options["targets"], kinds=(nn.Linear,))
        wrap(slots, lambda layer: build(layer, _config(options)))
        self.finish(net, _config(options))
        return net

    def finish(self, net: nn.Module, config: Mapping[str, Any]) -> None:
        """What is done once all of the layers are replaced."""


class _LoRA(_LinearOperation):
    keys = frozenset({"r", "alpha", "dropout"})
    optional = frozenset({"freeze_base", "modules_to_save"})

    def problems(self, net: nn.Module, options: Mapping[str, Any]) -> list[tuple[str | None, str]]:
        found = super().problems(net, options)
        if not found:
            slots, _ = examine(net, options["targets"], kinds=(nn.Linear,))
            try:
                select_travelling(
                    net, options.get("modules_to_save", ()), adapted=[s.module for s in slots]
                )
            except (ValueError, TypeError) as error:
                found.append((None, str(error)))
        return found

    def changes(self, net: nn.Module, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """The wrappers whose hyperparameters are not the recorded ones, as (target, what)."""
        recorded = {**{key: options[key] for key in self.keys}, "rslora": False}
        for target in options["targets"]:
            layer = net.get_submodule(target)
            for key, value in recorded.items():
                found = getattr(layer, key, value)
                if found != value:
                    yield target, f"its {key} is {found}, and {value} was recorded"

    def check(self, layer: nn.Module, config: Mapping[str, Any]) -> None:
        check_hyperparameters(**self._of_a_layer(config))

    def build(self, layer: nn.Linear, config: Mapping[str, Any]) -> nn.Module:
        return LoRALinear(layer, **self._of_a_layer(config))

    def finish(self, net: nn.Module, config: Mapping[str, Any]) -> None:
        note_statistics(net)
        mark_travelling(select_travelling(net, config.get("modules_to_save", ()), adapted=()))
        if config.get("freeze_base", False):
            freeze_unowned(net)

    def _of_a_layer(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in config.items() if key in self.keys}


class _LowRank(_LinearOperation):
    keys = frozenset({"rank", "method"})

    def check(self, layer: nn.Module, config: Mapping[str, Any]) -> None:
        check_rank(layer, **config)

    def build(self, layer: nn.Linear, config: Mapping[str, Any]) -> nn.Module:
        return low_rank_factorize(layer, **config)

    def allocate(self, layer: nn.Linear, config: Mapping[str, Any]) -> nn.Module:
        return allocate_factors(layer, config["rank"])


LORA_OPERATION = _LoRA()
LOW_RANK_OPERATION = _LowRank()
