"""JSON-like values, frozen: what is kept, what is refused, and the one spelling."""

from __future__ import annotations

import copy
import json
import pickle
from enum import Enum, IntEnum

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nnx.utils.jsonlike import FrozenDict, FrozenList, canonical, freeze, freeze_mapping, thaw

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=10,
)


@settings(max_examples=50)
@given(json_values)
def test_freezing_and_thawing_is_what_json_would_give(value):
    frozen = freeze(value)
    assert thaw(frozen) == value
    assert freeze(thaw(frozen)) == frozen
    hash(frozen)
    spelled = canonical(frozen)
    assert json.loads(spelled.decode("utf-8", "surrogatepass")) == value
    assert canonical(freeze(json.loads(json.dumps(value)))) == spelled


@settings(max_examples=50)
@given(st.dictionaries(st.text(max_size=6), json_values, max_size=4))
def test_the_order_of_keys_does_not_change_the_spelling(value):
    backwards = dict(reversed(value.items()))
    assert canonical(freeze(value)) == canonical(freeze(backwards))
    assert freeze(value) == freeze(backwards)
    assert hash(freeze(value)) == hash(freeze(backwards))


def test_one_true_and_one_point_zero_are_spelled_apart():
    assert len({canonical(v) for v in (1, 1.0, True, "1")}) == 4


class Word(str, Enum):
    A = "a"


class Number(IntEnum):
    ONE = 1


def test_numbers_and_strings_of_other_types_become_plain():
    frozen = freeze([np.int8(1), np.float32(0.5), np.bool_(False), Word.A, Number.ONE])
    assert [type(item) for item in frozen] == [int, float, bool, str, int]
    assert frozen == (1, 0.5, False, "a", 1)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [0, {1, 2}]}, r"config\.a\[1\] is a set"),
        ({"a": b"x"}, r"config\.a is a bytes"),
        ({"a": bytearray(b"x")}, r"config\.a is a bytearray"),
        ({"a": {"b": len}}, r"config\.a\.b is a callable"),
        ({"a": (x for x in ())}, r"config\.a is a generator"),
        ({"a": np.zeros(2)}, r"config\.a is a ndarray"),
        ({"a": object()}, r"config\.a is a object"),
        ({"a": 1j}, r"config\.a is a complex"),
        ({"a": float("nan")}, r"config\.a must be finite, not nan"),
        ({"a": [np.float32("inf")]}, r"config\.a\[0\] must be finite"),
        ({"a": {1: 2}}, r"config\.a has the key 1; keys must be strings"),
        ({None: 2}, "config has the key None"),
    ],
)
def test_everything_else_is_refused_with_its_path(value, message):
    with pytest.raises(ValueError, match=message):
        freeze_mapping(value, "config")


def test_a_value_that_holds_itself_is_refused():
    loop: list = []
    loop.append({"x": loop})
    with pytest.raises(ValueError, match=r"value\[0\]\.x holds itself"):
        freeze(loop)
    shared = [1]
    assert freeze([shared, shared]) == ((1,), (1,))


def test_a_value_nested_beyond_reason_is_refused():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="nested too deeply"):
        freeze(deep)


def test_frozen_mappings_and_lists_cannot_change():
    mapping, listing = FrozenDict({"a": 1}), FrozenList([1, 2])
    for change in (
        lambda: mapping.__setitem__("a", 2),
        lambda: setattr(mapping, "x", 1),
        lambda: listing.append(3),
        lambda: listing.__setitem__(0, 3),
        lambda: listing.__delitem__(0),
        lambda: listing.__iadd__([3]),
        lambda: listing.__imul__(2),
        lambda: listing.sort(),
        lambda: listing.clear(),
    ):
        with pytest.raises((TypeError, AttributeError)):
            change()
    assert mapping == {"a": 1}
    assert listing == [1, 2]
    assert repr(mapping) == "{'a': 1}"
    assert str(listing) == "[1, 2]"
    assert type(listing.copy()) is list
    assert mapping | {"b": 2} == {"a": 1, "b": 2}
    assert {"a": 0, "b": 2} | mapping == {"a": 1, "b": 2}
    assert type(mapping.copy()) is dict


@pytest.mark.parametrize("value", [FrozenDict({"a": (1, 2)}), FrozenList([1, (2,)])])
def test_frozen_values_copy_pickle_and_hash(value):
    for other in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        assert other == value
        assert type(other) is type(value)
        assert hash(other) == hash(value)
