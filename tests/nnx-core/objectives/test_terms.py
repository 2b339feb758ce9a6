from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from nnx.objectives import LossTerm, Objective, ObjectiveResult, UpdateEvent
from torch import nn


def test_a_term_is_a_sum_over_samples_and_what_it_is_a_mean_over():
    term = LossTerm("t", torch.tensor(8.0), 2, weight=0.5)
    assert term.value == 4.0
    assert LossTerm("t", torch.tensor(8.0), reduction="sum").value == 8.0
    assert LossTerm("t", torch.tensor(math.nan), 0).value is None
    assert LossTerm("t", torch.tensor([8.0]), np.int64(4)).value == 2.0


def test_a_result_combines_its_terms_by_weight():
    result = ObjectiveResult(
        [LossTerm("a", torch.tensor(8.0), 2, weight=0.5),
         LossTerm("b", torch.tensor(3.0), reduction="sum", weight=2.0),
         LossTerm("masked", torch.tensor(5.0), 0),
         LossTerm("off", torch.tensor(math.inf), 1, weight=0.0)]
    )  # fmt: skip
    assert result.loss() == 0.5 * 4 + 2 * 3
    assert ObjectiveResult([LossTerm("masked", torch.tensor(5.0), 0)]).loss() is None
    assert ObjectiveResult([]).loss() is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": ""}, r"LossTerm\.name"),
        ({"numerator": 3.0}, r"LossTerm\('t'\)\.numerator must be a tensor"),
        ({"numerator": torch.zeros(2)}, r"numerator must be a floating scalar.*shape \(2,\)"),
        ({"numerator": torch.tensor(1)}, "torch.int64"),
        ({"denominator": None}, 'reduction="mean" needs a denominator'),
        ({"denominator": -1}, r"LossTerm\('t'\)\.denominator"),
        ({"denominator": math.nan}, r"LossTerm\('t'\)\.denominator"),
        ({"denominator": True}, r"LossTerm\('t'\)\.denominator"),
        ({"denominator": torch.tensor(2)}, r"LossTerm\('t'\)\.denominator"),
        ({"reduction": "sum"}, 'reduction="sum" takes no denominator'),
        ({"reduction": "none"}, r"LossTerm\('t'\)\.reduction must be one of mean, sum"),
        ({"weight": math.inf}, r"LossTerm\('t'\)\.weight"),
    ],
)
def test_a_term_refuses_what_it_cannot_mean(arguments, message):
    valid = {"name": "t", "numerator": torch.tensor(1.0), "denominator": 1}
    with pytest.raises(ValueError, match=message):
        LossTerm(**{**valid, **arguments})


def test_a_result_refuses_other_objects_and_two_terms_of_one_name():
    with pytest.raises(TypeError, match="must hold LossTerm objects, not float"):
        ObjectiveResult([1.0])
    term = LossTerm("t", torch.tensor(1.0), 1)
    with pytest.raises(ValueError, match="two terms of one name"):
        ObjectiveResult([term, LossTerm("t", torch.tensor(1.0), 1)])


def test_an_update_event_is_read_only():
    event = UpdateEvent("default", 0, 1, 2, 3, {"t": 1.0}, 1.0)
    with pytest.raises(TypeError):
        event.losses["t"] = 2.0
    with pytest.raises(AttributeError):
        event.loss = 2.0


def test_an_objective_declares_its_policy():
    assert Objective().nonfinite == "fail"
    assert Objective(nonfinite="skip").nonfinite == "skip"
    with pytest.raises(ValueError, match=r"Objective\.nonfinite must be one of fail, skip"):
        Objective(nonfinite="warn")
    with pytest.raises(NotImplementedError, match="must define __call__"):
        Objective()(None)
    assert Objective().after_update(()) is None
    assert Objective().check_run(nn.Linear(1, 1), optimizers={}, callbacks=()) is None


def test_the_supervised_objective_is_built_by_name():
    from nnx.objectives import SupervisedObjective, build_objective

    objective = build_objective("supervised", config={"nonfinite": "skip"})
    assert isinstance(objective, SupervisedObjective)
    assert objective.nonfinite == "skip"
    assert build_objective("supervised").nonfinite == "fail"
    with pytest.raises(TypeError, match="unexpected keyword argument 'alpha'"):
        build_objective("supervised", config={"alpha": 1})
