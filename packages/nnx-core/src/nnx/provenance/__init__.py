"""What an experiment meant, and each of its executions, beside the run id.

A manifest states the intent (task, labels, model, data, splits, objective,
configuration) and has a fingerprint; an attempt is one call of ``train``.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "attempts": ["Attempt"],
        "comparing": ["FieldComparison", "ProvenanceComparison", "compare"],
        "manifest": ["FORMAT", "ExperimentManifest", "canonical_bytes"],
        "records": ["ProvenanceRecord", "load_provenance"],
        "identity": ["IdentityRef", "hash_bytes", "hash_file"],
    },
)
