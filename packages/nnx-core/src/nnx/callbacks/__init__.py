"""Callbacks: hooks into a fit, and the ones that come with it."""

from nnx.callbacks.base import Callback, FunctionCallback, as_callback, history_access_of
from nnx.callbacks.early_stopping import EarlyStopping
from nnx.callbacks.loggers import MLflowCallback, TensorBoardCallback, WandbCallback
from nnx.callbacks.lr_monitor import LRMonitor
from nnx.callbacks.model_checkpoint import ModelCheckpoint

__all__ = [
    "Callback",
    "EarlyStopping",
    "FunctionCallback",
    "LRMonitor",
    "MLflowCallback",
    "ModelCheckpoint",
    "TensorBoardCallback",
    "WandbCallback",
    "as_callback",
    "history_access_of",
]
