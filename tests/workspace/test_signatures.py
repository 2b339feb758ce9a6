"""Every public name with the parameters, fields, defaults and members of the original.

``tests/data/signatures.json`` lists them. What can be imported is compared; a module
or name of a distribution that does not provide it yet is left out. More than the
original has (a later parameter with a default, a method, a member) is no difference.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

import nnx
import pytest
from nnx.plugins import siblings

SIGNATURES = json.loads((Path(__file__).parents[1] / "data" / "signatures.json").read_text())
MODULES: dict[str, dict[str, Any]] = SIGNATURES["modules"]

# What differs on purpose, and why. Whole names, or a name and its method.
ON_PURPOSE: dict[str, str] = {}

# Names of core that come with a module of another distribution.
WAITING = {
    "nnx.result.decide_result": "nnx.decisions",
    "nnx.result.validate_decision_request_result": "nnx.decisions",
}


def module_of(name: str) -> Any:
    try:
        return nnx if name == "nnx" else importlib.import_module(name)
    except ImportError:
        top = name.split(".")[1]
        claimed = top == "bundles" or any(top in names for names in siblings.MODULES.values())
        assert claimed, f"{name} is gone, and no distribution is going to provide it"
        return None


def waits(where: str) -> bool:
    return where in WAITING and module_of(WAITING[where]) is None


def is_to_come(name: str) -> bool:
    return any(name in names for names in siblings.PUBLIC_NAMES.values())


@pytest.mark.parametrize("module", MODULES)
def test_names_parameters_fields_and_defaults_are_those_of_the_original(module: str) -> None:
    found = module_of(module)
    if found is None:
        pytest.skip("not provided yet")
    differences: dict[str, str] = {}
    for name, wanted in MODULES[module].items():
        where = f"{module}.{name}"
        value = getattr(found, name, None)
        if value is None:
            if not (is_to_come(name) if module == "nnx" else waits(where)):
                differences[where] = "is missing"
            continue
        differences.update({f"{where}{at}": what for at, what in compare(value, wanted)})
    unexplained = {at: what for at, what in differences.items() if at not in ON_PURPOSE}
    assert unexplained == {}
    listed = {at for at in ON_PURPOSE if at.startswith(f"{module}.") and owner(at) == module}
    assert listed <= set(differences), "no difference any more: take it off the list"


def owner(at: str) -> str:
    return max((m for m in MODULES if at.startswith(f"{m}.")), key=len)


def test_every_flat_name_can_be_imported_from_nnx() -> None:
    missing = [n for n in SIGNATURES["flat"] if not hasattr(nnx, n) and not is_to_come(n)]
    assert missing == []


def test_a_difference_is_seen() -> None:
    def call(a: int, b: int = 2, *, c: str = "x", d: int = 0) -> None: ...

    assert parameters(call, ["a", "b=2", "*", "c='x'"]) == []
    assert parameters(call, ["b=2", "a"]) == [
        "takes b at another place",
        "takes a at another place",
    ]
    assert parameters(call, ["a", "b=3"]) == ["b is 2 by default, not 3"]
    assert parameters(call, ["a", "b=<class 'int'>"]) == ["b is 2 by default, not <class 'int'>"]
    assert parameters(call, ["a", "b=2", "c='x'"]) == ["takes c at another place"]
    assert parameters(call, ["b=2"]) == ["takes b at another place", "needs a, which is new"]
    assert parameters(call, ["a=1"]) == ["a needs a value; it was 1"]
    assert parameters(call, ["a", "e=1"]) == ["has no parameter e"]


# -- comparing -----------------------------------------------------------------------


def compare(value: Any, wanted: dict[str, Any]) -> list[tuple[str, str]]:
    """``(place, difference)`` for everything of ``wanted`` that ``value`` has otherwise."""
    if wanted["kind"] == "constant":
        same = shown(value) == wanted["value"]
        return [] if same else [("", f"is {shown(value)}, not {wanted['value']}")]
    if wanted["kind"] == "function":
        return [("", d) for d in parameters(value, wanted["parameters"])]
    if wanted["kind"] == "name":  # a type of callables, or a union
        return []
    found: list[tuple[str, str]] = []
    if not inspect.isclass(value):
        return [("", f"is no class but {value!r}")]
    if wanted["kind"] == "dataclass" and not dataclasses.is_dataclass(value):
        found.append(("", "is no dataclass"))
    if "fields" in wanted:
        found += [("", d) for d in fields(value, wanted["fields"])]
    if "init" in wanted and not getattr(value, "_is_protocol", False):
        found += [(".__init__", d) for d in parameters(value, wanted["init"])]
    if "members" in wanted:
        has = {m.name: m.value for m in value}
        wrong = {k: v for k, v in wanted["members"].items() if has.get(k) != v}
        if wrong or not issubclass(value, enum.Enum):
            found.append(("", f"lacks the members {wrong}"))
    found += [("", d) for d in bases(value, wanted.get("bases", ()))]
    names = {f.name for f in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else ()
    for name in wanted.get("properties", ()):
        if not hasattr(value, name) and name not in names:
            found.append((f".{name}", "is missing"))
    for name, expected in wanted.get("methods", {}).items():
        method = getattr(value, name, None)
        if method is None:
            found.append((f".{name}", "is missing"))
        else:
            found += [(f".{name}", d) for d in parameters(method, expected)]
    return found


def bases(value: type, wanted: list[str]) -> list[str]:
    own = {base.__name__ for base in value.__mro__}
    skipped = ("Module", "Generic", "ABC", "Protocol", "_NoTruth", "Enum", "PyTorchModelHubMixin")
    return [f"is no {base}" for base in wanted if base not in own and base not in skipped]


def parameters(value: Any, wanted: list[str]) -> list[str]:
    """How a callable's parameters differ; all of ``wanted`` can be passed as they were."""
    try:
        has = dict(inspect.signature(value).parameters)
    except (TypeError, ValueError):
        return [f"has no signature: {value!r}"]
    for first in ("self", "cls"):
        has.pop(first, None)
    catches_all = any(p.kind is p.VAR_KEYWORD for p in has.values())
    positional = [
        p.name for p in has.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    found, place, only_keywords = [], 0, False
    for word in wanted:
        if word == "*":
            only_keywords = True
        if word.startswith("*"):
            continue
        name, _, default = word.partition("=")
        if name not in has:
            if not (catches_all and only_keywords):
                found.append(f"has no parameter {name}")
            place += 1
            continue
        if not only_keywords and (place >= len(positional) or positional[place] != name):
            found.append(f"takes {name} at another place")
        place += 1
        found += default_difference(name, has[name].default, inspect.Parameter.empty, default)
    known = {word.partition("=")[0] for word in wanted}
    found += [
        f"needs {p.name}, which is new"
        for p in has.values()
        if p.name not in known
        and p.default is p.empty
        and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    return found


def fields(value: Any, wanted: list[str]) -> list[str]:
    if not dataclasses.is_dataclass(value):
        return parameters(value, wanted)
    has = {f.name: f for f in dataclasses.fields(value)}
    found, order = [], [name for name, f in has.items() if f.init and not f.kw_only]
    place = 0
    for word in wanted:
        name, _, default = word.partition("=")
        if name not in has:
            found.append(f"has no field {name}")
            continue
        field = has[name]
        if not field.kw_only and field.init:
            if place < len(order) and order[place] != name:
                found.append(f"has {name} at another place")
            place += 1
        if field.default_factory is not dataclasses.MISSING:
            if not default.startswith("<factory>") and default != shown(field.default_factory()):
                found.append(f"{name} has a factory, not {default or 'no default'}")
            continue
        found += default_difference(name, field.default, dataclasses.MISSING, default)
    return found


def default_difference(name: str, has: Any, empty: Any, wanted: str) -> list[str]:
    if has is empty:
        return [f"{name} needs a value; it was {wanted}"] if wanted else []
    if not wanted:
        return []  # more can be left out than before
    wanted = _plain(wanted)
    if wanted.startswith("<") and not wanted.startswith("<class "):
        return []  # a function's or a sentinel's repr
    return [] if shown(has) == wanted else [f"{name} is {shown(has)} by default, not {wanted}"]


def shown(value: Any) -> str:
    """How the list spells a value: an enum by its value, a dataclass by its older fields."""
    if isinstance(value, enum.Enum):
        return str(value.value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        wanted = next(
            (m[type(value).__name__] for m in MODULES.values() if type(value).__name__ in m), None
        )
        names = [w.partition("=")[0] for w in wanted["fields"]] if wanted else [
            f.name for f in dataclasses.fields(value)
        ]  # fmt: skip
        inner = ", ".join(f"{n}={shown(getattr(value, n))}" for n in names)
        return f"{type(value).__name__}({inner})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {shown(v)}" for k, v in value.items()) + "}"
    return _plain(repr(value))


def _plain(text: str) -> str:
    """A class of NNx by its name alone, wherever it is defined."""
    return re.sub(r"<class '(?:nnx\.)[\w.]*\.(\w+)'>", r"\1", text)
