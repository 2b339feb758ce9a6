"""What nnx-eval contributes to NNx. Names only: nothing heavy is imported here."""

from __future__ import annotations
