"""What ``Nets.X(params=...)`` builds: core's own networks, and those of the registry "net"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nnx.enums import Nets
from nnx.params.net import NNParams, check_net_params
from nnx.plugins import manager
from nnx.plugins.registry import UnknownIdError, load_reference

if TYPE_CHECKING:
    from torch import nn

_OWN = {"feed_fwd": "nnx.nets.feed_fwd:FeedFwdNN", "conv": "nnx.nets.conv:ConvNN"}


def build_net(net: Nets, params: NNParams) -> nn.Module:
    """The network ``net`` of ``params``; see ``Nets.__call__``."""
    check_net_params(net, params)
    own = _OWN.get(net.value)
    try:
        build: Any = load_reference(own) if own else manager.registry("net").resolve(net.value)
    except UnknownIdError as error:
        raise ImportError(f"{net!r} cannot be built here: {error}") from None
    built: nn.Module = build(params=params)
    return built


def can_build(net: Nets) -> bool:
    """Whether the distribution that builds the network is here."""
    return net.value in _OWN or (net.value, 1) in manager.registry("net")
