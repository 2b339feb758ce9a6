"""Every error that a distribution defines has one root, and keeps its built-in bases."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
from functools import cache
from pathlib import Path

import nnx
import pytest
from nnx.errors import NNxError
from nnx.plugins.registry import UnknownIdError
from nnx.plugins.siblings import MissingPart
from nnx.store.errors import RunExistsError
from nnx.tasks.batch_error import BatchError
from nnx.utils.validation import WrongTypeError

ROOT = Path(__file__).resolve().parents[2]


@cache
def own_errors() -> dict[str, type[BaseException]]:
    """The exception classes that modules of all distributions define, without warnings."""
    found: dict[str, type[BaseException]] = {}
    for source in sorted(ROOT.glob("packages/*/src")):
        for file in sorted(source.rglob("*.py")):
            parts = file.relative_to(source).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            if parts[-1] == "__main__":
                continue  # it runs the command
            for value in vars(importlib.import_module(name)).values():
                if not isinstance(value, type) or not issubclass(value, BaseException):
                    continue
                if value.__module__ == name and not issubclass(value, Warning):
                    found[f"{name}.{value.__qualname__}"] = value
    return found


def test_every_error_of_every_distribution_derives_from_the_one_root() -> None:
    errors = own_errors()
    rooms = {name.split(".")[1] for name in errors}
    # One room of each distribution that has errors, so that none is passed over.
    assert {"store", "transforms", "lm_tasks", "graph_tasks", "hub", "paradigms"} <= rooms
    assert {"decisions", "calibration", "plans"} <= rooms
    assert [name for name, error in errors.items() if not issubclass(error, NNxError)] == []


def test_the_root_is_an_attribute_of_nnx_and_no_more_than_an_exception() -> None:
    assert nnx.errors.NNxError is NNxError
    assert NNxError.__bases__ == (Exception,)
    assert str(NNxError("what, and the way out")) == "what, and the way out"


@pytest.mark.parametrize(
    ("error", "bases"),
    [
        (WrongTypeError("w"), (TypeError, ValueError)),
        (UnknownIdError("u"), (LookupError, ValueError)),
        (BatchError("b"), (ValueError, IndexError, RuntimeError)),
        (MissingPart("m", name="nnx.lm"), (ImportError,)),
        (RunExistsError("abc", "runs"), (FileExistsError, OSError)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_the_built_in_bases_come_first(
    error: Exception, bases: tuple[type[Exception], ...]
) -> None:
    assert all(isinstance(error, base) for base in bases)
    order = type(error).__mro__
    assert all(order.index(base) < order.index(NNxError) for base in bases)


# What the constructors take that make a message of more than one argument.
ARGUMENTS = {
    "message": "what, and the way out", "problems": ["one", "two"], "diagnostics": ("one",),
    "source": "run x", "run_id": "x", "root": "runs", "record": {"mode": "default"},
    "fields": ["metric"], "outcomes": {"q": "answered"}, "failed": ["q"], "skipped": [],
    "request_id": "r", "retry_after_ms": 5.0, "error": "inner",
}  # fmt: skip


def made(kind: type[BaseException]) -> BaseException:
    if not any("__init__" in vars(base) for base in kind.__mro__ if base.__module__[:3] == "nnx"):
        return kind(ARGUMENTS["message"])
    names = [n for n in inspect.signature(kind.__init__).parameters if n not in ("self", "why")]
    positional = [n for n in names if n not in _KEYWORDS]
    keywords = {n: ARGUMENTS[n] for n in names if n in _KEYWORDS}
    return kind(*(ARGUMENTS[n] for n in positional), **keywords)


_KEYWORDS = ("fields", "outcomes", "failed", "skipped", "request_id", "retry_after_ms")


def test_every_error_travels_between_processes_with_its_message_and_attributes() -> None:
    errors = [made(kind) for kind in own_errors().values()]
    assert len(errors) > 60
    for error in errors:
        for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            assert type(again) is type(error)
            assert str(again) == str(error)
            assert again.args == error.args
            assert again.__dict__ == error.__dict__
