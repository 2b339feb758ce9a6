"""Names, orders and defaults that existing scripts rely on."""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path

import nnx
import pytest

CONTRACT = json.loads(
    (Path(__file__).parents[2] / "data" / "configuration_contract.json").read_text()
)


@pytest.mark.parametrize("name", CONTRACT["fields"])
def test_the_fields_keep_their_names_and_defaults(name):
    expected = CONTRACT["fields"][name]
    fields = {field.name: field for field in dataclasses.fields(getattr(nnx, name))}
    assert list(fields)[: len(expected)] == list(expected)
    for field, default in expected.items():
        assert spelled(fields[field]) == default, field


def spelled(field: dataclasses.Field) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return "<factory>"
    return "required" if field.default is dataclasses.MISSING else literal(field.default)


def literal(value: object) -> str:
    return repr(value) if isinstance(value, str) or dataclasses.is_dataclass(value) else str(value)


@pytest.mark.parametrize("name", CONTRACT["members"])
def test_the_members_keep_their_values(name):
    members = {member.name: member.value for member in getattr(nnx, name)}
    assert members == CONTRACT["members"][name]


@pytest.mark.parametrize("name", CONTRACT["methods"])
def test_the_builder_methods_keep_their_arguments(name):
    builder = getattr(nnx, name)
    for method, arguments in CONTRACT["methods"][name].items():
        parameters = inspect.signature(getattr(builder, method)).parameters
        assert [p for p in parameters if p != "self"] == arguments, method
