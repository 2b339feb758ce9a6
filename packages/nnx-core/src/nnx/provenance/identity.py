"""Names of data, as the manifest records them."""

from __future__ import annotations

from nnx.utils.identity import IdentityRef, hash_bytes, hash_file

__all__ = ["IdentityRef", "hash_bytes", "hash_file"]
