"""The contrastive loss beside another library's; run where that is installed (group "peers")."""

from __future__ import annotations

import pytest
import torch
from nnx.objectives.contrastive import nt_xent


@pytest.mark.parametrize("temperature", [0.05, 0.5])
def test_nt_xent_is_that_of_pytorch_metric_learning(temperature):
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(7, 5, generator=generator) for _ in range(2))
    theirs = losses.NTXentLoss(temperature=temperature)
    labels = torch.arange(7).repeat(2)
    wanted = float(theirs(torch.cat((a, b)), labels))
    assert float(nt_xent(a, b, temperature)) == pytest.approx(wanted, rel=1e-5)
