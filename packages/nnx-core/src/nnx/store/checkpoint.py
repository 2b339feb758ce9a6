"""One checkpoint: weights, what they belong to, and the record of their epoch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nnx.enums import Checkpoints
from nnx.params import NNCheckpointTransform, NNModelParams, NNParams, RuntimeModule
from nnx.records import NNIterationDataPoint
from nnx.store import codec
from nnx.store.errors import ResumePointError

__all__ = ["NNCheckpoint", "NNCheckpointTransform"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NNCheckpoint:
    """The weights of one epoch with the parameters that rebuild their network.

    ``training_state_id`` names the generation of the training state saved
    beside the checkpoint; ``training_state_present`` is ``False`` for a file
    that holds weights alone, ``None`` when nothing is known of it.
    """

    net_params: NNParams | None
    net_state: Mapping[str, Any]
    model_params: NNModelParams
    idp: NNIterationDataPoint
    transforms: tuple[NNCheckpointTransform, ...] = ()
    training_state_id: str | None = None
    training_state_present: bool | None = None

    @property
    def reconstructible(self) -> bool:
        """Whether the network can be rebuilt from the file; not for a runtime-only module."""
        return not isinstance(self.model_params.net, RuntimeModule)

    # One file, anywhere

    def to_file(self, path: str, format: Literal["pickle", "safetensors"] = "pickle") -> None:
        """Write the checkpoint atomically to ``path``, creating its folder.

        ``"pickle"`` is a ``torch.save`` of plain data that ``from_file`` reads
        back without running code. ``"safetensors"`` stores the tensors as such
        and the rest as JSON in the metadata; every entry of ``net_state`` must
        be a tensor, and the network must be one that a factory rebuilds.
        """
        from nnx.utils.files import atomic_write
        from nnx.utils.folders import make_folder

        if format not in ("pickle", "safetensors"):
            raise ValueError(f"format must be 'pickle' or 'safetensors', not {format!r}")
        if format == "pickle":
            import torch

            plain = codec.to_plain(self, None)
            make_folder(os.path.dirname(os.path.abspath(path)))
            with atomic_write(path, "wb", strict=True) as stream:
                torch.save(plain, stream)
            return
        from safetensors.torch import save

        from nnx.models import MissingModelFactoryError

        net = self.model_params.net
        if isinstance(net, RuntimeModule):
            raise MissingModelFactoryError(
                f"{net.module} is a runtime-only module, which no factory can "
                "rebuild, so it has no portable form; register a factory and name it with a "
                "ModelSpec, or export the weights alone with NNModel.export_state_dict"
            )
        tensors, metadata = codec.to_safetensors(self)
        payload = save(tensors, metadata=metadata)
        make_folder(os.path.dirname(os.path.abspath(path)))
        with atomic_write(path, "wb", strict=True) as stream:
            stream.write(payload)

    @staticmethod
    def from_file(path: str, map_location: Any = "cpu") -> NNCheckpoint | None:
        """Read a checkpoint of either format; the first bytes tell which.

        ``None`` when the path does not exist or holds data that is not a
        checkpoint. A file that cannot be read as one, or that would need code to
        load, is refused with ``ResumePointError``; bits that changed inside a
        tensor are only seen by :meth:`verify`. ``map_location`` is what
        ``torch.load`` takes; for safetensors a device string or
        ``torch.device``.
        """
        return read_checkpoint(path, map_location)

    # A tag of a run

    @staticmethod
    def load(
        run: str, type: Checkpoints, root: str | None = None, map_location: Any = "cpu"
    ) -> NNCheckpoint | None:
        """The checkpoint of a run's tag; ``None`` when it was never written."""
        from nnx.store.points import load_point

        return load_point(run, type, root, map_location, with_state=False)[0]

    @staticmethod
    def load_with_training_state(
        run: str, type: Checkpoints, root: str | None = None, map_location: Any = "cpu"
    ) -> tuple[NNCheckpoint | None, dict[str, Any] | None]:
        """A tag's checkpoint and the training state of the same generation.

        ``(None, None)`` when there is no such run or tag; nothing is created.
        A state that the checkpoint names and that is missing or damaged is a
        ``ResumePointError``. The state has the names of :meth:`save`, and those
        of the original NNx (``optimizer``, ``scheduler``, ``rng``, ...) beside them.
        """
        from nnx.store.names import with_original_names
        from nnx.store.points import load_point

        checkpoint, state = load_point(run, type, root, map_location, with_state=True)
        return checkpoint, None if state is None else with_original_names(state)

    @staticmethod
    def load_training_state(
        run: str, type: Checkpoints, root: str | None = None, map_location: Any = "cpu"
    ) -> dict[str, Any] | None:
        """The training state of a tag, or ``None``; see :meth:`load_with_training_state`."""
        return NNCheckpoint.load_with_training_state(run, type, root, map_location)[1]

    @staticmethod
    def load_optimizer_state(
        run: str, type: Checkpoints, root: str | None = None
    ) -> dict[str, Any] | None:
        """The optimizer state of a tag, or ``None`` when none was saved."""
        state = NNCheckpoint.load_training_state(run, type, root)
        return None if state is None else state.get("optimizer_state")

    @staticmethod
    def resume_point(run: str, type: Checkpoints, root: str | None = None) -> dict[str, Any] | None:
        """The manifest of a tag's resume point; ``None`` when it has none."""
        from nnx.store.points import read_manifest

        return read_manifest(run, type, root)

    @staticmethod
    def verify(run: str, type: Checkpoints, root: str | None = None) -> dict[str, Any] | None:
        """Check every file of a resume point against its manifest, and return that.

        ``None`` for a tag that was never written, or was written before
        manifests. Raises ``ResumePointError`` for a torn, mixed or corrupted
        point. Only the tag's lock file may be created.
        """
        from nnx.store.points import verify_point

        return verify_point(run, type, root)

    def save(
        self,
        run: str,
        type: Checkpoints,
        root: str | None = None,
        optimizer_state: dict[str, Any] | None = None,
        scheduler_state: dict[str, Any] | None = None,
        scaler_state: dict[str, Any] | None = None,
        rng_state: dict[str, Any] | None = None,
        completed_epoch: int | None = None,
        resume_net_state: dict[str, Any] | None = None,
        optimizer_type: str | None = None,
        scheduler_type: str | None = None,
        optimizer_topology: list[list[dict[str, Any]]] | None = None,
        optimizer_factory: dict[str, Any] | None = None,
        components: dict[str, Any] | None = None,
        optimizers_state: dict[str, Any] | None = None,
        schedulers_state: dict[str, Any] | None = None,
        optimizer_types: dict[str, str] | None = None,
        scheduler_types: dict[str, str] | None = None,
        optimizer_topologies: dict[str, list[list[dict[str, Any]]]] | None = None,
        optimizer_factories: dict[str, dict[str, Any] | None] | None = None,
        precision: dict[str, Any] | None = None,
        compile: dict[str, Any] | None = None,
        distributed: dict[str, Any] | None = None,
        counters: dict[str, Any] | None = None,
    ) -> None:
        """Write one resume point of a run: sidecar, checkpoint, manifest.

        Everything after ``root`` is the training state, stored beside the
        checkpoint as data. ``counters`` may hold ``global_step``,
        ``committed_updates`` and ``planned_n_epochs``, which the manifest
        repeats. Until the new point is complete the previous one stays.
        """
        given = locals()
        from nnx.store.commit import Commit
        from nnx.store.paths import RunPaths, tag_name
        from nnx.utils.folders import make_folder

        fields = {name: given[name] for name in codec.STATE_FIELDS if given[name] is not None}
        paths, tag = RunPaths.of(run, root), tag_name(type)
        paths.refuse_link()
        make_folder(paths.checkpoints)
        with Commit(paths.checkpoints, self, fields or None, tags=(tag,)) as commit:
            commit.publish(tag)


def _sniff(path: str) -> str:
    if os.path.isdir(path):
        raise ResumePointError(
            f"{path} is a directory, not a checkpoint file. The checkpoint of a run is read with "
            "NNCheckpoint.load(run_id, tag)."
        )
    with open(path, "rb") as stream:
        start = stream.read(16)
    if not start:
        raise ResumePointError(f"{path} is empty")
    if start.startswith(b"PK\x03\x04"):
        return "pickle"
    if start[8:9] == b"{":  # before the pickle mark: the length's low byte can be 0x80
        return "safetensors"
    if start.startswith(b"\x80"):
        return "pickle"
    return "safetensors"


def read_checkpoint(
    path: str, map_location: Any = "cpu", *, mapped: bool = False
) -> NNCheckpoint | None:
    """:meth:`NNCheckpoint.from_file`; ``mapped`` tensors are the file's pages."""
    if not os.path.exists(path):
        return None
    kind = _sniff(path)
    if kind == "safetensors":
        return _read_safetensors(path, map_location)
    from nnx.store.data import load_data

    value = load_data(path, map_location, mapped=mapped)
    if not codec.is_checkpoint(value):
        return None
    if codec.SHARDS in value:
        from nnx.store.points import with_tensors

        value = with_tensors(value, path, map_location)
    return NNCheckpoint(**codec.fields_of(value, path))


def _read_safetensors(path: str, map_location: Any) -> NNCheckpoint:
    import torch
    from safetensors import SafetensorError, safe_open

    if not isinstance(map_location, (str, torch.device)):
        raise TypeError(
            f"{path} is a safetensors file: map_location must be a device string or "
            f"torch.device, not {type(map_location).__name__}"
        )
    try:
        with safe_open(path, framework="pt", device=str(map_location)) as file:
            metadata = file.metadata() or {}
            if not codec.is_safetensors_checkpoint(metadata):
                raise ResumePointError(
                    f"{path} holds tensors but not a checkpoint of NNx. Weights alone are "
                    "read with nnx.load_pretrained."
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ResumePointError(
            f"{path} is neither a checkpoint of NNx nor a safetensors file ({error})"
        ) from error
    return NNCheckpoint(**codec.from_safetensors(tensors, metadata, path))
