"""NNx: train, resume, inspect, adapt and ship PyTorch models from plain scripts.

Importing this package is cheap: it discovers plugins by name and loads neither
torch nor any extension. A name is imported when it is first used; the names
are declared in ``__init__.pyi``, and installed extensions publish more of them
through the ``nnx_public_names`` hook.
"""

from __future__ import annotations

import sys
from pkgutil import extend_path

import lazy_loader

__path__ = extend_path(__path__, __name__)

from nnx._version import __version__ as __version__
from nnx.plugins import manager as _manager
from nnx.plugins import siblings as _siblings

_core_getattr, _core_dir, _core_names = lazy_loader.attach_stub(__name__, __file__)

_plugins = _manager.start(_core_names)
if _siblings.Finder not in sys.meta_path:
    sys.meta_path.append(_siblings.Finder)


def __getattr__(name: str):
    if name in _core_names:
        return _core_getattr(name)
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _plugins.public_names():
        value = _plugins.public_name(name)
    else:
        value = _siblings.module(name)  # `nnx.history`, or the error that says how to get it
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*_core_names, *_plugins.public_names(), "__version__"})


__all__ = [*_core_names, *_plugins.public_names()]
