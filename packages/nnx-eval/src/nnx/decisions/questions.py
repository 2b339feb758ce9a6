"""What can be asked: one of several options, yes or no, a level of an ordered scale."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from nnx.utils.validation import show

from .errors import InvalidDecisionRequest


@dataclass(frozen=True, slots=True)
class Option:
    """``id`` is bookkeeping, ``description`` is the text that a model reads."""

    id: str
    description: str

    def __post_init__(self) -> None:
        for name in ("id", "description"):
            _text(f"Option.{name}", getattr(self, name))


class Question:
    """The base of :class:`Choice`, :class:`Boolean` and :class:`Score`."""

    __slots__ = ("_digest",)
    kind: ClassVar[str] = ""
    prompt: str
    _digest: str

    @property
    def option_ids(self) -> tuple[str, ...]:
        """The ids that an answer has probabilities for, in order."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """The whole question as plain data."""
        raise NotImplementedError

    def model_view(self) -> dict[str, Any]:
        """What a model may read: the texts, without any id."""
        raise NotImplementedError

    def digest(self) -> str:
        """SHA-256 (hex) of the state: another order or wording is another question."""
        try:
            return self._digest  # every answer is compared with it, and a question never changes
        except AttributeError:
            pass
        text = json.dumps(self.state(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        object.__setattr__(self, "_digest", digest)
        return digest


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InvalidDecisionRequest(f"{where} must be a non-empty string, not {show(value)}")
    return value


def _options(where: str, options: Any) -> tuple[Option, ...]:
    if isinstance(options, (str, Mapping, Option)):
        raise InvalidDecisionRequest(f"{where} must be a sequence of Option, not {show(options)}")
    try:
        found = tuple(options)
    except TypeError:
        raise InvalidDecisionRequest(
            f"{where} must be a sequence of Option, not {show(options)}"
        ) from None
    for option in found:
        if not isinstance(option, Option):
            raise InvalidDecisionRequest(f"{where} holds {show(option)}, which is no Option")
    if len(found) < 2:
        raise InvalidDecisionRequest(f"{where} needs at least two, not {len(found)}")
    ids = [option.id for option in found]
    repeated = sorted({i for i in ids if ids.count(i) > 1})
    if repeated:
        raise InvalidDecisionRequest(f"{where} repeats the id {repeated[0]!r}")
    return found


@dataclass(frozen=True, slots=True)
class Choice(Question):
    """Which one of two or more options."""

    prompt: str
    options: tuple[Option, ...]
    kind: ClassVar[str] = "choice"

    def __post_init__(self) -> None:
        _text("Choice.prompt", self.prompt)
        object.__setattr__(self, "options", _options("Choice.options", self.options))

    @property
    def option_ids(self) -> tuple[str, ...]:
        return tuple(option.id for option in self.options)

    def state(self) -> dict[str, Any]:
        return {
            "kind": "choice",
            "prompt": self.prompt,
            "options": [[option.id, option.description] for option in self.options],
        }

    def model_view(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "options": [option.description for option in self.options]}


@dataclass(frozen=True, slots=True)
class Boolean(Question):
    """Yes or no; answered by the probability of yes."""

    prompt: str
    kind: ClassVar[str] = "boolean"

    def __post_init__(self) -> None:
        _text("Boolean.prompt", self.prompt)

    @property
    def option_ids(self) -> tuple[str, ...]:
        return ("true", "false")

    def state(self) -> dict[str, Any]:
        return {"kind": "boolean", "prompt": self.prompt}

    def model_view(self) -> dict[str, Any]:
        return {"prompt": self.prompt}


@dataclass(frozen=True, slots=True)
class Score(Question):
    """Which level of an ordered scale, from the lowest to the highest."""

    prompt: str
    levels: tuple[Option, ...]
    kind: ClassVar[str] = "score"

    def __post_init__(self) -> None:
        _text("Score.prompt", self.prompt)
        object.__setattr__(self, "levels", _options("Score.levels", self.levels))

    @property
    def option_ids(self) -> tuple[str, ...]:
        return tuple(level.id for level in self.levels)

    def state(self) -> dict[str, Any]:
        return {
            "kind": "score",
            "prompt": self.prompt,
            "levels": [[level.id, level.description] for level in self.levels],
        }

    def model_view(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "levels": [level.description for level in self.levels]}


_LISTS: dict[str, str | None] = {"choice": "options", "boolean": None, "score": "levels"}


def question_from_state(state: Mapping[str, Any]) -> Choice | Boolean | Score:
    """Rebuild a question from its :meth:`Question.state`."""
    if not isinstance(state, Mapping):
        raise InvalidDecisionRequest(f"a question's state is a mapping, not {show(state)}")
    kind = state.get("kind")
    if not isinstance(kind, str) or kind not in _LISTS:
        raise InvalidDecisionRequest(f"kind must be choice, boolean or score, not {show(kind)}")
    listed = _LISTS[kind]
    keys = {"kind", "prompt"} | ({listed} if listed else set())
    if set(state) != keys:
        raise InvalidDecisionRequest(
            f"the state of a {kind} question has the keys {', '.join(sorted(keys))}, "
            f"not {', '.join(sorted(map(str, state)))}"
        )
    if listed is None:
        return Boolean(state["prompt"])
    options = tuple(_option(f"{kind}.{listed}", pair) for pair in _sequence(kind, state[listed]))
    return Choice(state["prompt"], options) if kind == "choice" else Score(state["prompt"], options)


def _sequence(kind: str, value: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        raise InvalidDecisionRequest(f"the options of a {kind} question are a list")
    return value


def _option(where: str, pair: Any) -> Option:
    if isinstance(pair, Option):
        return pair
    if not isinstance(pair, (list, tuple)) or len(pair) != 2:
        raise InvalidDecisionRequest(f"{where} holds pairs of id and description, not {show(pair)}")
    return Option(*pair)
