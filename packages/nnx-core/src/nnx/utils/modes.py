"""Borrow a network's mode, then give it back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


@contextmanager
def restored_modes(net: nn.Module) -> Iterator[None]:
    """Restore each submodule's own training flag on the way out, also on an error.

    A module that is in another mode is put back by its own ``train()``, outermost
    first, since it may do more than set the flag (adapters that merge in eval mode). A
    tree with mixed modes stays mixed.
    """
    flags = [(module, module.training) for module in net.modules()]
    try:
        yield
    finally:
        for module, training in flags:
            if module.training != training:
                module.train(training)
        for module, training in flags:
            if module.training != training:  # its own train() decides otherwise
                module.training = training


@contextmanager
def eval_mode(net: nn.Module) -> Iterator[None]:
    """Put ``net`` into eval mode; restore each submodule's own flag on the way out."""
    with restored_modes(net):
        net.eval()
        yield
