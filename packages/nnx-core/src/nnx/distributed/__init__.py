"""Training one model in several processes, started by torchrun.

Every process calls the same script: :func:`init_process_group`, loaders from
:func:`train_loader` and :func:`validation_loader`, then
``model.train(params, distributed=DDP())``. Each committed update is the one of a
single process on the union of the processes' batches.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
