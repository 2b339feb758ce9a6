"""Reading bundles: the record of a checkpoint, and the check of every byte."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any

from nnx.bundles import calibrators, layout
from nnx.bundles.encoding import decode, references
from nnx.bundles.errors import BundleError, BundleIntegrityError
from nnx.bundles.info import BundleInfo
from nnx.bundles.layout import MODEL, STATE, TRAINING, Manifest, Payload, read_manifest
from nnx.utils import weights
from nnx.utils.disk import StrPath
from nnx.utils.files import BLOCK
from nnx.utils.flushing import side_by_side
from nnx.utils.strict import open_regular, parse_json, read_exactly
from nnx.utils.tensor_file import Header, read_header, tensors_in

if TYPE_CHECKING:
    import torch

_BLOCK = 1 << 22
_CHECKPOINT_KEYS = {"model_params", "net_params", "idp", "transforms"}
_RECORD_KEYS = {
    "format", "version", "generation", "source", "capability", "checkpoint", "net_state",
    "training_state", "calibrators",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """``state.json`` of a bundle, checked; tensors of the training state are references."""

    run_id: str
    tag: str
    capability: str
    checkpoint: Mapping[str, Any]
    net_state: tuple[str, ...]
    training_state: Mapping[str, Any] | None
    calibrators: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A bundle whose JSON was read and compared with its digests."""

    path: str
    manifest: Manifest
    record: Record
    calibrators: Mapping[str, Mapping[str, Any]]

    def file(self, name: str) -> str:
        return os.path.join(self.path, self.manifest.folder, name)

    def info(self, *, verified: bool) -> BundleInfo:
        checkpoint, state = self.record.checkpoint, self.record.training_state or {}
        saved = state.get("components") or {}
        return BundleInfo(
            path=self.path,
            version=layout.VERSION,
            generation=self.manifest.generation,
            capability=self.record.capability,
            source_run_id=self.record.run_id,
            source_checkpoint=self.record.tag,
            epoch=checkpoint["idp"]["epoch_idx"],
            model=_model_name(checkpoint["model_params"]["net"]),
            model_params=MappingProxyType(checkpoint["model_params"]),
            net_params=_read_only(checkpoint["net_params"]),
            transforms=tuple(map(MappingProxyType, checkpoint["transforms"])),
            components=MappingProxyType({name: _component(saved[name]) for name in saved}),
            calibrators=tuple(
                MappingProxyType({"file": name, **calibrators.summary(found)})
                for name, found in self.calibrators.items()
            ),
            payloads=MappingProxyType({n: p.state() for n, p in self.manifest.payloads.items()}),
            verified=verified,
        )


def inspect_bundle(path: StrPath) -> BundleInfo:
    """What the bundle at ``path`` holds, from its JSON alone: no tensor is read.

    The time does not depend on the size of the weights. ``verified`` is False:
    :func:`validate_bundle` looks at every byte. Raises ``BundleError`` for what is no
    bundle, ``BundleIntegrityError`` for one whose records cannot be true.
    """
    return read_bundle(path).info(verified=False)


def validate_bundle(path: StrPath) -> BundleInfo:
    """Check every file of a bundle against its manifest and its record.

    Sizes and SHA-256, nothing missing, unlisted or linked, headers that hold exactly the
    tensors that the record names, calibrators that belong to the model, and a calibrator's
    fingerprint of the weights. No tensor is built, and nothing but ``BundleError`` and
    its kinds is raised for what is wrong.
    """
    bundle = read_bundle(path)
    check_top(bundle.path)
    check_generation(bundle)
    if read_manifest(path) != bundle.manifest:
        raise BundleIntegrityError(f"{bundle.path} changed while it was read: read it again")
    return bundle.info(verified=True)


def read_bundle(path: StrPath) -> Bundle:
    """Manifest, record and calibrators of a bundle."""
    return open_generation(path, read_manifest(path))


def check_generation(bundle: Bundle, *, digests: bool = True) -> None:
    """Compare every file of a bundle's generation with manifest and record.

    Without ``digests`` the bytes of tensors are not read, unless a calibrator is bound to them.
    """
    check_folder(bundle)
    files = [name for name in (MODEL, TRAINING) if name in bundle.manifest.payloads]
    side_by_side(lambda name: check_tensors(bundle, name, digests), files)


def open_generation(path: StrPath, manifest: Manifest) -> Bundle:
    """The record and calibrators of a generation, published or not."""
    shown = os.fspath(path)
    folder = os.path.join(shown, manifest.folder)
    if os.path.islink(folder) or not os.path.isdir(folder):
        what = "is a symbolic link" if os.path.islink(folder) else "is missing"
        raise BundleIntegrityError(f"the generation {folder} {what}")
    where = os.path.join(folder, STATE)
    document = parse_json(
        read_payload(where, manifest.payloads[STATE]), where, error=BundleIntegrityError
    )
    try:
        record = _record(document, where, manifest)
    except RecursionError:
        raise BundleIntegrityError(f"{where} is nested too deeply") from None
    found = {}
    for name in record.calibrators:
        file = os.path.join(folder, name)
        data = bytes(read_payload(file, manifest.payloads[name]))
        found[name] = calibrators.check(
            parse_json(data, file, error=BundleIntegrityError), file, record.checkpoint
        )
    return Bundle(path=shown, manifest=manifest, record=record, calibrators=found)


def _record(document: Any, where: str, manifest: Manifest) -> Record:
    if not isinstance(document, dict) or document.keys() != _RECORD_KEYS:
        raise BundleIntegrityError(f"{where} must hold exactly {', '.join(sorted(_RECORD_KEYS))}")
    if document["format"] != layout.BUNDLE_FORMAT:
        raise BundleIntegrityError(f"{where} is not the state of a run bundle")
    layout.check_version(document, where)
    if document["generation"] != manifest.generation:
        raise BundleIntegrityError(f"{where} is of another generation than the manifest")
    source = document["source"]
    if not isinstance(source, dict) or source.keys() != {"run_id", "checkpoint"}:
        raise BundleIntegrityError(f"{where} must name run and checkpoint as its source")
    if not all(isinstance(v, str) and v for v in source.values()):
        raise BundleIntegrityError(f"{where} must name run and checkpoint as its source")
    state = decode(document["training_state"], f"{where}: training_state")
    listed = _strings(document["calibrators"], f"{where}: calibrators")
    record = Record(
        run_id=source["run_id"],
        tag=source["checkpoint"],
        capability=document["capability"],
        checkpoint=_checkpoint(decode(document["checkpoint"], f"{where}: checkpoint"), where),
        net_state=_strings(document["net_state"], f"{where}: net_state"),
        training_state=state,
        calibrators=listed,
    )
    _check_record(record, where, manifest)
    return record


def _check_record(record: Record, where: str, manifest: Manifest) -> None:
    if record.capability not in (layout.RESUME, layout.INFERENCE):
        raise BundleIntegrityError(f"{where} has the capability {str(record.capability)[:40]!r}")
    resumes = record.capability == layout.RESUME
    if isinstance(record.training_state, dict) != resumes:
        raise BundleIntegrityError(f"{where}: the training state does not fit the capability")
    if (TRAINING in manifest.payloads) != resumes:
        raise BundleIntegrityError(f"{where}: {TRAINING} does not fit the capability")
    wanted = {STATE, MODEL, *record.calibrators, *([TRAINING] if resumes else [])}
    if wanted != manifest.payloads.keys():
        differing = ", ".join(sorted(wanted ^ manifest.payloads.keys()))
        raise BundleIntegrityError(f"{where} and the manifest disagree about {differing}")
    saved = (record.training_state or {}).get("components")
    if saved is not None and not isinstance(saved, dict):
        raise BundleIntegrityError(f"{where}: components must be a mapping of names")


def _checkpoint(found: Any, where: str) -> dict[str, Any]:
    if not isinstance(found, dict) or found.keys() != _CHECKPOINT_KEYS:
        raise BundleIntegrityError(
            f"{where}: checkpoint must hold exactly {', '.join(sorted(_CHECKPOINT_KEYS))}"
        )
    if references(found):
        raise BundleIntegrityError(f"{where}: checkpoint holds tensors")
    params, net, transforms = found["model_params"], found["net_params"], found["transforms"]
    if not isinstance(params, dict) or not isinstance(params.get("net"), (str, dict)):
        raise BundleIntegrityError(f"{where}: model_params names no net")
    if net is not None and not isinstance(net, dict):
        raise BundleIntegrityError(f"{where}: net_params must be a mapping or null")
    if not isinstance(transforms, list) or not all(isinstance(t, dict) for t in transforms):
        raise BundleIntegrityError(f"{where}: transforms must be a list of records")
    idp = found["idp"]
    if not isinstance(idp, dict) or type(idp.get("epoch_idx")) is not int:
        raise BundleIntegrityError(f"{where}: idp has no epoch")
    return found


def _strings(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise BundleIntegrityError(f"{where} must be a list of names")
    if len(set(value)) != len(value):
        raise BundleIntegrityError(f"{where} names something twice")
    return tuple(value)


def _model_name(net: Any) -> str:
    if isinstance(net, str):
        return net
    return f"{net.get('id')}@v{net.get('version')}"


def _component(saved: Any) -> Mapping[str, Any]:
    if not isinstance(saved, dict):
        raise BundleIntegrityError("a saved component must be a mapping")
    return MappingProxyType({k: v for k, v in saved.items() if k != "state"})


def _read_only(value: dict[str, Any] | None) -> Mapping[str, Any] | None:
    return None if value is None else MappingProxyType(value)


# -- bytes ---------------------------------------------------------------------------------


def read_payload(path: str, payload: Payload) -> bytearray:
    """The bytes of a payload, compared with its digest: what is used is what was checked."""
    data = bytearray(payload.size)
    with open_regular(path, size=payload.size, error=BundleIntegrityError) as stream:
        _hash(stream, path, payload, data)
    return data


def _hash(stream: IO[bytes], path: str, payload: Payload, into: bytearray | None = None) -> None:
    """Compare an open file with its digest, from its beginning; keep the bytes if asked."""
    before = os.fstat(stream.fileno())
    stream.seek(0)
    digest, left = hashlib.sha256(), payload.size
    block = memoryview(into if into is not None else bytearray(min(BLOCK, left or 1)))
    while left:
        at = payload.size - left if into is not None else 0
        part = block[at : at + min(BLOCK, left)]
        count = stream.readinto(part)  # type: ignore[attr-defined]
        if not count:
            raise BundleIntegrityError(f"{path} became shorter while it was read")
        digest.update(part[:count])
        left -= count
    after = os.fstat(stream.fileno())
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise BundleIntegrityError(f"{path} changed while it was read")
    if digest.hexdigest() != payload.sha256:
        raise BundleIntegrityError(
            f"the SHA-256 of {path} is not the one in the manifest: the file was changed or damaged"
        )


def check_top(path: str) -> None:
    """Nothing in a bundle's folder but its manifest, generations, and a killed export's manifest."""
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                known = layout.is_generation_folder(entry.name)
            else:
                known = layout.is_manifest(entry.name) and not entry.is_symlink()
            if not known:
                raise BundleIntegrityError(f"{entry.path} is unlisted: no file of the bundle")


def check_folder(bundle: Bundle) -> None:
    """Nothing unlisted and nothing but regular files in a bundle's generation."""
    listed = bundle.manifest.payloads
    with os.scandir(os.path.join(bundle.path, bundle.manifest.folder)) as entries:
        for entry in entries:
            if entry.name not in listed:
                raise BundleIntegrityError(
                    f"{entry.path} is unlisted: the manifest has no such file"
                )
            if entry.is_symlink() or not entry.is_file(follow_symlinks=False):
                raise BundleIntegrityError(f"{entry.path} is not a regular file")


def check_tensors(bundle: Bundle, name: str, digests: bool) -> None:
    """Compare a file of tensors with its digest and its header with the record."""
    path, payload = bundle.file(name), bundle.manifest.payloads[name]
    with open_regular(path, size=payload.size, error=BundleIntegrityError) as stream:
        header = read_header(stream, path, error=BundleIntegrityError)
        check_header(bundle, name, header)
        if digests:
            _hash(stream, path, payload)
        if name == MODEL and any(map(calibrators.fingerprint, bundle.calibrators.values())):
            found = _fingerprint(stream, path, header, bundle.record.net_state)
            _check_fingerprint(bundle, header, found)


def read_tensors(bundle: Bundle, name: str) -> tuple[Header, dict[str, torch.Tensor]]:
    """The tensors of a payload, from the very bytes that were compared with its digest."""
    path, payload = bundle.file(name), bundle.manifest.payloads[name]
    with open_regular(path, size=payload.size, error=BundleIntegrityError) as stream:
        header = read_header(stream, path, error=BundleIntegrityError)
        check_header(bundle, name, header)
        data = bytearray(payload.size)
        _hash(stream, path, payload, data)
    again = read_header(io.BytesIO(data), path, size=payload.size, error=BundleIntegrityError)
    if again != header:
        raise BundleIntegrityError(f"{path} changed while it was read")
    return header, tensors_in(header, memoryview(data)[header.start :])


def check_loaded(bundle: Bundle, header: Header, tensors: Mapping[str, torch.Tensor]) -> None:
    """A calibrator's fingerprint is that of the loaded weights."""
    if any(map(calibrators.fingerprint, bundle.calibrators.values())):
        found = weights.fingerprint_of({name: tensors[name] for name in bundle.record.net_state})
        _check_fingerprint(bundle, header, found)


def _check_fingerprint(bundle: Bundle, header: Header, found: str) -> None:
    """Calibrators bound to weights are bound to these.

    The original NNx digests weights in another way, and says nothing of it in the file:
    a fingerprint of its own stays what it is there, a name.
    """
    stated = header.metadata.get(layout.FINGERPRINT)
    if stated is None:
        return
    if stated != found:
        raise BundleIntegrityError(f"{bundle.file(MODEL)} states the fingerprint of other weights")
    calibrators.check_fingerprint(bundle.calibrators, found)


def _fingerprint(stream: IO[bytes], path: str, header: Header, order: tuple[str, ...]) -> str:
    def data(name: str) -> Any:
        entry = header.tensors[name]
        stream.seek(header.start + entry.start)
        left = entry.end - entry.start
        while left:
            yield (
                part := read_exactly(stream, min(_BLOCK, left), path, error=BundleIntegrityError)
            )
            left -= len(part)

    return weights.fingerprint(
        (name, header.tensors[name].dtype, header.tensors[name].shape, data(name)) for name in order
    )


def check_header(bundle: Bundle, name: str, header: Header) -> None:
    """A file's tensors are exactly those that the record refers to, of this generation."""
    path = bundle.file(name)
    part = {MODEL: "model", TRAINING: "training"}[name]
    own = {layout.PART: part, "generation": bundle.manifest.generation}
    if {k: v for k, v in header.metadata.items() if k != layout.FINGERPRINT} != own:
        raise BundleIntegrityError(f"{path} does not belong to this bundle's generation")
    if name == MODEL:
        wanted = list(bundle.record.net_state)
    else:
        wanted = references(bundle.record.training_state)
    if len(set(wanted)) != len(wanted):
        raise BundleIntegrityError(f"the record refers to a tensor of {path} twice")
    if set(wanted) != header.tensors.keys():
        differing = sorted(set(wanted) ^ header.tensors.keys())
        raise BundleIntegrityError(
            f"{path} and the record disagree about the tensors {', '.join(differing[:5])}"
        )


def tensors_digest(path: str) -> str:
    """The SHA-256 over the tensors of a file, by name; two generations of equal ones agree."""
    digest = hashlib.sha256()
    with open_regular(path, error=BundleError) as stream:
        header = read_header(stream, path, error=BundleError)
        for name in sorted(header.tensors):
            entry = header.tensors[name]
            digest.update(f"{name}\0{entry.dtype}\0{entry.shape}\0".encode())
            stream.seek(header.start + entry.start)
            left = entry.end - entry.start
            while left:
                part = read_exactly(stream, min(_BLOCK, left), path, error=BundleError)
                digest.update(part)
                left -= len(part)
    return digest.hexdigest()
