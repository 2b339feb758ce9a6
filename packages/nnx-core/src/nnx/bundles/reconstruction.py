"""From a bundle to a model, which serves or resumes the run."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nnx.bundles import calibrators as records
from nnx.bundles import layout
from nnx.bundles.encoding import resolve
from nnx.bundles.errors import (
    BundleCapabilityError,
    BundleIntegrityError,
    BundleReconstructionError,
)
from nnx.bundles.info import BundleInfo
from nnx.bundles.layout import MODEL, TRAINING, read_manifest
from nnx.bundles.reading import (
    Bundle,
    check_folder,
    check_loaded,
    check_top,
    open_generation,
    read_tensors,
)
from nnx.nn_model import NNModel
from nnx.utils.disk import StrPath

if TYPE_CHECKING:
    import torch

    from nnx.models import BatchAdapter, ModelFactory
    from nnx.params import NNTrainParams
    from nnx.store import NNCheckpoint, NNRun
    from nnx.store.points import ResumePoint
    from nnx.utils.tensor_file import Header


@dataclass(frozen=True, kw_only=True, eq=False)
class ReconstructedBundle:
    """A bundle's model, ready to predict; ``resume`` continues its training.

    To serve it, keep ``model`` and drop this: it holds the training state in memory.
    ``calibrators`` are those of nnx-eval (whole chains too), or their records without it.
    """

    model: NNModel
    info: BundleInfo
    calibrators: tuple[Any, ...]
    _point: ResumePoint | None = field(default=None, repr=False)
    _refusal: str | None = field(default=None, repr=False)

    @property
    def capability(self) -> str:
        """``"resume"`` or ``"inference"``."""
        return self.info.capability

    @property
    def resume_checkpoint(self) -> str:
        """What a resumed run records as its parent checkpoint."""
        return f"bundle-{self.info.generation[:16]}_e{self.info.epoch}"

    def resume(self, params: NNTrainParams, **train_kwargs: Any) -> NNRun:
        """Train on from the bundle, exactly as the run that it holds would have.

        ``params`` as for ``NNModel.train``, without a run to resume from (one that names the
        bundle's run records that checkpoint as its parent), and further arguments as there. Optimizer, scheduler, scaler, random streams and components
        come from the bundle. ``BundleCapabilityError`` for a bundle that cannot be
        resumed; what does not fit is refused as in any resume, and changes nothing.
        """
        from nnx.engine.fit import fit
        from nnx.engine.owner import UpdateOwner
        from nnx.engine.request import FitRequest

        if self._refusal is not None or self._point is None:
            raise BundleCapabilityError(self._refusal or "this bundle holds no training state")
        named = params.resume_from_run_id
        if named not in (None, self.info.source_run_id):
            raise ValueError(
                f"params name another run to resume from ({named}); a bundle resumes its own, "
                f"{self.info.source_run_id}: leave it None"
            )
        params = dataclasses.replace(
            params,
            resume_from_run_id=self.info.source_run_id,
            resume_from_checkpoint=(
                self.resume_checkpoint if named is None else params.resume_from_checkpoint
            ),
            resume_mode="stateful",
        )
        # Optimizers take tensors over as they are; the bundle's stay for another resume.
        state = copy.deepcopy(self._point.training_state)
        point = dataclasses.replace(
            self._point, tag=str(params.resume_from_checkpoint), training_state=state
        )
        owner = UpdateOwner.of(
            train_kwargs.pop("train_step_fn", None), train_kwargs.pop("objective", None)
        )
        request = FitRequest(
            model=self.model, params=params, owner=owner, point=point, **train_kwargs
        )
        return fit(request)


def reconstruct_bundle(
    path: StrPath,
    *,
    factories: Mapping[tuple[str, int], ModelFactory] | None = None,
    components: Iterable[Any] | None = None,
    device: Any = None,
    batch_adapter: BatchAdapter | None = None,
    exclude_submodules: Sequence[str] = (),
    model_class: type[NNModel] = NNModel,
) -> ReconstructedBundle:
    """Validate a bundle and rebuild its model.

    ``factories`` (``{(id, version): factory}``) are the only ones that a registered
    module is built from; without them the process's registry is asked. ``components``
    are those of the run that is to be resumed, whose saved state is then checked too.
    ``device`` replaces the recorded one. ``exclude_submodules`` names top-level
    submodules that were attached to the net in training; such a model does not resume.
    ``model_class`` is what to build: a ``GenerativeNNModel`` gets its tokenizer.

    Raises ``BundleIntegrityError`` for a bundle that is not what it states and
    ``BundleReconstructionError``, which lists everything that is missing here, before a
    model is allocated.
    """
    bundle = open_generation(path, read_manifest(path))
    check_top(bundle.path)
    check_folder(bundle)
    header, weights = read_tensors(bundle, MODEL)
    check_loaded(bundle, header, weights)
    checkpoint = _checkpoint(bundle, weights)
    state = _training_state(bundle)
    problems = _problems(bundle, checkpoint, header, factories, components, state, device)
    problems += _unfit(checkpoint, header, tuple(exclude_submodules), bool(problems))
    if problems:
        raise BundleReconstructionError(problems)
    arguments = {"batch_adapter": batch_adapter, **_arguments(bundle, state, model_class)}
    model = _build(model_class, checkpoint, factories, device, tuple(exclude_submodules), arguments)
    refusal = _refusal(bundle, state, tuple(exclude_submodules))
    return ReconstructedBundle(
        model=model,
        info=bundle.info(verified=True),
        calibrators=records.build(bundle.calibrators),
        _point=None if refusal is not None else _point(bundle, checkpoint, state),
        _refusal=refusal,
    )


def _training_state(bundle: Bundle) -> dict[str, Any] | None:
    if bundle.record.training_state is None:
        return None
    from nnx.store import names

    _, tensors = read_tensors(bundle, TRAINING)
    state: Any = resolve(bundle.record.training_state, tensors)
    try:
        found = names.from_original_state(state)
        net = bundle.record.checkpoint["net_params"]
        return names.training_state(None if net is None else _net_params(net), found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BundleIntegrityError(
            f"the training state of {bundle.path} is not one ({type(error).__name__}: {error})"
        ) from error


def _net_params(state: Mapping[str, Any]) -> Any:
    from nnx.params import NNParams

    return NNParams.resolve_from_state(state)


def _checkpoint(bundle: Bundle, weights: Mapping[str, torch.Tensor]) -> NNCheckpoint:
    from nnx.store import NNCheckpoint, codec
    from nnx.store.errors import ResumePointError

    ordered = {name: weights[name] for name in bundle.record.net_state}
    plain = {
        **bundle.record.checkpoint, "version": codec.VERSION, "net_state": ordered,
        "training_state_id": None, "training_state_present": None,
    }  # fmt: skip
    try:
        return NNCheckpoint(**codec.fields_of(plain, bundle.path))
    except ResumePointError as error:
        raise BundleIntegrityError(str(error)) from error


# -- what is missing here ------------------------------------------------------------------


def _problems(
    bundle: Bundle,
    checkpoint: NNCheckpoint,
    header: Header,
    factories: Mapping[tuple[str, int], ModelFactory] | None,
    components: Iterable[Any] | None,
    state: Mapping[str, Any] | None,
    device: Any,
) -> list[str]:
    from nnx.models import registered_model_factories
    from nnx.params import ModelSpec, RuntimeModule
    from nnx.plugins import manager, siblings

    problems = []
    params = checkpoint.model_params
    net, wanted = params.net, params.device if device is None else device
    if isinstance(net, ModelSpec):
        known = registered_model_factories() if factories is None else factories.keys()
        if (net.id, net.version) not in known:
            shown = ", ".join(f"{id}@v{version}" for id, version in sorted(known)) or "none"
            problems.append(
                f"no model factory {net.id}@v{net.version} (there are: {shown}); pass it as "
                f"factories={{({net.id!r}, {net.version}): factory}}"
            )
    elif isinstance(net, RuntimeModule):
        problems.append(f"{net.module} is a runtime-only module, which nothing can rebuild")
    elif net is not None and not net.can_build:
        hint = siblings.hint_for_id(net.value) or "install the distribution that provides it"
        problems.append(f"no builder of the net {net.value!r}: {hint}")
    for index, transform in enumerate(checkpoint.transforms):
        if (transform.name, transform.version) not in manager.registry("transform"):
            hint = siblings.hint_for_id(transform.name) or "install the plugin that provides it"
            problems.append(
                f"the recorded transform {index}, {transform.name!r} of version "
                f"{transform.version}, is not registered: {hint}"
            )
    if not getattr(wanted, "is_available", True):
        problems.append(
            f"this machine has no device {wanted.value!r}, on which the model was saved; pass "
            "device=Devices.CPU"
        )
    return problems + _component_problems(components, state)


def _component_problems(
    components: Iterable[Any] | None, state: Mapping[str, Any] | None
) -> list[str]:
    """Saved state that the given components do not fit; the engine's own are its matter."""
    from nnx.components import ComponentRegistry, ComponentRestoreError

    saved = (state or {}).get("components")
    if components is None or not saved:
        return []
    given = list(components)
    registry = ComponentRegistry.discover(given)
    own = {n: e for n, e in saved.items() if n in registry.names or not n.startswith("nnx.")}
    try:
        registry.plan(own)
    except ComponentRestoreError as error:
        return list(error.problems)
    return []


def _unfit(
    checkpoint: NNCheckpoint, header: Header, exclude: tuple[str, ...], failed: bool
) -> list[str]:
    """What the configuration of a built-in net and its weights do not share."""
    from nnx.engine.unbuilt import UnfitConfigurationError, check_describes
    from nnx.enums import Nets

    net, net_params = checkpoint.model_params.net, checkpoint.net_params
    if failed or not isinstance(net, Nets):
        return []
    if net_params is None:
        return [f"the bundle has no net_params for {net.value}"]
    # Under the names of the checkpoint, which are today's.
    shapes = {name: tuple(tensor.shape) for name, tensor in checkpoint.net_state.items()}
    try:
        check_describes(net, net_params, shapes, has_transforms=bool(checkpoint.transforms))
    except UnfitConfigurationError as error:
        return [str(error)]
    return []


def _arguments(
    bundle: Bundle, state: Mapping[str, Any] | None, model_class: type[NNModel]
) -> dict[str, Any]:
    """What the saved components hold for the model's constructor."""
    import torch

    found: dict[str, bytes] = {}
    saved: Mapping[str, Any] = (state or {}).get("components") or {}
    for entry in saved.values():
        own: Any = entry.get("state") if isinstance(entry, dict) else None
        held: Any = own.get("artifacts") if isinstance(own, dict) else None
        for name in model_class.artifact_names if isinstance(held, dict) else ():
            data: Any = held.get(name)
            if not isinstance(data, torch.Tensor) or data.dtype != torch.uint8:
                raise BundleIntegrityError(f"{bundle.path}: {name} is not there as bytes")
            found[name] = bytes(data.numpy())
    try:
        return model_class.arguments_of(found)
    except ValueError as error:
        raise BundleIntegrityError(f"{bundle.path}: {error}") from error


def _build(
    model_class: type[NNModel],
    checkpoint: NNCheckpoint,
    factories: Mapping[tuple[str, int], ModelFactory] | None,
    device: Any,
    exclude: tuple[str, ...],
    arguments: Mapping[str, Any],
) -> NNModel:
    from nnx.models import only_factories

    with nullcontext() if factories is None else only_factories(factories):
        try:
            return model_class.from_checkpoint(
                checkpoint, device, exclude_submodules=exclude, **arguments
            )
        except ValueError as error:
            raise BundleReconstructionError([str(error)]) from error


# -- resuming ------------------------------------------------------------------------------


def _refusal(
    bundle: Bundle, state: Mapping[str, Any] | None, exclude: tuple[str, ...]
) -> str | None:
    """Why a bundle cannot resume, which its model does not need."""
    if bundle.record.capability != layout.RESUME or state is None:
        return (
            "this is an inference bundle: its checkpoint holds weights and no training state. "
            "Export one that training wrote, such as checkpoint='last'"
        )
    if state.get("optimizers_state") is not None:
        return (
            "this bundle is of a Trainer's run, whose named optimizers NNModel.train does not "
            "have; it serves inference. Resume the run itself with Trainer.train"
        )
    if state.get("resume_net_state") is not None:
        return (
            "this bundle holds a net that was converted when its training ended, which does not "
            "train on; it serves inference. Export an earlier checkpoint of the run to resume"
        )
    if exclude:
        return (
            f"this model was rebuilt without {', '.join(exclude)}, which its training had; it "
            "serves inference. Rebuild it whole to resume"
        )
    return None


def _point(
    bundle: Bundle, checkpoint: NNCheckpoint, state: Mapping[str, Any] | None
) -> ResumePoint:
    from nnx.store.points import ResumePoint

    recorded = bundle.record.training_state or {}
    generation, epoch = recorded.get("generation"), recorded.get("completed_epoch")
    return ResumePoint(
        run_id=bundle.record.run_id,
        tag=bundle.record.tag,
        checkpoint=checkpoint,
        training_state=dict(state or {}),
        manifest={
            "generation": generation if type(generation) is int else 0,
            "checkpoint_id": str(recorded.get("checkpoint_id")),
            "position": {
                "completed_epoch": epoch if type(epoch) is int else checkpoint.idp.epoch_idx
            },
        },
        bundle=bundle.manifest.generation,
    )
