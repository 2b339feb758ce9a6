"""A model as an ONNX graph, to be looked at in Netron."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nnx.utils.files import atomic_write
from nnx.viz._common import borrowed, require, to_device_of, unwrap

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import nn


def netron_export(
    model: nn.Module | Any,
    path: str,
    example_input: torch.Tensor | tuple | np.ndarray,
    *,
    launch: bool = False,
    opset_version: int = 17,
    dynamic_batch: bool = True,
) -> str:
    """Write the network as ONNX to ``path``, and open it in Netron when asked.

    ``example_input`` is a tensor, an array, or a tuple of positional inputs;
    the first dimension of each is the batch, free in the graph when
    ``dynamic_batch``. Returns ``path``, written atomically.

    Raises ``ImportError`` with the install line when the ``onnx`` extra (or,
    with ``launch``, the ``netron`` extra) is missing, before anything is
    written, and ``TypeError`` for a mapping of keyword inputs.
    """
    import torch
    from nnx.models import check_exportable

    require("onnx", "nnx.viz.netron_export", extra="onnx")
    netron = require("netron", "netron_export(launch=True)", extra="netron") if launch else None
    net = unwrap(model)
    check_exportable(net)
    inputs = to_device_of(net, _positional(example_input))
    names = [f"input_{i}" for i in range(len(inputs))]
    axes = {n: {0: "batch"} for n in [*names, "output"]} if dynamic_batch else None
    with tempfile.TemporaryDirectory() as folder:
        graph = Path(folder) / "graph.onnx"
        with borrowed(net), torch.no_grad(), warnings.catch_warnings():
            # The exporter that traces is the one that needs no further library.
            warnings.simplefilter("ignore", DeprecationWarning)
            torch.onnx.export(
                net,
                inputs,
                graph,
                input_names=names,
                output_names=["output"],
                dynamic_axes=axes,
                opset_version=opset_version,
                dynamo=False,
            )
        with atomic_write(path, "wb") as stream, graph.open("rb") as written:
            shutil.copyfileobj(written, stream)
    if netron is not None:
        netron.start(os.fspath(path))
    return path


def _positional(example: Any) -> tuple[Any, ...]:
    import numpy as np
    import torch

    if isinstance(example, dict):
        raise TypeError(
            "netron_export takes positional inputs; wrap a module with keyword inputs in one "
            "with a positional forward"
        )
    values = example if isinstance(example, tuple) else (example,)
    return tuple(torch.from_numpy(v) if isinstance(v, np.ndarray) else v for v in values)
