"""What bundles refuse with."""

from __future__ import annotations

from collections.abc import Iterable

from nnx.errors import NNxError


class BundleError(ValueError, NNxError):
    """A bundle that cannot be written, or a path that is none."""


class BundleIntegrityError(BundleError):
    """A bundle whose content is not what it states, or that is not strict data."""


class BundleCapabilityError(BundleError):
    """A bundle that is sound and cannot do what is asked of it."""


class BundleReconstructionError(BundleError):
    """What this process lacks to rebuild a bundle's model; ``problems`` lists all of it."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        lines = "".join(f"\n  - {problem}" for problem in self.problems)
        super().__init__(f"the bundle cannot be rebuilt here:{lines}\nNothing was built.")
