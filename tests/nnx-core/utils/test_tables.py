"""Tables and trees of nested dictionaries, as a person reads them."""

from __future__ import annotations

import io

import nnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nnx.utils import Utils, flatten_dict, print_table, print_tree


def printed(function, *arguments, **options) -> str:  # type: ignore[no-untyped-def]
    stream = io.StringIO()
    function(*arguments, file=stream, **options)
    return stream.getvalue()


def test_flatten_dict_joins_the_path_of_each_leaf() -> None:
    assert flatten_dict({"a": 1, "b": {"c": 2, "d": {"e": [3]}}}) == {
        "a": 1, "b.c": 2, "b.d.e": [3],
    }  # fmt: skip
    assert flatten_dict({"b": {"c": 2}}, parent_key="run", sep="/") == {"run/b/c": 2}
    assert flatten_dict({1: {2: 3}}) == {"1.2": 3}
    assert flatten_dict({"empty": {}}) == {"empty": {}}
    assert flatten_dict({}) == {}


def test_flatten_dict_refuses_two_paths_of_one_name() -> None:
    with pytest.raises(ValueError, match=r"two entries flatten to 'a\.b'"):
        flatten_dict({"a": {"b": 1}, "a.b": 2})


trees = st.recursive(
    st.integers(),
    lambda inner: st.dictionaries(st.text("xyz", min_size=1), inner, min_size=1),
    max_leaves=20,
)


@given(st.dictionaries(st.text("xyz", min_size=1), trees))
def test_every_leaf_is_found_along_its_flattened_key(tree: dict) -> None:
    flat = flatten_dict(tree)
    for key, leaf in flat.items():
        value = tree
        for part in key.split("."):
            value = value[part]
        assert value == leaf


def test_print_table_draws_two_columns() -> None:
    assert printed(print_table, {"epochs": 3, "optim": {"lr": 0.1234567891}}, title="Run") == (
        "Run\n"
        "+----------+----------+\n"
        "| Key      | Value    |\n"
        "+----------+----------+\n"
        "| epochs   | 3        |\n"
        "| optim.lr | 0.123457 |\n"
        "+----------+----------+\n"
    )


def test_print_table_without_a_header_and_of_nothing() -> None:
    assert printed(print_table, {"a": 1}, header=False) == "+---+---+\n| a | 1 |\n+---+---+\n"
    assert printed(print_table, {}) == ("+-----+-------+\n| Key | Value |\n+-----+-------+\n")


def test_print_table_keeps_the_border_straight_for_wide_and_broken_lines() -> None:
    lines = printed(print_table, {"模型": "a\nbc", "naïve": "é"}).splitlines()
    assert lines[3:6] == ["| 模型  | a     |", "|       | bc    |", "| naïve | é     |"]


def test_print_tree_indents_what_is_nested() -> None:
    tree = {"net": {"dims": [4, 2], "kind": "FEED_FWD"}, "optims": [{"lr": 0.1}, {}], "seed": None}
    assert printed(print_tree, tree) == (
        "net:\n"
        "  dims:\n"
        "    - 4\n"
        "    - 2\n"
        "  kind: FEED_FWD\n"
        "optims:\n"
        "  -\n"
        "    lr: 0.1\n"
        "  - {}\n"
        "seed: None\n"
    )
    assert printed(print_tree, {"a": 1}, level=2) == "    a: 1\n"


def test_tables_and_trees_go_to_stdout_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    print_tree({"a": 1})
    print_table({"a": 1})
    out = capsys.readouterr().out
    assert out.startswith("a: 1\n+-----+")


def test_utils_is_the_same_functions_under_the_older_name() -> None:
    assert Utils.flatten_dict is flatten_dict
    assert Utils.print_table is print_table
    assert Utils.print_tree is print_tree
    assert nnx.Utils is Utils
