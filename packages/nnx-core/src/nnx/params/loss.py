"""Which loss a model is trained with: a member of ``Losses``, or a registered loss and its config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from nnx.enums import Losses
from nnx.params.registered import _read, _Registered
from nnx.plugins.registry import load_reference
from nnx.utils import validation as check
from nnx.utils.jsonlike import canonical, thaw

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True, eq=False)
class LossSpec(_Registered):
    """A loss that a registered factory builds from ``config``; calling the spec builds it.

    Built in are ``cross_entropy`` (``weight``, ``label_smoothing``, ``ignore_index``),
    ``focal`` (``gamma``, ``weight``), ``binary_cross_entropy`` (``pos_weight``), ``huber``,
    ``poisson``, ``gaussian_nll``, ``ctc``, ``triplet`` and others; :mod:`nnx.tasks.loss_functions`
    says what each takes.
    """

    id: str
    version: int = 1
    config: Mapping[str, Any] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        _Registered._check(self)

    def __call__(self) -> nn.Module:
        """The loss as a module that takes raw outputs and targets."""
        module: nn.Module = load_reference("nnx.tasks.registered_losses:build_loss")(self)
        return module

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"id": self.id, "version": self.version}
        if self.config:
            state["config"] = thaw(self.config)
        return state

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> LossSpec:
        return LossSpec(**_read("LossSpec", state, ("id", "version", "config")))


AnyLoss: TypeAlias = Losses | LossSpec

# torch's losses: the id of each here, and the arguments that are plain data, with their defaults.
_STOCK: dict[str, tuple[str, dict[str, Any]]] = {
    "CrossEntropyLoss": (
        "cross_entropy", {"weight": None, "ignore_index": -100, "label_smoothing": 0.0},
    ),
    "NLLLoss": ("negative_log_likelihood", {"weight": None, "ignore_index": -100}),
    "BCEWithLogitsLoss": ("binary_cross_entropy", {"weight": None, "pos_weight": None}),
    "MSELoss": ("mean_squared_error", {}),
    "L1Loss": ("l1", {}),
    "SmoothL1Loss": ("smooth_l1", {"beta": 1.0}),
    "HuberLoss": ("huber", {"delta": 1.0}),
    "PoissonNLLLoss": ("poisson", {"log_input": True, "full": False, "eps": 1e-8}),
    "GaussianNLLLoss": ("gaussian_nll", {"full": False, "eps": 1e-6}),
    "CTCLoss": ("ctc", {"blank": 0, "zero_infinity": False}),
    "TripletMarginLoss": ("triplet", {"margin": 1.0, "p": 2.0, "eps": 1e-6, "swap": False}),
}  # fmt: skip


def loss_of(owner: str, field: str, value: Any) -> AnyLoss:
    """A member, a spec, a word for either, or one of torch's losses, as what is stored.

    A spec without config that is a member under another type is the member: one training
    has one id.
    """
    if isinstance(value, Losses):
        return value
    if isinstance(value, str):
        return _named(owner, field, value)
    spec = value if isinstance(value, LossSpec) else _of_module(owner, field, value)
    plain = spec.version == 1 and not spec.config
    return next((one for one in Losses if plain and one.value == spec.id), spec)


def _named(owner: str, field: str, word: str) -> AnyLoss:
    words = check.member_words(Losses)
    if word.lower() in words:
        return words[word.lower()]
    from nnx.plugins import manager

    registered = {id for id, version in manager.registry("loss") if version == 1}
    if word in registered or word.lower() in registered:
        return loss_of(owner, field, LossSpec(word if word in registered else word.lower()))
    known = {*registered, *(one.value for one in Losses)}
    raise ValueError(
        f"{owner}.{field} must be one of {', '.join(sorted(known))}, not {check.show(word)}"
        f"{check.close(word.lower(), {*known, *words})}"
    )


def _of_module(owner: str, field: str, value: Any) -> LossSpec:
    kind = type(value)
    stock = _STOCK.get(kind.__name__) if kind.__module__ == "torch.nn.modules.loss" else None
    if stock is None:
        is_module = hasattr(value, "forward")
        check.refuse_type(
            owner,
            field,
            value,
            "a Losses, a LossSpec, one of their names, or one of torch's losses "
            f"({', '.join(_STOCK)})"
            + (
                "; a loss of your own is registered (nnx.register_loss, or a plugin's nnx_losses), "
                "or goes into an objective" if is_module else ""
            ),
        )  # fmt: skip
    id, arguments = stock
    found = {name: _plain(getattr(value, name)) for name in arguments}
    config = {name: found[name] for name, default in arguments.items() if found[name] != default}
    if value.reduction != "mean":
        config["reduction"] = value.reduction
    return LossSpec(id, config=config)


def _plain(value: Any) -> Any:
    """A tensor's numbers as the shortest that spell them: 0.1, whatever its dtype."""
    if not hasattr(value, "detach"):
        return value
    array = value.detach().cpu().numpy()
    if array.ndim == 0:
        return float(str(array[()]))
    if array.ndim > 1:
        raise ValueError(f"the weights of a loss are a row of numbers, not of shape {array.shape}")
    return [float(str(number)) for number in array]


def encode_loss(value: AnyLoss) -> Any:
    return value.state() if isinstance(value, LossSpec) else value.value


def decode_loss(state: Any) -> AnyLoss:
    if isinstance(state, Mapping):
        return LossSpec.from_state(state)
    return check.member("NNModelParams", "loss", state, Losses)


def loss_id(state: Any) -> str:
    """The id of a stored loss, without its settings."""
    return str(state.get("id") if isinstance(state, Mapping) else state)


def spell_loss(state: Any) -> str:
    """A stored loss in one spelling, with its settings: ``'huber@v1 {"delta":2.0}'``."""
    if not isinstance(state, Mapping):
        return str(state)
    spec = LossSpec.from_state(state)
    return f"{spec.versioned_id} {canonical(spec.config).decode()}" if spec.config else str(spec)
