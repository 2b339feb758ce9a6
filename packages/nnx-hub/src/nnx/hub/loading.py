"""``NNModel.from_pretrained``: a model from a folder or a repository, from data alone."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from nnx.bundles import is_bundle
from nnx.engine.unbuilt import UnfitConfigurationError, check_describes, giving_weights
from nnx.enums import Devices, Nets
from nnx.hub.layout import CONFIG, WEIGHTS, PretrainedError, read_config
from nnx.params import NNCheckpointTransform, NNModelParams, NNParams, PrecisionPolicy
from nnx.plugins import manager
from nnx.plugins.registry import UnknownIdError
from nnx.records import NNEvaluationDataPoint, NNIterationDataPoint
from nnx.store import NNCheckpoint, names
from nnx.utils.strict import MAX_JSON_BYTES, open_regular, read_regular
from nnx.utils.tensor_file import Header, read_header


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainedInfo:
    """What a model would be; nothing of it was built.

    ``parameters`` counts the numbers in the file of weights, ``size`` its bytes.
    """

    path: str
    config: Mapping[str, Any]
    parameters: int
    size: int
    tensors: Mapping[str, tuple[int, ...]]


def inspect_pretrained(pretrained: str | os.PathLike[str], **download: Any) -> PretrainedInfo:
    """Configuration and sizes of a folder or repository, from ``config.json`` and a header.

    ``download`` as for :func:`from_pretrained`: ``revision``, ``token``, ``cache_dir``, ...
    """
    config_path, weights_path = _locate(pretrained, **_pinned(pretrained, download))
    header = _header(weights_path)
    return PretrainedInfo(
        path=os.path.dirname(config_path),
        config=read_config(config_path),
        parameters=header.parameters,
        size=os.path.getsize(weights_path),
        tensors={name: entry.shape for name, entry in header.tensors.items()},
    )


def from_pretrained(
    cls: type,
    pretrained_model_name_or_path: str | os.PathLike[str],
    *,
    force_download: bool = False,
    resume_download: bool | None = None,
    proxies: Mapping[str, str] | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    revision: str | None = None,
    map_location: Any = "cpu",
    strict: bool = True,
    precision: PrecisionPolicy | None = None,
    exclude_submodules: Sequence[str] = (),
    batch_adapter: Any = None,
    max_parameters: int | None = None,
    **model_kwargs: Any,
) -> Any:
    """The model of a folder or a Hub repository, in evaluation mode.

    ``map_location`` is the device it lives on, ``precision`` replaces the recorded policy,
    ``exclude_submodules`` names top-level submodules that were attached to the net. More
    numbers than ``max_parameters`` are refused before anything is allocated. Loading is
    strict, and only safetensors are read.

    Raises ``PretrainedError`` (a ``ValueError``) for what is no model of NNx,
    ``MissingModelFactoryError`` for a factory that is not registered, ``ValueError`` for
    weights that do not fit, before they are loaded.
    """
    from nnx import NNModel

    assert issubclass(cls, NNModel)
    download: dict[str, Any] = {
        "force_download": force_download, "token": token, "cache_dir": cache_dir,
        "local_files_only": local_files_only, "revision": revision,
    }  # fmt: skip
    download = _pinned(pretrained_model_name_or_path, download)
    config_path, weights_path = _locate(pretrained_model_name_or_path, **download)
    config, header = read_config(config_path), _header(weights_path)
    if max_parameters is not None and header.parameters > max_parameters:
        raise PretrainedError(
            f"{weights_path} holds {header.parameters:,} numbers, more than "
            f"max_parameters={max_parameters:,}"
        )
    params, net_params, transforms = _parts(config, config_path)
    _check_transforms(transforms, config_path)
    _check_net(params, net_params, transforms, header, config_path)
    artifacts = _artifacts(cls.artifact_names, pretrained_model_name_or_path, **download)
    try:
        arguments = {**cls.arguments_of(artifacts), **model_kwargs}
    except ValueError as error:
        raise PretrainedError(f"{os.fspath(pretrained_model_name_or_path)}: {error}") from error
    weights = _weights(weights_path, header, net_params)
    checkpoint = NNCheckpoint(
        net_params=net_params, net_state=weights, model_params=params, idp=_no_record(),
        transforms=transforms,
    )  # fmt: skip
    with giving_weights():
        model = cls.from_checkpoint(
            checkpoint, _device(map_location), precision=precision, batch_adapter=batch_adapter,
            exclude_submodules=tuple(exclude_submodules), **arguments,
        )  # fmt: skip
    model.net.eval()
    return model


def _artifacts(
    names: Sequence[str], pretrained: str | os.PathLike[str], **download: Any
) -> dict[str, bytes]:
    """The class's own files, as far as the folder or repository has them."""
    from huggingface_hub.errors import EntryNotFoundError

    found = {}
    for name in names:
        try:
            path = _file(pretrained, name, **download)
        except (EntryNotFoundError, _MissingError):
            continue
        found[name] = read_regular(path, limit=MAX_JSON_BYTES, error=PretrainedError)
    return found


class _MissingError(PretrainedError):
    """A folder that does not have a file."""


def _locate(pretrained: str | os.PathLike[str], **download: Any) -> tuple[str, str]:
    """The paths of configuration and weights; a repository's are downloaded, these two alone."""
    name = os.fspath(pretrained)
    if os.path.lexists(name) and not os.path.isdir(name):
        raise PretrainedError(f"{name} is a file; from_pretrained loads a folder or a repository")
    if is_bundle(name):
        raise PretrainedError(
            f"{name} is a run bundle: rebuild it with nnx.bundles.reconstruct_bundle"
        )
    return _file(name, CONFIG, **download), _file(name, WEIGHTS, **download)


def _pinned(pretrained: str | os.PathLike[str], download: Mapping[str, Any]) -> dict[str, Any]:
    """The same download of one commit, so that a push in between mixes no files."""
    name = os.fspath(pretrained)
    if os.path.lexists(name):
        return dict(download)
    commit = os.path.basename(os.path.dirname(_downloaded(name, CONFIG, **download)))
    return {**download, "revision": commit}


def _downloaded(name: str, file: str, **download: Any) -> str:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HFValidationError

    try:
        return hf_hub_download(name, file, **download)
    except HFValidationError as error:
        raise PretrainedError(f"{name} is neither a folder nor a repository: {error}") from None


def _file(pretrained: str | os.PathLike[str], file: str, **download: Any) -> str:
    """The path of one file of a folder, or of a repository, which it is downloaded from."""
    name = os.fspath(pretrained)
    if os.path.isdir(name):
        return _local(name, file)
    return os.path.realpath(_downloaded(name, file, **download))  # the cache links to its blobs


def _local(folder: str, file: str) -> str:
    path = os.path.join(folder, file)
    if not os.path.lexists(path):
        raise _MissingError(
            f"{folder} holds no model of NNx: it has no {file}"
            + (" (a pickle is never loaded)" if file == WEIGHTS else "")
        )
    real = os.path.realpath(path)
    blobs = os.path.realpath(os.path.join(folder, "..", "..", "blobs"))
    if os.path.islink(path) and os.path.dirname(real) != blobs:
        raise PretrainedError(f"{path} is a symbolic link out of the folder")
    return real


def _header(path: str) -> Header:
    with open_regular(path, error=PretrainedError) as stream:
        return read_header(stream, path, error=PretrainedError)


def _parts(
    config: Mapping[str, Any], path: str
) -> tuple[NNModelParams, NNParams | None, tuple[NNCheckpointTransform, ...]]:
    net = config["net_params"]
    try:
        return (
            NNModelParams.from_state(config["params"]),
            None if net is None else NNParams.resolve_from_state(net),
            tuple(NNCheckpointTransform.from_state(t) for t in config["transforms"]),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise PretrainedError(f"{path} cannot be read ({reason})") from error


def _check_transforms(transforms: Sequence[NNCheckpointTransform], path: str) -> None:
    for transform in transforms:
        try:
            manager.registry("transform").resolve(transform.name, transform.version)
        except UnknownIdError as error:
            raise PretrainedError(
                f"{path} records a transform that is not known: {error}"
            ) from None


def _check_net(
    params: NNModelParams,
    net_params: NNParams | None,
    transforms: Sequence[NNCheckpointTransform],
    header: Header,
    path: str,
) -> None:
    if not isinstance(params.net, Nets):
        return
    if net_params is None:
        raise PretrainedError(f"{path} names the net {params.net.value} without net_params")
    shapes = names.weights(net_params, {n: e.shape for n, e in header.tensors.items()})
    try:
        check_describes(params.net, net_params, shapes, has_transforms=bool(transforms))
    except UnfitConfigurationError as error:
        raise PretrainedError(f"{path}: {error}") from None


def _weights(path: str, header: Header, net_params: NNParams | None) -> Mapping[str, Any]:
    from safetensors.torch import load_file

    found = load_file(path)
    if {n: tuple(t.shape) for n, t in found.items()} != {
        n: e.shape for n, e in header.tensors.items()
    }:
        raise PretrainedError(f"{path} changed while it was read")
    return names.weights(net_params, found)


def _device(map_location: Any) -> Devices:
    if isinstance(map_location, Devices):
        return map_location
    if map_location == Devices.AUTO.value:
        return Devices.AUTO
    return Devices(torch.device(map_location).type)


def _no_record() -> NNIterationDataPoint:
    """A published model has no epoch."""
    nothing = NNEvaluationDataPoint(loss=0.0)
    return NNIterationDataPoint(lr=0.0, iter_idx=0, epoch_idx=0, batch_idx=0, train_edp=nothing)
