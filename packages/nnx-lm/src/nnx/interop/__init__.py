"""Language models in the files of other programs: transformers, GGUF (llama.cpp), Ollama."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
