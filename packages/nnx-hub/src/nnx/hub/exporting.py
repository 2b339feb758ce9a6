"""Models in the files of other runtimes: written, run back, compared, and only then published."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from nnx.errors import NNxError
from nnx.models import check_exportable
from nnx.nn_model import NNModel
from nnx.params import RuntimeModule
from nnx.plugins import siblings
from nnx.seeding import isolated_rng
from nnx.utils.files import atomic_write
from nnx.utils.modes import eval_mode
from nnx.utils.tensor_file import as_stored, chunks

RECORD = "nnx.export"
TOLERANCE = 1e-4
_LEAST_DYNAMO_OPSET = 18
_BATCH = "batch"
_BATCHES = (1, 2, 3, 7)


class ExportError(RuntimeError, NNxError):
    """An export that does not give what the model gives; nothing of it is left."""


def to_onnx(
    model: Any,
    path: str | os.PathLike[str],
    *,
    example_input: Any,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_batch: bool = True,
    opset_version: int = 17,
    dynamo: bool = False,
    tolerance: float = TOLERANCE,
) -> str:
    """Write the network as ONNX, run it back with onnxruntime, and return ``path``.

    ``example_input`` is a tensor, an array or a tuple of positional inputs. With
    ``dynamic_batch`` the first axis of each is free, and batches of 1, 2, 3 and 7 rows are
    compared; else the example itself. A net may say in ``export_axes`` which axes are free
    instead, by name for each input: ``({0: "nodes"}, {1: "edges"})``. ``dynamo`` chooses torch's newer exporter, whose
    least opset is 18. The file's metadata ``nnx.export`` record the largest difference,
    the tolerance and the versions.

    Raises ``ImportError`` without the extra, ``TypeError`` for keyword inputs or a net
    that says it cannot be exported, ``ExportError`` beyond ``tolerance``.
    """
    net, inputs = _checked(model, example_input, "to_onnx")
    onnx = _require("onnx", "to_onnx")
    runtime = _require("onnxruntime", "to_onnx")
    if dynamo:
        _require("onnxscript", "to_onnx(dynamo=True)")
    names = _names(input_names, len(inputs), "input")
    axes = _axes(net, len(inputs), dynamic_batch)
    example = _two_rows(inputs, axes)
    opset = max(opset_version, _LEAST_DYNAMO_OPSET) if dynamo else opset_version
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "model.onnx")
        with _frozen(net), _quiet():
            plain = net(*example)
            outputs = _names(output_names, len(_tuple(plain)), "output")
            options: dict[str, Any] = {}
            if dynamic_batch and dynamo:
                options["dynamic_shapes"] = _dims(axes)
            elif dynamic_batch:
                free = axes[0].get(0, "rows")
                options["dynamic_axes"] = {
                    **dict(zip(names, axes)), **{name: {0: free} for name in outputs}
                }  # fmt: skip
            with _named(net, "torch.onnx"):
                torch.onnx.export(
                    net if dynamo else _positional(net), example, file, input_names=names,
                    output_names=outputs, opset_version=opset, dynamo=dynamo, **options,
                )  # fmt: skip
        graph = onnx.load(file)  # with whatever lies beside it
        for node in [*graph.graph.node, *(n for f in graph.functions for n in f.node)]:
            if hasattr(node, "metadata_props"):  # tracebacks, with folders of this machine
                del node.metadata_props[:]
        onnx.checker.check_model(graph)
        session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])

        def run(arguments: tuple[torch.Tensor, ...]) -> Any:
            given = {n: a.cpu().numpy() for n, a in zip(names, arguments)}
            return [torch.from_numpy(o) for o in session.run(None, given)]

        record = _compare(net, inputs, axes, run, tolerance, "ONNX")
        record.update(opset=opset, onnx=onnx.__version__, onnxruntime=runtime.__version__)
        onnx.helper.set_model_props(graph, {RECORD: json.dumps(record)})
        _publish(path, graph.SerializeToString())
    return os.fspath(path)


def to_pt2(
    model: Any,
    path: str | os.PathLike[str],
    *,
    example_input: Any,
    dynamic_batch: bool = True,
    tolerance: float = TOLERANCE,
) -> str:
    """Write the network with ``torch.export`` (``.pt2``), run it back, and return ``path``.

    Arguments and errors as for :func:`to_onnx`; the record is the extra file ``nnx.export``.
    """
    net, inputs = _checked(model, example_input, "export")
    axes = _axes(net, len(inputs), dynamic_batch)
    example = _two_rows(inputs, axes)
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "model.pt2")
        with _frozen(net), _quiet(), _named(net, "torch.export"):
            program = torch.export.export(
                net, example, dynamic_shapes=_dims(axes) if dynamic_batch else None
            )

        def run(arguments: tuple[torch.Tensor, ...]) -> Any:
            return _tuple(back(*arguments))

        program.example_inputs = None  # rows of the caller's, which would be saved as a pickle
        for module in program.graph_module.modules():
            for node in getattr(getattr(module, "graph", None), "nodes", ()):
                node.meta.pop("stack_trace", None)  # it names folders of this machine
        with _quiet():
            torch.export.save(program, file)
            back = torch.export.load(file).module()
            record = _compare(net, inputs, axes, run, tolerance, "torch.export")
            torch.export.save(program, file, extra_files={RECORD: json.dumps(record)})
        with open(file, "rb") as stream, atomic_write(path, "wb") as target:
            shutil.copyfileobj(stream, target)
    return os.fspath(path)


def to_safetensors(model: Any, path: str | os.PathLike[str]) -> str:
    """Write the net's tensors under their own names, read them back, and return ``path``.

    The metadata ``nnx.export`` hold what describes the net, for whoever builds it.
    """
    net = model.net if isinstance(model, NNModel) else model
    tensors = {n: as_stored(f"the net's state {n!r}", v) for n, v in net.state_dict().items()}
    about: dict[str, Any] = {"torch": torch.__version__, "max_difference": 0.0, "tolerance": 0.0}
    if isinstance(model, NNModel) and not isinstance(model.params.net, RuntimeModule):
        from nnx.hub.layout import config_of

        about["config"] = config_of(model)
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "model.safetensors")
        with open(file, "wb") as stream:
            stream.writelines(chunks(tensors, {RECORD: json.dumps(about), "format": "pt"}))
        for name, found in load_file(file).items():
            same = found.reshape(-1).view(torch.uint8), tensors[name].reshape(-1).view(torch.uint8)
            if not torch.equal(*same):
                raise ExportError(f"the tensor {name!r} did not come back as it was written")
        with open(file, "rb") as stream, atomic_write(path, "wb") as target:
            shutil.copyfileobj(stream, target)
    return os.fspath(path)


# -- parts ---------------------------------------------------------------------------------


def _checked(model: Any, example: Any, what: str) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    import numpy as np

    net = model.net if isinstance(model, NNModel) else model
    check_exportable(net)
    for name, module in net.named_modules():
        for leaf, value in [
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ]:
            if type(value.data) is not torch.Tensor:
                raise TypeError(
                    f"{name + '.' if name else ''}{leaf} is a {type(value.data).__name__}: a "
                    f"quantized net has no such export; keep it with export_state_dict()"
                )
    if isinstance(example, Mapping):
        raise TypeError(
            f"{what} takes positional inputs; wrap a module with keyword inputs in one with a "
            "positional forward"
        )
    values = tuple(example) if isinstance(example, (tuple, list)) else (example,)
    device = next((p.device for p in net.parameters()), torch.device("cpu"))
    tensors = []
    for index, value in enumerate(values):
        tensor = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        if not isinstance(tensor, torch.Tensor) or tensor.ndim == 0 or not len(tensor):
            raise TypeError(
                f"example_input[{index}] must be a tensor or an array with at least one row, not "
                f"{type(value).__name__}"
            )
        tensors.append(tensor.to(device))
    return net, tuple(tensors)


def _require(name: str, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        line = siblings.install_line("nnx-hub", "onnx")
        raise ImportError(f"{what} needs {name}; install it with: {line}") from error


def _names(given: Sequence[str] | None, count: int, word: str) -> list[str]:
    if given is None:
        return [word] if count == 1 else [f"{word}_{i}" for i in range(count)]
    if len(given) != count or len(set(given)) != count:
        raise ValueError(f"{word}_names must be {count} distinct names, not {list(given)}")
    return list(given)


def _tuple(value: Any) -> tuple[Any, ...]:
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if not all(isinstance(v, torch.Tensor) for v in values):
        raise TypeError("the net returns something other than tensors, which cannot be exported")
    return values


Axes = Sequence[Mapping[int, str]]


def _axes(net: torch.nn.Module, count: int, dynamic: bool) -> Axes:
    """Which axes of each input are free, by name."""
    if not dynamic:
        return ({},) * count
    own = getattr(net, "export_axes", None)
    return ({0: _BATCH},) * count if own is None or len(own) != count else tuple(own)


def _dims(axes: Axes) -> tuple[dict[int, Any], ...]:
    dims = {name: torch.export.Dim(name) for free in axes for name in free.values()}
    return tuple({axis: dims[name] for axis, name in free.items()} for free in axes)


def _resized(inputs: tuple[Any, ...], axes: Axes, lengths: Mapping[str, int]) -> tuple[Any, ...]:
    """The inputs with their free axes repeated or cut to the lengths."""
    made = []
    for tensor, free in zip(inputs, axes):
        for axis, name in free.items():
            if name in lengths:
                size = tensor.shape[axis]
                rows = torch.arange(lengths[name], device=tensor.device) % size
                tensor = tensor.index_select(axis, rows)
        made.append(tensor.contiguous())
    return tuple(made)


def _lengths(inputs: tuple[Any, ...], axes: Axes) -> list[dict[str, int]]:
    """What to compare: batches of 1 to 7 rows. Other axes only grow, for one may count another."""
    own = {
        name: tensor.shape[axis]
        for tensor, free in zip(inputs, axes)
        for axis, name in free.items()
    }
    if not own:
        return [{}]
    return [
        {name: rows if name == _BATCH else size + rows - 1 for name, size in own.items()}
        for rows in _BATCHES
    ]


def _two_rows(inputs: tuple[Any, ...], axes: Axes) -> tuple[Any, ...]:
    """An example of at least two rows: exporters take a batch of one for a constant."""
    short = any(
        tensor.shape[axis] < 2
        for tensor, free in zip(inputs, axes)
        for axis, name in free.items()
        if name == _BATCH
    )
    return _resized(inputs, axes, {_BATCH: 2}) if short else inputs


def _positional(net: torch.nn.Module) -> torch.nn.Module:
    """The tracer hands every parameter of a forward over by position, keyword-only ones too."""
    kinds = {parameter.kind for parameter in inspect.signature(net.forward).parameters.values()}
    return _Positional(net) if inspect.Parameter.KEYWORD_ONLY in kinds else net


class _Positional(torch.nn.Module):
    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.net(*inputs)


@contextlib.contextmanager
def _named(net: torch.nn.Module, what: str) -> Iterator[None]:
    """What an exporter cannot write is said by the net's name."""
    try:
        yield
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), repr(error))
        raise ExportError(
            f"{what} cannot write {type(net).__name__} ({type(error).__name__}: {reason[:300]}); "
            "nothing was written. Its weights alone go with export(path, 'safetensors')"
        ) from error


@contextlib.contextmanager
def _frozen(net: torch.nn.Module) -> Iterator[None]:
    with eval_mode(net), torch.no_grad(), isolated_rng():
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What exporters print and warn about their own insides."""
    with (
        warnings.catch_warnings(),
        open(os.devnull, "w") as sink,
        contextlib.redirect_stdout(sink),
    ):
        warnings.simplefilter("ignore")
        yield


def _compare(
    net: torch.nn.Module,
    inputs: tuple[Any, ...],
    axes: Axes,
    run: Callable[[tuple[Any, ...]], Any],
    tolerance: float,
    what: str,
) -> dict[str, Any]:
    """The largest difference of several batches; ``ExportError`` beyond the tolerance."""
    lengths = _lengths(inputs, axes)
    batches = [_resized(inputs, axes, each) for each in lengths]
    worst = 0.0
    for batch in batches:
        with _frozen(net):
            wanted = _tuple(net(*batch))
        try:
            found = run(batch)
        except Exception as error:
            raise ExportError(
                f"the {what} export does not run on a batch of {len(batch[0])}: {error}"
            ) from error
        for a, b in zip(wanted, found, strict=True):
            if a.shape != b.shape:
                raise ExportError(
                    f"the {what} export gives {tuple(b.shape)} for a batch of {len(batch[0])}, the "
                    f"model {tuple(a.shape)}"
                )
            gap = (a.detach().cpu().double() - b.detach().cpu().double()).abs()
            worst = max(worst, float(gap.max()) if gap.numel() else 0.0)
    if not worst <= tolerance:
        raise ExportError(
            f"the {what} export differs from the model by {worst:.3g}, more than {tolerance:g}; "
            "nothing was written"
        )
    return {
        "max_difference": worst, "tolerance": tolerance, "torch": torch.__version__,
        "batches": [each.get(_BATCH, len(inputs[0])) if each.keys() <= {_BATCH} else each for each in lengths],
    }  # fmt: skip


def _publish(path: str | os.PathLike[str], data: bytes) -> None:
    with atomic_write(path, "wb") as stream:
        stream.write(data)
