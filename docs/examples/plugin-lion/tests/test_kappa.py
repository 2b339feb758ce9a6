"""Cohen's kappa: a worked example, and counts that add up."""

from __future__ import annotations

import numpy as np
import pytest
from acme_lion.kappa import Kappa


def test_a_worked_example():
    # 20 agree on "yes", 15 on "no" of 50: observed 0.7, expected 0.5, kappa 0.4.
    target = np.repeat([1, 1, 0, 0], [20, 5, 10, 15])
    prediction = np.repeat([1, 0, 1, 0], [20, 5, 10, 15])
    kappa = Kappa()
    kappa.update(target, prediction)
    assert kappa.result() == pytest.approx(0.4)


def test_parts_of_any_width_add_up_to_the_whole():
    generator = np.random.default_rng(0)
    target, prediction = generator.integers(0, 5, (2, 200))
    whole, left, right = Kappa(), Kappa(), Kappa()
    whole.update(target, prediction)
    left.update(target[:1], prediction[:1])
    right.update(target[1:], prediction[1:])
    left.merge(right)
    assert left.result() == whole.result()
    restored = Kappa()
    restored.load_state(left.state())
    assert restored.result() == whole.result()


def test_there_is_no_value_where_chance_explains_everything():
    kappa = Kappa()
    assert kappa.result() is None
    kappa.update(np.zeros(3), np.zeros(3))
    assert kappa.result() is None
