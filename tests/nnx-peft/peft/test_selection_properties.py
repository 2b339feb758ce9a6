"""Over arbitrary module trees, selection is fnmatch over every path of every layer."""

from __future__ import annotations

import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nnx.peft import LoRALinear, apply_lora_to
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore:.*matches no Linear", "ignore:.*match no Linear")

NAMES = st.sampled_from(["a", "b", "base", "lora_A", "0"])
PATTERNS = st.sampled_from(["*", "a", "*.a", "a.*", "*base", "?", "b.[0a]", "lora_*", "*.*.*"])


def build(tree):
    if tree is None:
        return nn.Linear(2, 2)
    module = nn.Module()
    for name, child in tree.items():
        module.add_module(name, build(child))
    return module


trees = st.recursive(
    st.none(), lambda child: st.dictionaries(NAMES, child, min_size=1, max_size=3), max_leaves=8
)


@given(
    st.dictionaries(NAMES, trees, min_size=1, max_size=3),
    st.lists(PATTERNS, min_size=1, max_size=3),
)
def test_exactly_the_matching_linears_are_wrapped(tree, patterns):
    module = build(tree)
    linears = {n: m for n, m in module.named_modules() if isinstance(m, nn.Linear)}
    chosen = {n for n in linears if any(fnmatch.fnmatchcase(n, p) for p in patterns)}
    assert apply_lora_to(module, *patterns, r=1) == len(chosen)
    for name, linear in linears.items():
        found = module.get_submodule(name)
        if name in chosen:
            assert isinstance(found, LoRALinear)
            assert found.base is linear
        else:
            assert found is linear
    assert apply_lora_to(module, *patterns, r=1) == 0


@given(st.dictionaries(NAMES, trees, min_size=1, max_size=3), PATTERNS)
def test_a_shared_container_is_wrapped_once_by_any_of_its_paths(tree, pattern):
    module, block = nn.Module(), build(tree)
    module.first, module.second = block, block
    paths = {}
    for name, m in module.named_modules(remove_duplicate=False):
        if isinstance(m, nn.Linear):
            paths.setdefault(m, []).append(name)
    chosen = [
        m for m, names in paths.items() if any(fnmatch.fnmatchcase(n, pattern) for n in names)
    ]
    assert apply_lora_to(module, pattern, r=1) == len(chosen)
    wrapped = {m.base for m in module.modules() if isinstance(m, LoRALinear)}
    assert wrapped == set(chosen)
