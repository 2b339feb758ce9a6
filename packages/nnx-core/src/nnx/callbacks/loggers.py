"""Stream an epoch's numbers to TensorBoard, Weights & Biases or MLflow.

None of them writes into the runs folder by itself: what lies there is a run.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from nnx.callbacks.base import Callback
from nnx.plugins.siblings import install_line
from nnx.utils.tables import flatten_dict

if TYPE_CHECKING:
    from nnx.callbacks.context import CallbackContext as _CallbackContext
    from nnx.records import NNEvaluationDataPoint

_FIELDS = ("loss", "error", "accuracy", "f1", "recall", "precision")


def epoch_scalars(ctx: _CallbackContext) -> dict[str, float]:
    """An epoch's numbers by tag: ``train/loss``, ``val/f1``, ``lr``, ``monitor/val.nll``, …

    ``train/*`` is the epoch's last batch, ``train_epoch/*`` the whole epoch.
    Fields a record does not have are left out, never zero.
    """
    idp = ctx.idp
    assert idp is not None
    scalars = {"lr": float(ctx.optimizer.param_groups[0]["lr"])}
    for name, optimizer in (ctx.optimizers or {}).items():
        scalars[f"lr/{name}"] = float(optimizer.param_groups[0]["lr"])
    scalars |= _record_scalars("train", idp.train_edp)
    scalars |= _record_scalars("val", idp.val_edp)
    scalars |= _record_scalars("train_epoch", idp.train_summary)
    if idp.selection is not None:
        if idp.selection.value is not None:
            scalars[f"monitor/{idp.selection.monitor.key}"] = idp.selection.value
        scalars["monitor/improved"] = float(idp.selection.improved)
    return scalars


def _record_scalars(prefix: str, record: NNEvaluationDataPoint | None) -> dict[str, float]:
    if record is None:
        return {}
    named = {field: getattr(record, field) for field in _FIELDS}
    for group in ("metrics", "extra"):
        for name, value in getattr(record, group).items():
            named[f"{group}/{name}" if name in named else name] = value
    return {f"{prefix}/{name}": value for name, value in named.items() if value is not None}


class TensorBoardCallback(Callback):
    """Write every epoch's numbers to a TensorBoard ``SummaryWriter``.

    ``log_dir`` is the writer's directory (``None``: ``tensorboard/<run id>``). ``flush_each_epoch`` makes each epoch visible at once. Raises
    ``ImportError`` when tensorboard is not installed.
    """

    rank_behaviour = "writer"

    def __init__(self, log_dir: str | None = None, flush_each_epoch: bool = True) -> None:
        _require("tensorboard", "TensorBoardCallback")
        self.log_dir = log_dir
        self.flush_each_epoch = flush_each_epoch
        self._writer: Any = None

    def on_epoch_end(self, ctx: _CallbackContext) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(self.log_dir or os.path.join("tensorboard", ctx.run.id))
        for tag, value in epoch_scalars(ctx).items():
            self._writer.add_scalar(tag, value, ctx.epoch)
        if self.flush_each_epoch:
            self._writer.flush()

    def on_train_end(self, ctx: _CallbackContext) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


class WandbCallback(Callback):
    """Log every epoch's numbers to Weights & Biases.

    ``project`` and ``init_kwargs`` go to ``wandb.init``, with the run's
    configuration as ``config`` unless given; the W&B run ends with the fit.
    ``wandb_run`` attaches to a run of the caller's, which stays open, as does a
    run that is active when the fit begins. Raises
    ``ImportError`` when wandb is not installed.
    """

    rank_behaviour = "writer"

    def __init__(
        self, project: str | None = None, wandb_run: Any = None, **init_kwargs: Any
    ) -> None:
        if wandb_run is None:
            _require("wandb", "WandbCallback")
        elif project is not None or init_kwargs:
            raise ValueError(
                "WandbCallback: wandb_run= is a run that was started already; project and "
                f"{', '.join(init_kwargs) or 'the arguments of wandb.init'} cannot apply to it"
            )
        self.project = project
        self.init_kwargs = init_kwargs
        self._attached = wandb_run
        self._owned = False
        self._run: Any = None

    def on_epoch_end(self, ctx: _CallbackContext) -> None:
        if self._run is None:
            self._run = self._attached or self._start(ctx)
        self._run.log({"epoch": ctx.epoch, **epoch_scalars(ctx)}, step=ctx.epoch)

    def on_train_end(self, ctx: _CallbackContext) -> None:
        run, self._run = self._run, None
        if run is not None and self._owned:
            run.finish()

    def _start(self, ctx: _CallbackContext) -> Any:
        import wandb

        active = wandb.run
        run = wandb.init(**{"project": self.project, "config": ctx.run.state(), **self.init_kwargs})
        self._owned = run is not active  # wandb hands out a run that is active already
        return run


class MLflowCallback(Callback):
    """Log every epoch's numbers, and the run's configuration as parameters, to MLflow.

    ``experiment`` is the experiment's name (``None``: ``MLFLOW_EXPERIMENT_NAME``, else
    MLflow's default one) and ``tracking_uri`` the server or store (``None``: MLflow's own
    setting). The MLflow run has the name of the run, or its id, and the tag ``nnx.run_id``;
    it ends with the fit, as failed where the fit failed. ``mlflow_run`` attaches to a run of
    the caller's, by its id or as MLflow gives it, which stays open, as does a run that is
    active when the fit begins. Characters that MLflow takes in no name become ``_``. Raises
    ``ImportError`` when mlflow is not installed.
    """

    rank_behaviour = "writer"

    def __init__(
        self,
        experiment: str | None = None,
        tracking_uri: str | None = None,
        mlflow_run: Any = None,
    ) -> None:
        if mlflow_run is not None and experiment is not None:
            raise ValueError(
                "MLflowCallback: mlflow_run= is a run that was started already; experiment="
                f"{experiment!r} cannot apply to it"
            )
        _require("mlflow", "MLflowCallback")
        self.experiment = experiment
        self.tracking_uri = tracking_uri
        self._attached = mlflow_run
        self._client: Any = None
        self._run_id: str | None = None
        self._owned = False

    def on_epoch_end(self, ctx: _CallbackContext) -> None:
        import time

        from mlflow.entities import Metric

        if self._run_id is None:
            self._begin(ctx)
        now = int(time.time() * 1000)
        scalars = {_mlflow_name(tag): value for tag, value in epoch_scalars(ctx).items()}
        if ctx.optimizers:
            del scalars["lr"]  # a store of files has no room for it beside "lr/<name>"
        metrics = [Metric(name, value, now, ctx.epoch) for name, value in scalars.items()]
        for some in _batches(metrics, 1000):
            self._client.log_batch(self._run_id, metrics=some)

    def on_train_end(self, ctx: _CallbackContext) -> None:
        run_id, self._run_id = self._run_id, None
        if run_id is not None and self._owned:
            self._client.set_terminated(run_id, "FAILED" if ctx.failed else "FINISHED")

    def _begin(self, ctx: _CallbackContext) -> None:
        import mlflow
        from mlflow.entities import Param

        self._client = mlflow.MlflowClient(self.tracking_uri)
        found = self._attached or (None if self.tracking_uri else mlflow.active_run())
        self._owned = found is None
        if found is None:
            found = self._client.create_run(
                self._experiment_id(), tags={"nnx.run_id": ctx.run.id},
                run_name=ctx.run.name or ctx.run.id,
            )  # fmt: skip
        self._run_id = found if isinstance(found, str) else found.info.run_id
        config = {_mlflow_name(key): value for key, value in flatten_dict(ctx.run.state()).items()}
        told = [Param(k, str(v)[:_MLFLOW_TEXT]) for k, v in config.items() if v is not None]
        for some in _batches(told, 100):
            self._client.log_batch(self._run_id, params=some)

    def _experiment_id(self) -> str:
        name = self.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
        found = self._client.get_experiment_by_name(name)
        return self._client.create_experiment(name) if found is None else found.experiment_id


_MLFLOW_TEXT = 6000  # characters in the value of a parameter


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w.\-/ ]", "_", name)[:250]


def _batches(items: list[Any], size: int) -> Iterator[list[Any]]:
    """What MLflow takes in one request."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _require(package: str, owner: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ImportError(
            f"{owner} needs {package}, which is not installed: {install_line('nnx-core', package)}"
        )
