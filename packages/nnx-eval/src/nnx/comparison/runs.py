"""Observations out of stored runs: configuration, committed history and provenance alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nnx.comparison.lineage import Lineages
from nnx.comparison.observations import ComparisonError, Metric, Observation
from nnx.comparison.stored import StoredRun
from nnx.params import ModelSpec
from nnx.records import NNEvaluationDataPoint, NNIterationDataPoint

SPLITS = ("validation", "train")
SELECTIONS = ("last", "best")
_FIELDS = ("loss", "error", "accuracy", "f1", "recall", "precision")


def observations_from_runs(
    run_ids: Iterable[str],
    *,
    metric: Metric,
    split: str = "validation",
    selection: str = "last",
    root: str | None = None,
    replicate: str | None = "seed",
    config: Mapping[str, str] | None = None,
) -> list[Observation]:
    """One observation for each run, in the order of ``run_ids``.

    ``metric.name`` is a field of a record ("loss", "accuracy", ...), a declared metric or
    ``"extra/<name>"``. The value is that of the ``"last"`` committed epoch or of the ``"best"``
    one, which the run's monitor elected last; of the validation record or of the whole-epoch
    training summary. ``replicate="seed"`` keys runs by their training seed. ``config``
    labels every run instead of the digest of its configuration.

    A run that was trained without ``provenance=`` has an unknown status; if its history is
    committed by LAST, its value is unknown too. No checkpoint is opened.
    """
    ids = list(run_ids)
    if not isinstance(metric, Metric):
        raise ComparisonError(f"metric must be a Metric(name, direction), not {metric!r}")
    for name, given, known in (("split", split, SPLITS), ("selection", selection, SELECTIONS)):
        if given not in known:
            raise ComparisonError(f"{name} must be one of {', '.join(known)}, not {given!r}")
    if replicate not in ("seed", None):
        raise ComparisonError(f"replicate must be 'seed' or None, not {replicate!r}")
    if config is not None and (missing := [id for id in ids if id not in config]):
        raise ComparisonError(f"config has no label for {', '.join(missing)}")
    lineages = Lineages(root)
    found = []
    for id in ids:
        run = lineages.run(id)
        rule, value = _value(run, metric, split, selection)
        found.append(
            Observation(
                run_id=run.id,
                metric=metric,
                value=value,
                split=split,
                selection=rule,
                status=run.status,
                attempt_id=None if run.attempt is None else run.attempt.attempt_id,
                config=lineages.config_identity(run) if config is None else config[id],
                data=run.data,
                split_id=run.split_id,
                replicate=_replicate(run) if replicate else None,
            )
        )
    return found


def _replicate(run: StoredRun) -> str | None:
    """``seed=3``, and the seed of a model's initial weights where it is another."""
    training = run.run.trainer or run.run.train
    if training.seed is None:
        return None
    net = run.run.model.net
    if isinstance(net, ModelSpec) and net.seed != training.seed:
        return f"seed={training.seed},init_seed={net.seed}"
    return f"seed={training.seed}"


def _value(run: StoredRun, metric: Metric, split: str, selection: str) -> tuple[str, float | None]:
    """The selection rule by its full name, and the value it gives."""
    training = run.run.trainer or run.run.train
    rule = selection
    if selection == "best" and training.monitor is not None:
        monitor = training.monitor
        rule = f"best({monitor.key}, {monitor.resolve(training.metrics).mode}"
        rule += f", min_delta={monitor.min_delta:g})" if monitor.min_delta else ")"
    chosen: NNIterationDataPoint | None = None
    for record in run.epochs():
        elected = record.selection is not None and record.selection.improved
        if selection == "last" or elected:
            chosen = record
    if chosen is None:
        return rule, None
    return rule, _score(chosen.val_edp if split == "validation" else chosen.train_summary, metric)


def _score(record: NNEvaluationDataPoint | None, metric: Metric) -> float | None:
    if record is None:
        return None
    name = metric.name
    if name in _FIELDS:
        value = getattr(record, name)
    elif name.startswith("extra/"):
        value = record.extra.get(name.removeprefix("extra/"))
    else:
        value = record.metrics.get(name)
    return None if value is None else float(value)
