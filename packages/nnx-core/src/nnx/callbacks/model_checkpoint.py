"""Keep the weights of chosen epochs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nnx.callbacks.base import Callback
from nnx.store.paths import tag_name
from nnx.utils import validation as check

if TYPE_CHECKING:
    from nnx.callbacks.context import CallbackContext as _CallbackContext


class ModelCheckpoint(Callback):
    """Save ``checkpoints/<tag>_e<epoch>.pt`` at the given 0-based ``epochs``.

    The file holds weights, no training state: ``"<tag>_e<epoch>"`` as
    ``resume_from_checkpoint`` starts from its weights. It is written once the
    epoch has committed. Without ``epochs`` nothing is saved.
    """

    rank_behaviour = "every"

    def __init__(self, epochs: Sequence[int] | None = None, tag: str = "custom") -> None:
        owner = "ModelCheckpoint"
        self.epochs = [check.count(owner, "epochs", epoch, at_least=0) for epoch in epochs or ()]
        self.tag = check.text(owner, "tag", tag)
        try:
            tag_name(f"{self.tag}_e{max(self.epochs, default=0)}")
        except ValueError as error:
            raise ValueError(
                f"ModelCheckpoint.tag must be usable in a file name, not {tag!r}: {error}"
            ) from None

    def on_epoch_end(self, ctx: _CallbackContext) -> None:
        if ctx.epoch in self.epochs:
            ctx.defer_checkpoint(f"{self.tag}_e{ctx.epoch}")
