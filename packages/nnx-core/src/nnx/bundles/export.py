"""From a run's checkpoint to a bundle: stage a generation, check it, publish it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from nnx.bundles import calibrators as records
from nnx.bundles import layout
from nnx.bundles.encoding import encode
from nnx.bundles.errors import BundleCapabilityError, BundleError
from nnx.bundles.info import BundleInfo
from nnx.bundles.layout import MANIFEST, MODEL, STATE, TRAINING, Manifest, Payload
from nnx.bundles.reading import Bundle, check_generation, open_generation
from nnx.utils import files as fs
from nnx.utils.disk import StrPath
from nnx.utils.flushing import Flushes, HashingFile, side_by_side, write_new
from nnx.utils.folders import make_folder, remove_tree_quietly
from nnx.utils.weights import fingerprint_of

if TYPE_CHECKING:
    from nnx.store import NNCheckpoint
    from nnx.store.points import ResumePoint


def export_bundle(
    run_id: str,
    destination: StrPath,
    *,
    checkpoint: str = "last",
    root: str | None = None,
    calibrators: Iterable[Any] = (),
) -> BundleInfo:
    """Write one checkpoint of a run as a bundle into the folder ``destination``.

    ``checkpoint`` is a tag (``"last"``, ``"best"``, ``"q1"``, a member of ``Checkpoints``)
    or the stem of a ``ModelCheckpoint`` (``"snap_e3"``). A checkpoint with training state
    becomes a ``"resume"`` bundle, one of weights an ``"inference"`` bundle. A bundle that
    is there already is replaced as a whole, and stays until the new one is complete.
    ``calibrators`` are those of nnx-eval, or whole ``TrustChain`` records.

    Raises ``FileNotFoundError`` for an unknown run or checkpoint, ``BundleError`` for a
    folder that is not a bundle's and for a state that is not data, ``ValueError`` for a
    damaged checkpoint. Then nothing is left behind.
    """
    from nnx.store.points import read_point

    target = os.path.abspath(os.fspath(destination))
    _check_target(target)
    point = read_point(run_id, checkpoint, root, mapped=True)
    _check_checkpoint(point.checkpoint)
    generation = secrets.token_hex(16)
    payloads, texts = _content(point, generation, tuple(calibrators))
    is_new = not os.path.isdir(target)
    try:
        make_folder(target)
        with _only_writer(target):
            return _publish(target, generation, payloads, texts)
    except BaseException:
        if is_new:  # an empty folder of ours
            with contextlib.suppress(OSError):
                fs.disk.rmdir(target)
        raise


def _check_target(target: str) -> None:
    """Refuse a folder that is neither empty nor a bundle's, before anything is read."""
    if not os.path.lexists(target):
        return
    if not os.path.isdir(target):
        raise BundleError(f"{target} is a file; a bundle is a folder")
    names = os.listdir(target)
    if MANIFEST in names:
        try:
            layout.read_manifest(target)
        except BundleError as error:
            raise BundleError(
                f"{target} is left alone: its {MANIFEST} is not a readable manifest ({error})"
            ) from error
    unknown = sorted(n for n in names if n != MANIFEST and not _is_ours(target, n))
    if unknown:
        raise BundleError(
            f"{target} is neither empty nor a bundle: it holds {', '.join(unknown[:3])}. Export "
            "into a folder of its own"
        )


def _is_ours(target: str, name: str) -> bool:
    path = os.path.join(target, name)
    if os.path.islink(path):
        return False
    if layout.is_generation_folder(name) and os.path.isdir(path):
        return all(layout.is_payload(n) or fs.is_temporary_name(n) for n in os.listdir(path))
    return layout.is_manifest(name)


def _check_checkpoint(checkpoint: NNCheckpoint) -> None:
    from nnx.params import RuntimeModule
    from nnx.plugins import manager

    net = checkpoint.model_params.net
    if isinstance(net, RuntimeModule):
        raise BundleCapabilityError(
            f"{net.module} is a runtime-only module, which no factory can rebuild, so its run has "
            "no bundle; register a factory and train from a ModelSpec"
        )
    known = manager.registry("transform")
    for index, transform in enumerate(checkpoint.transforms):
        if (transform.name, transform.version) not in known:
            raise BundleError(
                f"the recorded transform {index}, {transform.name!r} of version "
                f"{transform.version}, cannot be replayed from data: nothing is registered for it"
            )


# -- content -------------------------------------------------------------------------------


def _content(
    point: ResumePoint, generation: str, calibrators: tuple[Any, ...]
) -> tuple[dict[str, tuple[dict[str, Any], dict[str, str]]], dict[str, bytes]]:
    """The tensors (with their metadata) and the texts of a generation, by file name."""
    from nnx.store import codec, names
    from nnx.utils.tensor_file import as_stored

    checkpoint, state = point.checkpoint, point.training_state
    described = codec.header(checkpoint)
    kept = {key: described[key] for key in ("model_params", "net_params", "idp", "transforms")}
    net, training = {}, dict[str, Any]()
    try:
        for name, value in checkpoint.net_state.items():
            net[name] = as_stored(f"the module's state {name!r}", value)
        encoded = None
        if state is not None:
            portable = names.to_original_state(
                state, checkpoint_id=point.checkpoint_id, generation=point.generation,
                completed_epoch=point.completed_epoch,
            )  # fmt: skip
            encoded = encode(portable, "training_state", training)
        plain = encode(kept, "checkpoint", {})
    except TypeError as error:
        raise BundleError(
            f"the checkpoint {point.tag!r} of run {point.run_id} does not fit into a bundle, which "
            f"is data only: {error}"
        ) from error
    texts = {
        f"calibrator-{index}.json": records.to_bytes(records.record_of(one, index, kept))
        for index, one in enumerate(calibrators)
    }
    about = {layout.PART: "model", "generation": generation}
    if texts:
        about[layout.FINGERPRINT] = fingerprint_of(net)
    document = {
        "format": layout.BUNDLE_FORMAT,
        "version": layout.VERSION,
        "generation": generation,
        "source": {"run_id": point.run_id, "checkpoint": point.tag},
        "capability": layout.INFERENCE if state is None else layout.RESUME,
        "checkpoint": plain,
        "net_state": list(net),
        "training_state": encoded,
        "calibrators": list(texts),
    }
    texts[STATE] = (json.dumps(document, indent=1, allow_nan=False) + "\n").encode("utf-8")
    tensors = {MODEL: (net, about)}
    if state is not None:
        tensors[TRAINING] = (training, {layout.PART: "training", "generation": generation})
    return tensors, texts


# -- publication ---------------------------------------------------------------------------


@contextlib.contextmanager
def _only_writer(target: str) -> Iterator[None]:
    """Keep another export out of the same folder; a lock that leaves no file behind."""
    try:
        descriptor = os.open(target, os.O_RDONLY)
    except OSError:  # Windows opens no folders
        yield
        return
    try:
        try:
            fs.disk.lock(descriptor)
        except BlockingIOError:
            raise BundleError(f"another process is exporting into {target}") from None
        except (OSError, AttributeError):
            pass  # a system without such locks: the last export wins as a whole
        yield
    finally:
        os.close(descriptor)


def _publish(
    target: str,
    generation: str,
    tensors: Mapping[str, tuple[dict[str, Any], dict[str, str]]],
    texts: Mapping[str, bytes],
) -> BundleInfo:
    previous = None
    if os.path.lexists(os.path.join(target, MANIFEST)):
        previous = layout.read_manifest(target)
    folder, flushes = os.path.join(target, f"g-{generation}"), Flushes()
    try:
        manifest = Manifest(generation, _write(folder, tensors, texts, flushes))
        bundle = _checked(target, manifest)  # while the disk takes the files
        flushes.wait()
        with fs.atomic_write(os.path.join(target, MANIFEST), "wb", strict=True) as stream:
            stream.write(manifest.to_bytes())
    except BaseException:
        flushes.settle()
        if os.path.isdir(folder) and not _is_published(target, generation):
            remove_tree_quietly(folder)
        raise
    _clear(target, {manifest.folder, previous.folder if previous is not None else ""})
    return bundle.info(verified=True)


def _is_published(target: str, generation: str) -> bool:
    try:
        return layout.read_manifest(target).generation == generation
    except BundleError:
        return False


def _write(
    folder: str,
    tensors: Mapping[str, tuple[dict[str, Any], dict[str, str]]],
    texts: Mapping[str, bytes],
    flushes: Flushes,
) -> dict[str, Payload]:
    """Write a generation, durable after ``flushes``; size and digest of each file."""
    from nnx.utils.tensor_file import chunks

    def write(name: str) -> Payload:
        state, metadata = tensors[name]
        alive = [_memory(tensor) for tensor in state.values()]
        file = HashingFile(os.path.join(folder, name), alive)
        try:
            for chunk in chunks(state, metadata):
                file.write(chunk)
            return Payload(file.finish(flushes), file.size)
        except BaseException:
            file.abandon()
            raise

    fs.disk.mkdir(folder)
    payloads = dict(zip(tensors, side_by_side(write, tensors)))
    for name, text in texts.items():
        write_new(os.path.join(folder, name), text, flushes)
        payloads[name] = Payload(hashlib.sha256(text).hexdigest(), len(text))
    flushes.add_directory(folder)
    flushes.add_directory(os.path.dirname(folder))
    return payloads


def _memory(tensor: Any) -> tuple[int, int]:
    start = tensor.data_ptr()
    return start, start + tensor.numel() * tensor.element_size()


def _checked(target: str, manifest: Manifest) -> Bundle:
    """What a reader would check, before any reader can see the generation.

    The digests of tensors are those of the bytes that were handed to the disk; they are
    not read again.
    """
    bundle = open_generation(target, manifest)
    check_generation(bundle, digests=False)
    return bundle


def _clear(target: str, kept: set[str]) -> None:
    """Remove older generations and what interrupted exports left; the last one may be in use."""
    for name in os.listdir(target):
        path = os.path.join(target, name)
        if name in kept or name == MANIFEST or not _is_ours(target, name):
            continue
        if os.path.isdir(path):
            remove_tree_quietly(path)
        else:
            fs.remove_quietly(path)
