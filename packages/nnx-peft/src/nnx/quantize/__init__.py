"""Smaller weights through torchao: INT8 after training, int4 weights learned in training."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "ptq": ["quantize_int8"],
        "qat": ["QATLifecycleCallback", "qat_train_step_factory"],
    },
)
