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

    A module with a ``train()`` of its own is put back by it, since it may do more than
    set the flag (adapters that merge in eval mode); the flags of all others are written
    directly, so that a tree with mixed modes stays mixed and a module that was in its
    mode all the time is not called.
    """
    from torch import nn

    flags = [(module, module.training) for module in net.modules()]
    try:
        yield
    finally:
        for module, training in flags:
            if module.training != training and type(module).train is not nn.Module.train:
                module.train(training)
        for module, training in flags:
            module.training = training


@contextmanager
def eval_mode(net: nn.Module) -> Iterator[None]:
    """Put ``net`` into eval mode; restore each submodule's own flag on the way out."""
    with restored_modes(net):
        net.eval()
        yield
