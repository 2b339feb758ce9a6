"""Every error that a distribution defines has one root, and keeps its built-in bases."""

from __future__ import annotations

import importlib
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


def test_an_error_of_one_message_travels_between_processes() -> None:
    plain = [
        error
        for error in own_errors().values()
        if not any(
            "__init__" in vars(base) for base in error.__mro__ if base.__module__[:3] == "nnx"
        )
    ]
    assert len(plain) > 30
    back = [pickle.loads(pickle.dumps(error("what, and the way out"))) for error in plain]
    assert [type(error) for error in back] == plain
    assert {str(error) for error in back} == {"what, and the way out"}
