"""Choices that build what they name.

Calling a member constructs the torch object behind it. This module imports no
torch; a builder is looked up when a member is first called.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

from nnx.plugins.registry import load_reference

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

    from nnx.params import NNParams, NNSchedulerParams


class _Choice(Enum):
    """Prints as its value, which is also how it is stored."""

    def __str__(self) -> str:
        return str(self.value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class Activations(_Choice):
    """Element-wise non-linearities (``SOFTMAX`` normalizes the last axis)."""

    ELU = "elu"
    SELU = "selu"
    TANH = "tanh"
    GELU = "gelu"
    RELU = "relu"
    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SOFTPLUS = "softplus"
    LEAKY_RELU = "leaky_relu"

    def __call__(self) -> Callable[..., Any]:
        """The activation as a parameter-free ``nn.Module``."""
        from torch import nn

        if self is Activations.SOFTMAX:
            return nn.Softmax(dim=-1)
        kinds = {
            Activations.ELU: nn.ELU,
            Activations.SELU: nn.SELU,
            Activations.TANH: nn.Tanh,
            Activations.GELU: nn.GELU,
            Activations.RELU: nn.ReLU,
            Activations.SIGMOID: nn.Sigmoid,
            Activations.SOFTPLUS: nn.Softplus,
            Activations.LEAKY_RELU: nn.LeakyReLU,
        }
        return kinds[self]()


class Checkpoints(_Choice):
    """The named checkpoints of a run."""

    Q1 = "q1"
    Q2 = "q2"
    Q3 = "q3"
    BEST = "best"
    LAST = "last"
    FIRST = "first"


class Devices(_Choice):
    """Where a model lives; ``AUTO`` is the best device of the machine that builds it."""

    CPU = "cpu"
    MPS = "mps"
    CUDA = "cuda"
    AUTO = "auto"

    def __call__(self) -> torch.device:
        import torch

        return torch.device(self.resolved.value)

    @property
    def resolved(self) -> Devices:
        """The device itself: what :meth:`get` says for ``AUTO``."""
        return Devices.get() if self is Devices.AUTO else self

    def torch_device(self) -> torch.device:
        """The same as calling the member."""
        return self()

    @property
    def is_available(self) -> bool:
        """Whether this machine has the device."""
        import torch

        if self is Devices.CUDA:
            return torch.cuda.is_available()
        return self is not Devices.MPS or torch.backends.mps.is_available()

    @staticmethod
    def get() -> Devices:
        """The best device of this machine: CUDA, then MPS, then the CPU."""
        import torch

        if torch.cuda.is_available():
            return Devices.CUDA
        if torch.backends.mps.is_available():
            return Devices.MPS
        return Devices.CPU

    @staticmethod
    def get_torch_device() -> torch.device:
        """The best device as a ``torch.device``."""
        return Devices.get()()


class Losses(_Choice):
    """The supervised losses; each reads raw network outputs except the NLL."""

    CROSS_ENTROPY = "cross_entropy"
    MEAN_SQUARED_ERROR = "mean_squared_error"
    BINARY_CROSS_ENTROPY = "binary_cross_entropy"
    NEGATIVE_LOG_LIKELIHOOD = "negative_log_likelihood"
    # The short names that people type.
    MSE = MEAN_SQUARED_ERROR
    BCE = BINARY_CROSS_ENTROPY
    NLL = NEGATIVE_LOG_LIKELIHOOD

    def __call__(self) -> nn.Module:
        """The torch loss with its default (mean) reduction; the binary one takes logits."""
        from torch import nn

        kinds: dict[Losses, type[nn.Module]] = {
            Losses.CROSS_ENTROPY: nn.CrossEntropyLoss,
            Losses.MEAN_SQUARED_ERROR: nn.MSELoss,
            Losses.BINARY_CROSS_ENTROPY: nn.BCEWithLogitsLoss,
            Losses.NEGATIVE_LOG_LIKELIHOOD: nn.NLLLoss,
        }
        return kinds[self]()


class Nets(_Choice):
    """The networks that a run can name; other distributions build some of them."""

    CONV = "conv"
    FEED_FWD = "feed_fwd"
    FEED_FWD_MOE = "feed_fwd_moe"
    GRAPH_ATT = "graph_att"
    GRAPH_CONV = "graph_conv"
    GRAPH_SAGE = "graph_sage"
    TRANSFORMER = "transformer"
    VIT = "vit"

    def __call__(self, params: NNParams) -> nn.Module:
        """Build the network, through the registry "net".

        Raises an ``ImportError`` that names the distribution to install when the
        builder belongs to one that is absent, and a ``ValueError`` for the
        params of another network.
        """
        return load_reference("nnx.nets.building:build_net")(self, params)

    @property
    def can_build(self) -> bool:
        """Whether the distribution that builds the network is here."""
        return bool(load_reference("nnx.nets.building:can_build")(self))


class Optims(_Choice):
    """torch's optimizers under the names that run ids use."""

    SGD = "sgd"
    ADAM = "adam"
    ADAM_AMSGRAD = "adam_amsgrad"
    SGD_NESTEROV = "sgd_nesterov"
    ADAMW = "adamw"

    @property
    def is_adam(self) -> bool:
        """Whether ``momentum`` holds Adam's two betas (else SGD's one coefficient)."""
        return self not in (Optims.SGD, Optims.SGD_NESTEROV)

    def __call__(
        self,
        net: nn.Module,
        lr_start: float,
        weight_decay: float,
        momentum: float | tuple[float, float],
        param_groups: list[Any] | None = None,
        strict_param_groups: bool = False,
        eps: float = 1e-8,
    ) -> torch.optim.Optimizer:
        """Build the optimizer over ``net``'s parameters.

        Without ``param_groups`` one group holds every parameter. With them, the
        parameters are bucketed by :func:`nnx.finetune.build_param_groups`;
        ``strict_param_groups`` drops unmatched ones instead of giving them a
        group of their own.
        """
        build = load_reference("nnx.optimizers:build_named")
        return build(
            self,
            net,
            lr=lr_start,
            weight_decay=weight_decay,
            momentum=momentum,
            param_groups=param_groups,
            strict=strict_param_groups,
            eps=eps,
        )


class Schedulers(_Choice):
    """Learning-rate schedules."""

    REDUCE_LR_ON_PLATEAU = "reduce_lr_on_plateau"
    STEP = "step"
    COSINE_ANNEALING = "cosine_annealing"
    ONE_CYCLE = "one_cycle"
    LINEAR_WARMUP_DECAY = "linear_warmup_decay"

    def __call__(
        self,
        optimizer: torch.optim.Optimizer,
        params: NNSchedulerParams,
        n_epochs: int,
        *,
        n_updates: int | None = None,
    ) -> Any:
        """Build the torch scheduler; ``n_updates`` is the default horizon of an update clock."""
        build = load_reference("nnx.schedulers:build_kind")
        return build(self, optimizer, params, n_epochs, n_updates=n_updates)
