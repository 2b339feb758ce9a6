"""The records of calibrators that travel with a model: data, checked against it.

What they calibrate with is the matter of nnx-eval; here is what must be true of any of
them beside a model: it is categorical, the classes are the model's, and a model id that
is a fingerprint is the weights'. A whole chain (calibrator, conformal sets, abstention,
costs) travels in the same way: it names its model and holds its calibrator.
"""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from nnx.bundles.errors import BundleError, BundleIntegrityError
from nnx.params.loss import loss_id, spell_loss

_FORMAT = re.compile(r"nnx\.calibration/\d+")
_CHAIN = re.compile(r"nnx\.trust-chain/\d+")
_FINGERPRINT = re.compile(r"sha256:[0-9a-f]{64}")
_CATEGORICAL_LOSSES = ("cross_entropy", "nll", "negative_log_likelihood", "focal")


def record_of(calibrator: Any, index: int, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a calibrator object, which is to travel with a checkpoint's model."""
    state = getattr(calibrator, "state", None)
    if not callable(state):
        raise TypeError(
            f"calibrators[{index}] must be a fitted calibrator, not {type(calibrator).__name__}; "
            "a CalibrationFit gives its own with require()"
        )
    return check(json.loads(to_bytes(state())), f"calibrators[{index}]", checkpoint, BundleError)


def to_bytes(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, indent=2, sort_keys=True, allow_nan=False) + "\n").encode("utf-8")


def check(
    record: Any,
    where: str,
    checkpoint: Mapping[str, Any],
    error: type[BundleError] = BundleIntegrityError,
) -> dict[str, Any]:
    """The record itself, when it calibrates the checkpoint's model."""
    if isinstance(record, dict) and _CHAIN.fullmatch(str(record.get("format"))):
        calibrator: Any = record.get("calibrator")
        _check_calibrator(calibrator, f"the calibrator of {where}", checkpoint, error)
        if calibrator["model_id"] != record.get("model_id"):
            raise error(f"{where} and its calibrator are of different models")
    else:
        _check_calibrator(record, where, checkpoint, error)
    return record


def _check_calibrator(
    record: Any, where: str, checkpoint: Mapping[str, Any], error: type[BundleError]
) -> None:
    if not isinstance(record, dict) or not _FORMAT.fullmatch(str(record.get("format"))):
        raise error(f"{where} is not the record of a calibrator")
    labels = record.get("labels")
    if (
        not isinstance(labels, list)
        or len(labels) < 2
        or len(set(map(str, labels))) != len(labels)
        or not all(isinstance(label, str) for label in labels)
    ):
        raise error(f"{where} needs two or more distinct labels")
    if not isinstance(record.get("model_id"), str) or not record["model_id"]:
        raise error(f"{where} names no model")
    temperature: Any = record.get("temperature")
    if record.get("kind") == "temperature" and not (
        type(temperature) in (int, float) and math.isfinite(temperature) and temperature > 0
    ):
        raise error(f"{where} has no positive temperature")
    _check_model(labels, where, checkpoint, error)


def _check_model(
    labels: list[str], where: str, checkpoint: Mapping[str, Any], error: type[BundleError]
) -> None:
    params = checkpoint["model_params"]
    task, net = params.get("task") or {}, checkpoint["net_params"] or {}
    kind = task.get("kind")
    if kind != "categorical" and (kind or loss_id(params.get("loss")) not in _CATEGORICAL_LOSSES):
        what = kind or f"trained with {spell_loss(params.get('loss'))}"
        raise error(f"{where} calibrates a categorical model, and this one is {what}")
    width = task.get("num_outputs") or net.get("output_dim")
    if width is not None and width != len(labels):
        raise error(f"{where} is for {len(labels)} classes, the model has {width}")
    named = task.get("labels")
    if named is not None and list(named) != labels:
        raise error(f"{where} is for the classes {labels[:5]}, the task's are {list(named)[:5]}")


def summary(record: Mapping[str, Any]) -> dict[str, Any]:
    """What an inspection tells of a calibrator, or of the one that a chain begins with."""
    if _CHAIN.fullmatch(record["format"]):
        links = [name for name in ("conformal", "abstention", "costs") if record.get(name)]
        return {**summary(record["calibrator"]), "links": links}
    names = ("kind", "labels", "model_id", "temperature", "split")
    return {name: record[name] for name in names if name in record}


def fingerprint(record: Mapping[str, Any]) -> str | None:
    """The fingerprint of weights that a record is bound to; ``None`` for a declared id."""
    id = record["model_id"]
    return id if _FINGERPRINT.fullmatch(id) else None


def check_fingerprint(records: Mapping[str, Mapping[str, Any]], found: str) -> None:
    for name, record in records.items():
        bound = fingerprint(record)
        if bound is not None and bound != found:
            raise BundleIntegrityError(
                f"{name} was fitted for the weights {bound[:19]}..., the bundle's are "
                f"{found[:19]}...; export it with the model that it calibrates"
            )


def build(records: Mapping[str, Mapping[str, Any]]) -> tuple[Any, ...]:
    """The calibrators of checked records; the records themselves where nnx-eval is not there."""
    try:
        calibrator = importlib.import_module("nnx.calibration").calibrator_from_state
        chain = importlib.import_module("nnx.decisions").TrustChain.from_state
    except ImportError:
        return tuple(records.values())
    built = []
    for name, record in records.items():
        read = chain if _CHAIN.fullmatch(record["format"]) else calibrator
        try:
            built.append(read(record))
        except (ValueError, KeyError, TypeError) as error:
            raise BundleIntegrityError(f"{name} is no calibrator: {error}") from error
    return tuple(built)
