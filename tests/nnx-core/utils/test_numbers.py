"""NumPy registers time spans as integers; a configuration does not take them for numbers."""

from __future__ import annotations

import numpy as np
import pytest
from nnx.params import ModelSpec, NNParams, NNTrainParams

SPAN = np.timedelta64(3, "ns")  # int() would give 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: NNTrainParams(n_epochs=SPAN),
        lambda: NNParams(input_dim=1, output_dim=1, dropout_prob=SPAN),
        lambda: ModelSpec("a", 1, {"width": SPAN}),
        lambda: NNTrainParams(n_epochs=np.timedelta64(3, "D")),
    ],
)
def test_a_time_span_is_no_number(make):
    with pytest.raises(ValueError, match=r"n_epochs|dropout_prob|config.width"):
        make()
