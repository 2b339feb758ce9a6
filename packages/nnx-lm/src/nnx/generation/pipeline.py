"""Stages of decoding in the caller's order, as a value that can be stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from nnx.generation.processors import (
    LogitsProcessor,
    MinPFilter,
    RepetitionPenalty,
    TemperatureScaling,
    TopKFilter,
    TopPFilter,
    apply_chain,
)
from nnx.utils import validation as check
from nnx.utils.jsonlike import freeze_mapping, thaw

_KINDS: dict[str, Callable[[Any], LogitsProcessor]] = {
    "repetition_penalty": RepetitionPenalty,
    "temperature": TemperatureScaling,
    "top_k": TopKFilter,
    "top_p": TopPFilter,
    "min_p": MinPFilter,
}
_VERSION = 1

LogitsFunction: TypeAlias = Callable[[torch.Tensor, list[int]], torch.Tensor]


@dataclass(frozen=True)
class LogitsStage:
    """One standard processor by its name and its value."""

    kind: str
    value: int | float

    def __post_init__(self) -> None:
        check.choice("LogitsStage", "kind", self.kind, _KINDS)
        self.processor()  # its own check of the value

    def processor(self) -> LogitsProcessor:
        """The processor that the stage stands for."""
        return _KINDS[self.kind](self.value)

    @property
    def terminal(self) -> bool:
        """Whether nothing may follow: a temperature of 0 has chosen the token."""
        return self.kind == "temperature" and self.value == 0

    def state(self) -> dict[str, Any]:
        return {"kind": self.kind, "value": self.value}

    @classmethod
    def repetition_penalty(cls, value: float) -> LogitsStage:
        return cls("repetition_penalty", value)

    @classmethod
    def temperature(cls, value: float) -> LogitsStage:
        return cls("temperature", value)

    @classmethod
    def top_k(cls, value: int) -> LogitsStage:
        return cls("top_k", value)

    @classmethod
    def top_p(cls, value: float) -> LogitsStage:
        return cls("top_p", value)

    @classmethod
    def min_p(cls, value: float) -> LogitsStage:
        return cls("min_p", value)


@dataclass(frozen=True)
class CustomStage:
    """A function of the caller's; ``tag`` names the registered codec that can store it."""

    function: LogitsFunction
    tag: str | None = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            check.refuse(
                "CustomStage", "function", self.function, "a callable (logits, token_history)"
            )
        if self.tag is not None:
            check.text("CustomStage", "tag", self.tag)

    def processor(self) -> LogitsFunction:
        return self.function

    @property
    def terminal(self) -> bool:
        return False


Stage: TypeAlias = LogitsStage | CustomStage


@dataclass(frozen=True)
class OrderedLogitsPipeline:
    """Stages that run exactly in this order; itself a logits processor.

    Unlike :class:`nnx.generation.LogitsChain` it is a frozen value: it compares,
    and ``state()`` and ``from_state`` store it, with custom stages through the
    codecs of :func:`register_logits_stage_codec`. Nothing may follow a
    temperature of 0.
    """

    stages: tuple[Stage, ...] = ()

    def __post_init__(self) -> None:
        stages = tuple(_stage(stage) for stage in self.stages)
        for stage in stages[:-1]:
            if stage.terminal:
                raise ValueError(
                    "OrderedLogitsPipeline: a temperature of 0 chooses the token, so it must be "
                    "the last stage"
                )
        object.__setattr__(self, "stages", stages)

    @classmethod
    def of(cls, *stages: Any) -> OrderedLogitsPipeline:
        """A pipeline of stages; a bare callable is a :class:`CustomStage` without a tag."""
        return cls(stages)

    def append(self, *stages: Any) -> OrderedLogitsPipeline:
        """A pipeline that goes on with ``stages``."""
        return OrderedLogitsPipeline((*self.stages, *stages))

    def prepend(self, *stages: Any) -> OrderedLogitsPipeline:
        """A pipeline that begins with ``stages``."""
        return OrderedLogitsPipeline((*stages, *self.stages))

    def processors(self) -> list[Any]:
        """One :class:`LogitsProcessor` per stage, in order."""
        return [stage.processor() for stage in self.stages]

    def __call__(self, logits: torch.Tensor, token_history: list[int]) -> torch.Tensor:
        return apply_chain(logits, token_history=token_history, processors=self.processors())

    def state(self) -> dict[str, Any]:
        """The pipeline as plain data.

        Raises ``ValueError`` for a custom stage without a tag or whose tag has no codec.
        """
        return {"version": _VERSION, "stages": [_stage_state(stage) for stage in self.stages]}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> OrderedLogitsPipeline:
        """The pipeline of :meth:`state`; the codecs of its custom stages must be registered."""
        stages = state.get("stages") if isinstance(state, Mapping) else None
        if not isinstance(stages, (list, tuple)):
            raise ValueError(f"an OrderedLogitsPipeline's state has stages, not {state!r}")
        if state.get("version") != _VERSION:
            raise ValueError(
                f"OrderedLogitsPipeline: version {state.get('version')!r} is not known here "
                f"(this is version {_VERSION})"
            )
        return cls(tuple(_stage_from(stage) for stage in stages))


# Codecs of custom stages, for this process ------------------------------------------------


@dataclass(frozen=True)
class LogitsStageCodec:
    """How the functions of one tag become plain data and come back."""

    tag: str
    encode: Callable[[Callable[..., Any]], Mapping[str, Any]]
    decode: Callable[[Mapping[str, Any]], LogitsFunction]

    def __post_init__(self) -> None:
        check.text("LogitsStageCodec", "tag", self.tag)
        for field in ("encode", "decode"):
            if not callable(getattr(self, field)):
                check.refuse("LogitsStageCodec", field, getattr(self, field), "a callable")


_CODECS: dict[str, LogitsStageCodec] = {}


def register_logits_stage_codec(codec: LogitsStageCodec) -> None:
    """Let stages of ``codec.tag`` be stored and loaded; a taken tag is refused."""
    check.instance("register_logits_stage_codec", "codec", codec, LogitsStageCodec)
    if codec.tag in _CODECS:
        raise ValueError(
            f"a logits stage codec for {codec.tag!r} is registered already; unregister it first"
        )
    _CODECS[codec.tag] = codec


def unregister_logits_stage_codec(tag: str) -> None:
    """Forget the codec of ``tag``; an unknown tag is a ``KeyError``."""
    if tag not in _CODECS:
        raise KeyError(f"no logits stage codec is registered for {tag!r}{_known()}")
    del _CODECS[tag]


def registered_logits_stage_codecs() -> tuple[str, ...]:
    """The registered tags, sorted."""
    return tuple(sorted(_CODECS))


def _known() -> str:
    return f" (registered: {', '.join(registered_logits_stage_codecs()) or 'none'})"


def _codec(tag: str | None) -> LogitsStageCodec:
    if tag is None:
        raise ValueError(
            "a custom stage without a tag cannot be stored: give CustomStage a tag and register "
            "a LogitsStageCodec for it"
        )
    if tag not in _CODECS:
        raise ValueError(
            f"no logits stage codec is registered for {tag!r}{_known()}; register one with "
            "nnx.register_logits_stage_codec"
        )
    return _CODECS[tag]


def _stage(stage: Any) -> Stage:
    if isinstance(stage, (LogitsStage, CustomStage)):
        return stage
    if callable(stage):
        return CustomStage(stage)
    raise TypeError(
        f"a stage is a LogitsStage, a CustomStage or a callable (logits, token_history), "
        f"not {type(stage).__name__}"
    )


def _stage_state(stage: Stage) -> dict[str, Any]:
    if isinstance(stage, LogitsStage):
        return stage.state()
    codec = _codec(stage.tag)
    config = freeze_mapping(codec.encode(stage.function), f"the codec of {codec.tag!r}")
    return {"kind": "custom", "tag": codec.tag, "config": thaw(config)}


def _stage_from(state: Any) -> Stage:
    if not isinstance(state, Mapping):
        raise ValueError(f"a stage's state is a mapping, not {check.show(state)}")
    if state.get("kind") != "custom":
        return LogitsStage(state.get("kind", ""), state.get("value", ""))
    tag = state.get("tag")
    return CustomStage(_codec(tag).decode(state.get("config") or {}), tag)
