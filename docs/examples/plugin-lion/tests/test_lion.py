"""Lion, against Algorithm 2 of the paper written out."""

from __future__ import annotations

import pytest
import torch
from acme_lion.optim import Lion, build


def test_steps_are_those_of_the_paper():
    torch.manual_seed(0)
    start, target = torch.randn(5, dtype=torch.double), torch.randn(5, dtype=torch.double)
    lr, beta1, beta2, decay = 0.01, 0.9, 0.99, 0.1
    parameter = torch.nn.Parameter(start.clone())
    optimizer = Lion([parameter], lr=lr, betas=(beta1, beta2), weight_decay=decay)
    theta, momentum = start.clone(), torch.zeros(5, dtype=torch.double)
    for _ in range(20):
        optimizer.zero_grad()
        ((parameter - target) ** 2).sum().backward()
        optimizer.step()
        gradient = 2 * (theta - target)
        update = torch.sign(beta1 * momentum + (1 - beta1) * gradient)
        theta = theta - lr * (update + decay * theta)
        momentum = beta2 * momentum + (1 - beta2) * gradient
        torch.testing.assert_close(parameter.detach(), theta)


def test_groups_keep_their_own_rates():
    first, second = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = build(
        [
            {"params": [first], "lr": 0.5, "weight_decay": 0.0},
            {"params": [second], "lr": 0.25, "weight_decay": 1.0},
        ],
        {"betas": (0.8, 0.9)},
    )
    (first + second).sum().backward()
    optimizer.step()
    assert (first.item(), second.item()) == (0.5, 0.75 - 0.25)
    assert [group["betas"] for group in optimizer.param_groups] == [(0.8, 0.9)] * 2


@pytest.mark.parametrize("betas", [(0.9,), (0.9, 1.0), (-0.1, 0.9)])
def test_betas_lie_in_the_unit_interval(betas):
    with pytest.raises(ValueError, match=r"Lion's betas must be two numbers in \[0, 1\)"):
        Lion([torch.nn.Parameter(torch.ones(1))], betas=betas)


def test_an_unknown_config_key_is_refused():
    with pytest.raises(ValueError, match="acme.lion takes 'betas', not 'beta'"):
        build([], {"beta": 0.9})
