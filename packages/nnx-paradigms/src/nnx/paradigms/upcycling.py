"""Making experts of a trained dense layer, as a recorded transform."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from nnx.models import state_topology
from nnx.paradigms.experts import MoELinear
from nnx.params import NNCheckpointTransform
from nnx.seeding import isolated_rng
from nnx.utils import validation as check
from torch import nn

if TYPE_CHECKING:
    from nnx.models import Model


def upcycle(
    model: Model,
    *targets: str,
    num_experts: int,
    top_k: int = 2,
    capacity_factor: float | None = None,
    seed: int = 0,
) -> Model:
    """Turn named Linears of ``model`` into mixtures, in place (Komatsuzaki et al. 2022, arXiv:2212.05055).

    Every expert starts as a copy of the dense layer, so that the net computes what it did;
    the router starts as ``nn.Linear`` does, by ``seed``. The change is recorded: checkpoints
    of a later training rebuild it. Returns ``model``; build optimizers from it.

    Raises ``ValueError`` for no targets, names that are no ``nn.Linear`` of the net and what
    :class:`MoELinear` refuses, before anything changes.
    """
    options = {
        "targets": list(targets),
        "num_experts": num_experts,
        "top_k": top_k,
        "capacity_factor": capacity_factor,
    }
    seed = check.integer("upcycle", "seed", seed)
    problems = UPCYCLE_OPERATION.problems(model.net, options)
    if problems or not targets:
        shown = "; ".join(f"{where!r}: {what}" for where, what in problems)
        raise ValueError(f"upcycle: {shown or 'name at least one nn.Linear of the net'}")
    UPCYCLE_OPERATION.materialize(model.net, options, seed=seed)
    recorded = NNCheckpointTransform(name="upcycle", version=1, options=options)
    model.transforms = (*model.transforms, recorded)
    model.recorded_topology = state_topology(model.net)
    return model


class UpcycleOperation:
    """What the registry of transforms holds: it rebuilds the mixtures for saved weights."""

    def __call__(self, net: nn.Module, options: Mapping[str, Any]) -> nn.Module:
        problems = self.problems(net, options)
        if problems:
            shown = "; ".join(f"{where!r}: {what}" for where, what in problems)
            raise ValueError(f"the net cannot take a recorded transform: {shown}")
        return self.materialize(net, options)

    def materialize(
        self, net: nn.Module, options: Mapping[str, Any], *, seed: int = 0
    ) -> nn.Module:
        """Replace the targets; every expert is a copy of the layer."""
        generator = torch.Generator().manual_seed(seed)
        for target in options["targets"]:
            dense = net.get_submodule(target)
            assert isinstance(dense, nn.Linear)
            parent, _, name = target.rpartition(".")
            mixture = _mixture(dense, options, generator)
            setattr(net.get_submodule(parent), name, mixture)
        return net

    def problems(self, net: nn.Module, options: Mapping[str, Any]) -> list[tuple[str | None, str]]:
        """Each target that is no Linear of its own, and numbers that make no mixture."""
        return list(_problems(net, options))


UPCYCLE_OPERATION = UpcycleOperation()


def _problems(net: nn.Module, options: Mapping[str, Any]) -> Iterator[tuple[str | None, str]]:
    try:
        with isolated_rng():
            MoELinear(1, 1, **_numbers(options))
    except ValueError as error:
        yield None, str(error)
    layers = dict(net.named_modules())
    linears = [name for name, layer in layers.items() if type(layer) is nn.Linear]
    weights = [
        id(p) for layer in layers.values() for p in layer._parameters.values() if p is not None
    ]
    for target in options["targets"]:
        if target not in linears:
            yield target, f"it is no nn.Linear of the net{check.close(target, linears)}"
        elif layers[target].bias is None:
            yield target, "it has no bias, which experts have"
        elif weights.count(id(layers[target].weight)) > 1:
            yield target, "its weight is shared with another layer"


def _numbers(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: options[key] for key in ("num_experts", "top_k", "capacity_factor")}


def _mixture(dense: nn.Linear, options: Mapping[str, Any], generator: torch.Generator) -> MoELinear:
    with isolated_rng():
        mixture = MoELinear(dense.in_features, dense.out_features, **_numbers(options))
    mixture.to(device=dense.weight.device, dtype=dense.weight.dtype)
    bound = 1.0 / math.sqrt(dense.in_features)
    drawn = torch.empty(mixture.router.weight.shape).uniform_(-bound, bound, generator=generator)
    with torch.no_grad():
        mixture.router.weight.copy_(drawn)
    for expert in mixture.experts:
        expert.load_state_dict(dense.state_dict())
    return mixture.train(dense.training)
