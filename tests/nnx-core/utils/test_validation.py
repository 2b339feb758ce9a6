"""The shared checks: what they return and how they refuse."""

from __future__ import annotations

from fractions import Fraction

import nnx
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


@pytest.mark.parametrize(
    ("refused", "wrong_type"),
    [
        (lambda: check.real("X", "f", "0.1"), True),
        (lambda: check.real("X", "f", True), True),
        (lambda: check.real("X", "f", float("nan")), False),
        (lambda: check.real("X", "f", -1, at_least=0), False),
        (lambda: check.count("X", "n", 2.0), True),
        (lambda: check.count("X", "n", 0), False),
        (lambda: check.integer("X", "n", "1"), True),
        (lambda: check.flag("X", "f", 1), True),
        (lambda: check.text("X", "t", None), True),
        (lambda: check.text("X", "t", ""), False),
        (lambda: check.choice("X", "c", 3, ("a", "b")), True),
        (lambda: check.choice("X", "c", "z", ("a", "b")), False),
        (lambda: check.instance("X", "i", 3, str), True),
        (lambda: nnx.NNModel(None, "no params"), True),
    ],
)
def test_a_wrong_type_is_a_type_error_and_a_refusal_like_every_other(refused, wrong_type):
    with pytest.raises(ValueError) as refusal:
        refused()
    assert isinstance(refusal.value, TypeError) is wrong_type


@pytest.mark.parametrize("id", ["bad id", "bad\nid", " bad", "bad\t", "", "\x7f", "a\u2028b"])
def test_an_id_is_one_word(id):
    makers = (
        lambda: nnx.MetricSpec(id),
        lambda: nnx.ModelSpec(id, 1),
        lambda: nnx.OptimizerFactorySpec(id, 1),
        lambda: nnx.NNCheckpointTransform(name=id),
        lambda: nnx.register_metric(id, 1, dict, input="labels", mode="min"),
        lambda: nnx.register_model_factory(id, 1, dict),
    )
    for make in makers:
        with pytest.raises(
            ValueError, match=r"must be (an id without spaces|one word|a non-empty string)"
        ):
            make()
    assert str(nnx.MetricSpec("team/kappa.v2")) == "team/kappa.v2@v1"


@pytest.mark.parametrize("name", ["two\nlines", " ends", "ends ", "\t"])
def test_a_name_is_one_line(name):
    for make in (lambda: nnx.MetricSpec("nll", name=name), lambda: nnx.ComponentSpec(name)):
        with pytest.raises(
            ValueError, match="(without line breaks or spaces at its ends|a non-empty string)"
        ):
            make()
    assert nnx.MetricSpec("nll", name="held-out loss").label == "held-out loss"


@pytest.mark.parametrize("salt", ["", " ", "\n"])
def test_a_salt_is_not_blank(salt):
    with pytest.raises(ValueError, match="salt must be a"):
        check.salt("train()", "salt", salt)
    assert check.salt("train()", "salt", "replicate 2") == "replicate 2"


def test_a_registered_spec_reads_as_its_id_and_version():
    for spec in (nnx.ModelSpec("acme.net", 3), nnx.OptimizerFactorySpec("acme.net", 3),
                 nnx.MetricSpec("acme.net", 3)):  # fmt: skip
        assert str(spec) == f"{spec}" == "acme.net@v3"
        assert repr(spec).startswith(type(spec).__name__)
