"""Quantization-aware training: int8 dynamic activations, grouped int4 weights ("8da4w")."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nnx.callbacks import Callback
from nnx.params import NNCheckpointTransform
from nnx.peft.placement import Slot, problems_with, slots
from nnx.quantize.torchao import require
from nnx.seeding import isolated_rng
from nnx.utils import validation as check
from torch import nn

if TYPE_CHECKING:
    from nnx import TrainStepFn

TRANSFORM = "torchao_qat"
_SUPPORTED_CONFIGS = {
    "8da4w": "torchao.quantization.qat:Int8DynActInt4WeightQATQuantizer",
}


def qat_train_step_factory(
    base_step: TrainStepFn | None = None, qat_config: str = "8da4w"
) -> TrainStepFn:
    """The training step of a quantization-aware fit: ``base_step``, or the default step.

    The fake-quantized layers that :class:`QATLifecycleCallback` puts in act in
    any step's forward pass; what this adds is that a wrong ``qat_config`` or a
    missing torchao is refused before anything is built.

    Raises ``ValueError`` for an unknown config and ``ImportError`` without
    torchao.
    """
    _quantizer_class(qat_config)
    if base_step is not None:
        return base_step
    from nnx import default_train_step

    return default_train_step


class QATLifecycleCallback(Callback):
    """Fake-quantize the net when training begins, quantize it when training ends.

    Every ``nn.Linear`` of ``model.net`` whose input width is a multiple of
    ``groupsize`` is swapped in place for a layer that computes with rounded
    weights and activations while its full-precision weight trains. At the end
    the weights become int4 groups with scales: the model then is for inference,
    its last checkpoint records the conversion, and
    :meth:`NNModel.from_checkpoint` rebuilds it.

    A fit that fails or is interrupted leaves the plain full-precision net.

    ``quantizer`` is torchao's; ``is_prepared`` and ``is_converted`` tell the
    phase.

    Raises ``ValueError`` for an unknown ``qat_config`` or a ``groupsize`` below
    1, ``ImportError`` without torchao, and ``ValueError`` at the begin of
    training when the net has no layer to quantize.
    """

    def __init__(self, qat_config: str = "8da4w", *, groupsize: int = 32) -> None:
        groupsize = check.count("QATLifecycleCallback", "groupsize", groupsize)
        self.quantizer: Any = _quantizer_class(qat_config)(groupsize=groupsize)
        self.qat_config = qat_config
        self.groupsize = groupsize
        self.is_prepared = False
        self.is_converted = False
        self._targets: tuple[str, ...] = ()
        self._plain: list[Slot] = []  # the Linears that were swapped; they share the weights

    def on_train_begin(self, ctx: Any) -> None:
        net = ctx.model.net
        targets = eligible(net, self.groupsize)
        if not targets:
            raise ValueError(
                f"the net has no Linear whose input width is a multiple of groupsize="
                f"{self.groupsize}, so nothing can be quantized; choose another groupsize"
            )
        self._plain = _replaceable(net, targets)
        self.quantizer = _quantizer(net, targets, self.qat_config, self.groupsize)
        _prepare(self.quantizer, net)
        self._targets = targets
        self.is_prepared, self.is_converted = True, False

    def on_train_end(self, ctx: Any) -> None:
        if not self.is_prepared:
            return
        self.is_prepared = False
        if getattr(ctx, "failed", False):
            for slot in self._plain:
                setattr(slot.parent, slot.name, slot.module)
        else:
            _convert(self.quantizer, ctx.model.net)
            self.is_converted = True
        self._plain = []

    def checkpoint_transforms(self) -> tuple[NNCheckpointTransform, ...]:
        """What rebuilds the converted net; nothing before the conversion."""
        if not self.is_converted:
            return ()
        options = {
            "qat_config": self.qat_config,
            "groupsize": self.groupsize,
            "targets": list(self._targets),
        }
        return (NNCheckpointTransform(name=TRANSFORM, version=1, options=options),)


def replay(net: nn.Module, options: Mapping[str, Any]) -> nn.Module:
    """The quantized topology on a fresh base, its values to be filled by a checkpoint."""
    qat_config, groupsize = options["qat_config"], options["groupsize"]
    _quantizer_class(qat_config)
    targets = eligible(net, groupsize)
    if set(targets) != set(options["targets"]):
        raise ValueError(
            f"a checkpoint quantized {sorted(options['targets'])} with groupsize={groupsize}, and "
            f"this net would quantize {sorted(targets)}: it is not the net that was trained"
        )
    quantizer = _quantizer(net, targets, qat_config, groupsize)
    _prepare(quantizer, net)
    _convert(quantizer, net)
    return net


def eligible(net: nn.Module, groupsize: int) -> tuple[str, ...]:
    """The Linears that torchao's recipe quantizes."""
    return tuple(
        name
        for name, module in net.named_modules()
        if name and isinstance(module, nn.Linear) and module.in_features % groupsize == 0
    )


def _replaceable(net: nn.Module, targets: tuple[str, ...]) -> list[Slot]:
    """The targets' places; refuses layers that cannot be swapped one by one."""
    every = slots(net)
    chosen = [slot for slot in every if not set(targets).isdisjoint(slot.paths)]
    problems = dict.fromkeys(message for _, message in problems_with(chosen, every))
    if problems:
        raise ValueError(
            "the net cannot be quantized with this groupsize; choose one that leaves "
            "these layers out, or another net:\n" + "\n".join(f"- {p}" for p in problems)
        )
    return chosen


def _quantizer_class(qat_config: str) -> Any:
    if qat_config not in _SUPPORTED_CONFIGS:
        known = ", ".join(map(repr, _SUPPORTED_CONFIGS))
        raise ValueError(f"qat_config must be one of {known}, not {qat_config!r}")
    return require(_SUPPORTED_CONFIGS[qat_config], "quantization-aware training")


def _quantizer(net: nn.Module, targets: tuple[str, ...], qat_config: str, groupsize: int) -> Any:
    layer = net.get_submodule(targets[0])
    assert isinstance(layer, nn.Linear)
    return _quantizer_class(qat_config)(groupsize=groupsize, precision=layer.weight.dtype)


def _prepare(quantizer: Any, net: nn.Module) -> None:
    _swap(net, quantizer.prepare)


def _convert(quantizer: Any, net: nn.Module) -> None:
    _swap(net, quantizer.convert)
    for module in net.modules():  # torchao registers a quantized layer's bias as trainable
        bias = module._parameters.get("bias")
        if "scales" in module._buffers and bias is not None:
            bias.requires_grad_(False)


def _swap(net: nn.Module, swap: Any) -> None:
    """Let torchao replace layers, without moving the RNG or any layer's mode."""
    modes = {name: module.training for name, module in net.named_modules()}
    with isolated_rng():  # the replacements are initialized before they take the weights over
        swap(net)
    for name, module in net.named_modules():
        module.training = modes.get(name, modes.get(name.rpartition(".")[0], net.training))
