"""What every wrapper shares: a frozen base, an inherited mode, merging."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

Self = TypeVar("Self", bound="AdaptedLayer")


class AdaptedLayer(nn.Module):
    """A frozen layer at ``base`` and the small trainable part added to it.

    Construction copies the base's training flag and ends by freezing the
    base's parameters; it never moves, recasts or replaces them.

    :meth:`merge` folds the trained part into the base's own tensors, so that a
    forward pass costs what the base costs; :meth:`unmerge` puts the original
    tensors back bit for bit. Being merged is runtime state like the mode:
    ``state_dict()`` always holds the unmerged base. A merged wrapper counts as
    evaluating; loading a state and ``train()`` unmerge first, since a merged
    adapter would get no gradient.
    """

    merged: bool
    adapted_child = "base"  # the child that this adapts

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.merged = False
        # The base's own tensors while merged. Buffers follow .to() and deepcopy.
        for name in self.mergeable:
            self.register_buffer(f"_unmerged_{name}", None, persistent=False)
        self.training = base.training

    # The base parameters that merging changes.
    mergeable: tuple[str, ...] = ("weight",)

    def adapter_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that this wrapper adds to its base."""
        for name, parameter in self.named_parameters():
            if not name.startswith("base."):
                yield parameter

    def freeze_base(self) -> None:
        """The last step of construction, so that a failing one freezes nothing."""
        self.base.requires_grad_(False)

    def merged_tensors(self) -> dict[str, torch.Tensor]:
        """The base tensors that alone compute what the adapted layer computes in eval mode."""
        raise NotImplementedError

    @torch.no_grad()
    def merge(self) -> bool:
        """Fold the adapter into the base; ``False`` when it already is."""
        if self.merged:
            return False
        merged = self.merged_tensors()
        own = {name: self.base.get_parameter(name).detach().clone() for name in merged}
        for name, value in merged.items():
            setattr(self, f"_unmerged_{name}", own[name])
            self.base.get_parameter(name).copy_(value)
        self.merged = True
        self.training = False  # so that giving a borrowed net's modes back is no train()
        return True

    @torch.no_grad()
    def unmerge(self) -> bool:
        """Restore the base's own tensors; ``False`` when it is not merged.

        Raises ``ValueError`` when the merged weights were replaced since (by
        quantized ones): then the merge is final.
        """
        if not self.merged:
            return False
        self.check_unmergeable()
        for name, value in self._unmerged().items():
            self.base.get_parameter(name).copy_(value)
            setattr(self, f"_unmerged_{name}", None)
        self.merged = False
        self.training = self.base.training
        return True

    def check_unmergeable(self) -> None:
        """Refuse to unmerge where the merged weights are there no more."""
        if self._merge_is_final():
            raise ValueError(
                f"the weights of a merged {type(self.base).__name__} were replaced (quantized?) "
                "since, so they cannot be taken apart again; keep a copy from before"
            )

    def _merge_is_final(self) -> bool:
        return any(not is_plain(self.base._parameters.get(name)) for name in self._stored())

    def train(self: Self, mode: bool = True) -> Self:
        if mode and not self._merge_is_final():
            self.unmerge()
        return super().train(mode)

    def _unmerged(self) -> Mapping[str, torch.Tensor]:
        """The base's own tensors while merged, unless the merge is final."""
        return {} if self._merge_is_final() else self._stored()

    def _stored(self) -> Mapping[str, torch.Tensor]:
        stored = {name: getattr(self, f"_unmerged_{name}") for name in self.mergeable}
        return {name: value for name, value in stored.items() if value is not None}

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        for name, value in self._unmerged().items():
            state[f"{prefix}base.{name}"] = value
        return state

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        if not self._merge_is_final():
            self.unmerge()
        super()._load_from_state_dict(*args, **kwargs)


def is_plain(parameter: nn.Parameter | None) -> bool:
    """Whether it is a parameter of floats that can be written in place (no quantized one)."""
    return (
        type(parameter) is nn.Parameter
        and parameter.layout is torch.strided
        and parameter.is_floating_point()
    )


def floating_weight(base: nn.Module) -> torch.Tensor:
    """The weight that a wrapper allocates beside; refuse one it cannot compose with."""
    weight = base.weight
    if isinstance(weight, nn.parameter.UninitializedParameter):
        raise ValueError(
            f"{type(base).__name__} has no shape yet; run one forward pass through the model "
            "before adapting it"
        )
    if not isinstance(weight, torch.Tensor) or not weight.is_floating_point():
        kind = getattr(weight, "dtype", type(weight).__name__)
        raise ValueError(
            f"{type(base).__name__} holds a {kind} weight; an adapter needs a floating-point one"
        )
    return weight
