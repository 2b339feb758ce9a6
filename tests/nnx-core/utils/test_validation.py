"""The shared checks: what they return and how they refuse."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from nnx.utils import validation as check


def test_the_message_names_owner_field_value_and_domain():
    with pytest.raises(ValueError) as refusal:
        check.real("LoRALinear", "alpha", float("nan"), above=0)
    assert str(refusal.value) == "LoRALinear.alpha must be a finite real number > 0, not nan"
    with pytest.raises(ValueError) as refusal:
        check.count("EarlyStopping", "patience", True, at_least=0)
    assert str(refusal.value) == "EarlyStopping.patience must be an integer >= 0, not True"


def test_a_bound_belongs_to_its_interval_or_not():
    assert check.real("X", "f", 0, at_least=0) == 0
    assert check.real("X", "f", 1, at_most=1) == 1
    for bound in ({"above": 0}, {"below": 0}):
        with pytest.raises(ValueError):
            check.real("X", "f", 0, **bound)


@pytest.mark.parametrize("least", [0, 1, 2])
def test_a_count_starts_where_its_field_says(least):
    assert check.count("X", "n", least, at_least=least) == least
    with pytest.raises(ValueError, match=f"an integer >= {least}"):
        check.count("X", "n", least - 1, at_least=least)


def test_a_choice_offers_the_closest_words():
    assert check.choice("X", "mode", "min", ("min", "max")) == "min"
    with pytest.raises(ValueError) as refusal:
        check.choice("X", "mode", "mni", ("min", "max"))
    assert str(refusal.value) == "X.mode must be one of min, max, not 'mni'; did you mean 'min'?"
    with pytest.raises(ValueError, match="one of min, max, not"):
        check.choice("X", "mode", ["min"], ("min", "max"))


def test_a_real_beyond_the_floats_is_not_finite():
    for value in (10**400, Fraction(10**400), -(10**400)):
        with pytest.raises(ValueError, match="finite"):
            check.real("X", "f", value)
    assert check.real("X", "f", 10**300) == 10**300


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "value",
    [Unprintable(), "x" * 10_000, 10**5000, list(range(10**5))],
    ids=["unprintable", "long text", "huge int", "long list"],
)
def test_a_refused_value_never_drowns_the_message(value):
    with pytest.raises(ValueError, match=r"X\.f must be a finite real number") as refusal:
        check.real("X", "f", value)
    assert len(str(refusal.value)) < 300


def test_flags_texts_and_instances():
    assert check.flag("X", "f", False) is False
    assert check.flag("X", "f", np.bool_(True)) is True
    assert check.text("X", "f", "a") == "a"
    assert check.integer("X", "f", -3) == -3
    for call in (
        lambda: check.flag("X", "f", 0),
        lambda: check.flag("X", "f", None),
        lambda: check.text("X", "f", ""),
        lambda: check.text("X", "f", b"a"),
        lambda: check.integer("X", "f", 1.0),
        lambda: check.instance("X", "f", 1, (str, bytes)),
    ):
        with pytest.raises(ValueError, match=r"X\.f must be"):
            call()
