"""What is searched: named parameters and the values that they may take."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import Any

from nnx.utils import validation as check
from nnx.utils.jsonlike import canonical, freeze


@dataclass(frozen=True, slots=True)
class FloatParam:
    """A number from ``low`` to ``high``, both included; ``log`` and ``step`` exclude each other."""

    name: str
    low: float
    high: float
    log: bool = False
    step: float | None = None

    def __post_init__(self) -> None:
        _check_range(self, check.real)
        if self.step is not None:
            check.real("FloatParam", "step", self.step, above=0)
            if self.log:
                raise ValueError("FloatParam takes log=True or a step, not both")

    def suggest(self, trial: Any) -> float:
        """The value that an Optuna trial draws."""
        return float(
            trial.suggest_float(self.name, self.low, self.high, log=self.log, step=self.step)
        )

    def state(self) -> dict[str, Any]:
        return {"kind": "float", **_state(self)}


@dataclass(frozen=True, slots=True)
class IntParam:
    """An integer from ``low`` to ``high``, both included, in steps of ``step``."""

    name: str
    low: int
    high: int
    log: bool = False
    step: int = 1

    def __post_init__(self) -> None:
        _check_range(self, check.integer)
        check.count("IntParam", "step", self.step)
        if self.log and self.step != 1:
            raise ValueError("IntParam takes log=True or a step, not both")

    def suggest(self, trial: Any) -> int:
        """The value that an Optuna trial draws."""
        return int(trial.suggest_int(self.name, self.low, self.high, log=self.log, step=self.step))

    def state(self) -> dict[str, Any]:
        return {"kind": "int", **_state(self)}


@dataclass(frozen=True, slots=True)
class CategoricalParam:
    """One of ``choices``: strings, numbers, booleans or ``None``, which a storage can hold."""

    name: str
    choices: tuple[Any, ...]

    def __post_init__(self) -> None:
        check.name("CategoricalParam", "name", self.name)
        given: Any = self.choices
        if isinstance(given, str):
            check.refuse("CategoricalParam", "choices", given, "a sequence of values")
        choices = tuple(given)
        if not choices:
            check.refuse("CategoricalParam", "choices", choices, "one value or more")
        for i, choice in enumerate(choices):
            if choice is not None and not isinstance(choice, (str, int, float, bool)):
                check.refuse(
                    "CategoricalParam", f"choices[{i}]", choice,
                    "a string, number, boolean or None; give it a name and look it up in apply",
                )  # fmt: skip
            if any(type(choice) is type(other) and choice == other for other in choices[:i]):
                check.refuse("CategoricalParam", f"choices[{i}]", choice, "there once")
        object.__setattr__(self, "choices", choices)

    def suggest(self, trial: Any) -> Any:
        """The value that an Optuna trial draws."""
        return trial.suggest_categorical(self.name, self.choices)

    def state(self) -> dict[str, Any]:
        return {"kind": "categorical", "name": self.name, "choices": list(self.choices)}


SearchParam = FloatParam | IntParam | CategoricalParam


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """Parameters with names of their own, drawn in their order."""

    params: tuple[SearchParam, ...]

    def __post_init__(self) -> None:
        params = tuple(self.params)
        if not params:
            raise ValueError("SearchSpace.params must hold one parameter or more")
        for i, param in enumerate(params):
            if not isinstance(param, (FloatParam, IntParam, CategoricalParam)):
                check.refuse_type(
                    "SearchSpace", f"params[{i}]", param, "a Float-, Int- or CategoricalParam"
                )
            if any(param.name == other.name for other in params[:i]):
                check.refuse(
                    "SearchSpace", f"params[{i}]", param.name, "named apart from the others"
                )
        object.__setattr__(self, "params", params)

    def suggest(self, trial: Any) -> dict[str, Any]:
        """A value for every parameter."""
        return {param.name: param.suggest(trial) for param in self.params}

    def state(self) -> list[dict[str, Any]]:
        return [param.state() for param in self.params]

    def digest(self) -> str:
        """The SHA-256 of :meth:`state`."""
        return hashlib.sha256(canonical(freeze(self.state()))).hexdigest()


def _state(param: Any) -> dict[str, Any]:
    return {field.name: getattr(param, field.name) for field in fields(param)}


def _check_range(param: Any, number: Any) -> None:
    owner = type(param).__name__
    check.name(owner, "name", param.name)
    for name in ("low", "high"):
        object.__setattr__(param, name, number(owner, name, getattr(param, name)))
    check.flag(owner, "log", param.log)
    if param.low > param.high:
        check.refuse(owner, "low", param.low, f"at most high={param.high}")
    if param.log and param.low <= 0:
        check.refuse(owner, "low", param.low, "above 0 with log=True")
