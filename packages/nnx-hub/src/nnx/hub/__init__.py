"""Models and runs on the Hugging Face Hub, and models in the files of other runtimes.

``NNModel.save_pretrained``, ``from_pretrained``, ``push_to_hub``, ``to_onnx`` and
``export`` come from here.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
