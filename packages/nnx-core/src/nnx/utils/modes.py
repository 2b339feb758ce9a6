"""Borrow a network's mode, then give it back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


@contextmanager
def eval_mode(net: nn.Module) -> Iterator[None]:
    """Put ``net`` into eval mode; restore each submodule's own flag on the way out.

    The flags are written back directly, not through ``train()``, so a tree with
    mixed modes stays mixed and no override of ``train`` runs twice. They are
    restored when the body raises, too.
    """
    flags = [(module, module.training) for module in net.modules()]
    try:
        net.eval()
        yield
    finally:
        for module, training in flags:
            module.training = training
