"""What a model is: its network, loss, device, task and precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from nnx.enums import Devices, Losses, Nets
from nnx.params.base import (
    Converted,
    Params,
    StateField,
    always,
    converted,
    encode_enum,
    member,
    optional,
    put,
)
from nnx.params.loss import AnyLoss, decode_loss, encode_loss, loss_of
from nnx.params.precision import PrecisionPolicy
from nnx.params.registered import ModelSpec, RuntimeModule
from nnx.params.task import TaskSpec
from nnx.utils import validation as check

if TYPE_CHECKING:
    from torch import nn

NetDescriptor = Nets | ModelSpec | RuntimeModule


def _encode_net(net: Any) -> Any:
    return net.state() if isinstance(net, (ModelSpec, RuntimeModule)) else encode_enum(net)


def _decode_net(state: Any) -> NetDescriptor | None:
    if state is None:
        return None
    if isinstance(state, Mapping):
        kind = check.choice("NNModelParams.net", "kind", state.get("kind"), _DESCRIPTORS)
        return _DESCRIPTORS[kind].from_state(state)
    return member(Nets)(state)


_DESCRIPTORS: dict[str, Any] = {"registered": ModelSpec, "runtime": RuntimeModule}


def _state(value: Any) -> Any:
    return value.state()


@dataclass(frozen=True, kw_only=True, slots=True)
class NNModelParams(Params):
    """The network's descriptor and what the model does with its outputs.

    ``net`` is a :class:`Nets` member, a registered :class:`ModelSpec`, or the
    :class:`RuntimeModule` that ``NNModel(module=...)`` fills in; until then it
    may be ``None``. An explicit ``precision`` governs training and inference
    (``PrecisionPolicy("fp32")`` is the same as none); ``mixed_precision`` is the
    older flag for FP16 training on CUDA, and is dropped beside an FP16 policy.

    ``net``, ``device`` and ``loss`` may be given by name ("feed_fwd", "cuda", "mse"), in any
    case, and ``loss`` as a :class:`LossSpec` or one of torch's losses too, which becomes its
    spec. ``device="auto"`` is the best device of the machine that builds the model.
    """

    net: Converted[NetDescriptor | None, str] = converted(None)
    device: Converted[Devices, str] = converted(Devices.CPU)
    loss: Converted[AnyLoss, str | nn.Module] = converted(Losses.CROSS_ENTROPY)
    mixed_precision: bool = False
    task: TaskSpec | None = None
    precision: PrecisionPolicy | None = None

    _SECTION: ClassVar[str] = "model"
    _STATE: ClassVar[tuple[StateField, ...]] = (
        always("net", encode=_encode_net, decode=_decode_net),
        always("loss", encode=encode_loss, decode=decode_loss),
        always("device", encode=encode_enum, decode=member(Devices)),
        optional("mixed_precision"),
        optional("task", encode=_state, decode=lambda s: s and TaskSpec.from_state(s)),
        optional("precision", encode=_state, decode=lambda s: s and PrecisionPolicy.from_state(s)),
    )

    def __post_init__(self) -> None:
        owner = type(self).__name__
        net: Any = self.net
        if isinstance(net, str):
            put(self, net=check.member(owner, "net", net, Nets))
        elif net is not None:
            check.instance(owner, "net", net, (Nets, ModelSpec, RuntimeModule))
        put(self, device=check.member(owner, "device", self.device, Devices))
        put(self, loss=loss_of(owner, "loss", self.loss))
        put(self, mixed_precision=check.flag(owner, "mixed_precision", self.mixed_precision))
        if self.task is not None:
            check.instance(owner, "task", self.task, TaskSpec)
        if self.precision is not None:
            check.instance(owner, "precision", self.precision, PrecisionPolicy)
            self._settle_precision(self.precision)

    def _settle_precision(self, policy: PrecisionPolicy) -> None:
        """One way to say it: full precision is no policy, and FP16 needs no flag beside it."""
        if self.mixed_precision and policy.mode != "fp16":
            raise ValueError(
                f"NNModelParams.mixed_precision=True asks for FP16 and "
                f'precision=PrecisionPolicy("{policy.mode}") for another arithmetic; '
                "leave mixed_precision out"
            )
        put(self, mixed_precision=False, precision=None if policy.mode == "fp32" else policy)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> NNModelParams:
        """Rebuild from :meth:`state`; in an earlier form a policy overruled the flag beside it."""
        if isinstance(state, Mapping) and state.get("precision") is not None:
            state = {key: value for key, value in state.items() if key != "mixed_precision"}
        return super(NNModelParams, cls).from_state(state)

    @property
    def builtin(self) -> bool:
        """Whether ``net`` is one of the :class:`Nets`."""
        return isinstance(self.net, Nets)

    def is_valid(self) -> bool:
        """Whether a network is named."""
        return self.net is not None
