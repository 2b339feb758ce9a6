"""Stream an epoch's numbers to TensorBoard or Weights & Biases."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from nnx.callbacks.base import Callback
from nnx.plugins.siblings import install_line

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

    ``log_dir`` is the writer's directory (``None``: TensorBoard's own choice under
    ``runs/``). ``flush_each_epoch`` makes each epoch visible at once. Raises
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

            self._writer = SummaryWriter(self.log_dir)
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


def _require(package: str, owner: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ImportError(
            f"{owner} needs {package}, which is not installed: {install_line('nnx-core', package)}"
        )
